# A small client of callboard: one channel, the token on every call, a deadline, errors with their details.
#
# The stubs are generated from the .proto files beside this one (see jobs.rb for the command).

$LOAD_PATH.unshift(File.join(__dir__, "gen"))
require "grpc"
require "google/protobuf/well_known_types"
require "google/rpc/status_pb"
require "google/rpc/error_details_pb"
%w[job pool event scheduler].each { |name| require "callboard/v1/#{name}_services_pb" }

module Callboard
  # A call that the controller refused, or that did not reach it.
  class Error < StandardError
    attr_reader :code, :reason, :metadata, :faults

    def initialize(error)
      super(error.details)
      @code = GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == error.code }
      @reason, @metadata, @faults = "", {}, []
      bytes = error.metadata["grpc-status-details-bin"] or return # Nobody answered, or something between did.
      Google::Rpc::Status.decode(bytes).details.each do |any|
        case any.type_name
        when "google.rpc.ErrorInfo"
          info = any.unpack(Google::Rpc::ErrorInfo)
          @reason, @metadata = info.reason, info.metadata.to_h
        when "google.rpc.BadRequest"
          @faults = any.unpack(Google::Rpc::BadRequest).field_violations.to_a
        end
      end
    end
  end

  # Services of the controller at an address ("host:port"); without TLS on loopback only, since a token must not be seen.
  class Client
    def initialize(address, ca: nil, timeout: 30)
      token = ENV["CALLBOARD_TOKEN_FILE"] ? File.read(ENV["CALLBOARD_TOKEN_FILE"]).strip : ENV["CALLBOARD_TOKEN"]
      @metadata = token ? { "authorization" => "Bearer #{token}" } : {}
      @timeout = timeout
      credentials = ca ? GRPC::Core::ChannelCredentials.new(File.read(ca)) : :this_channel_is_insecure
      # Proxy variables must not capture calls inside a cluster.
      @services = { jobs: V1::JobService, pools: V1::PoolService, events: V1::EventService, scheduler: V1::SchedulerService }
        .transform_values { |kind| kind::Stub.new(address, credentials, channel_args: { "grpc.enable_http_proxy" => 0 }) }
    end

    # One call: `client.call(:jobs, :submit_job, V1::SubmitJobRequest.new(…))`.
    def call(service, method, request)
      @services[service].public_send(method, request, metadata: @metadata, deadline: Time.now + @timeout)
    rescue GRPC::BadStatus => error
      raise Error, error
    end

    # Events of a subject from a revision on, as they come, until the block breaks.
    def watch(revision, subject)
      request = V1::WatchRequest.new(start_revision: revision, filter: V1::EventFilter.new(subject: subject))
      operation = @services[:events].watch(request, metadata: @metadata, return_op: true)
      operation.execute.each { |answer| answer.events.each { |event| yield event } }
    rescue GRPC::BadStatus => error
      raise Error, error
    ensure
      operation&.cancel
    end
  end
end
