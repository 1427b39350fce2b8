# Submits a job, watches it run, asks why a second one waits, cancels both, and shows what a refusal says.
#
#   apt-get install ruby ruby-grpc ruby-grpc-tools
#   grpc_tools_ruby_protoc -I ../../protos --ruby_out=gen --grpc_out=gen ../../protos/callboard/v1/*.proto   (after mkdir gen)
#   CALLBOARD_TOKEN_FILE=STATE_DIR/token ruby jobs.rb 127.0.0.1:7700

require "securerandom"
require_relative "callboard"

include Callboard::V1

client = Callboard::Client.new(ARGV[0] || ENV["CALLBOARD_CONTROLLER"] || "127.0.0.1:7700")

def gpus(number) = Resources.new(cpu_milli: 100, gpu_milli: 1000 * number)

def job(name, resources, **more)
  command = ["sh", "-c", "echo hello; sleep 600"]
  JobSpec.new(name: name, pool: "ruby", components: [ComponentSpec.new(name: "main", command: command, resources: resources, **more)])
end

# The request id makes a repeated call harmless: it returns the same job.
submit = lambda do |spec|
  client.call(:jobs, :submit_job, SubmitJobRequest.new(spec: spec, request_id: SecureRandom.uuid)).job
end

reached = lambda do |name, state, from|
  client.watch(from, "jobs/#{name}") { |event| break event.state if event.subject == "jobs/#{name}" && event.state == state }
end

revision = client.call(:scheduler, :get_stats, GetStatsRequest.new).stats.revision
client.call(:pools, :create_pool, CreatePoolRequest.new(pool_id: "ruby", spec: PoolSpec.new(nominal: Resources.new(gpu_milli: 2000), limited: ["gpu"])))

submit.call(job("rb-first", gpus(2)))
# A watch from a revision before the submit misses nothing.
puts "rb-first is #{reached.call('rb-first', 'RUNNING', revision)}"

second = submit.call(job("rb-second", gpus(1)))
puts "rb-second is #{second.state.to_s.delete_prefix('JOB_STATE_')}"
puts "why: #{client.call(:jobs, :explain_job, ExplainJobRequest.new(name: 'jobs/rb-second')).explanation.summary}"

begin
  submit.call(job("rb-wrong", gpus(1), workers: -1))
rescue Callboard::Error => error
  puts "refused: #{error.code} #{error.reason}"
  error.faults.each { |fault| puts "  #{fault.field}: #{fault.description}" }
end

%w[rb-second rb-first].each do |name|
  client.call(:jobs, :cancel_job, CancelJobRequest.new(name: "jobs/#{name}", reason: "the example ends"))
end
puts "rb-first is #{reached.call('rb-first', 'CANCELLED', revision)}"
