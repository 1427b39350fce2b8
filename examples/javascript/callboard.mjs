// A small client of callboard: one channel, the token on every call, a deadline, errors with their details.
//
// The API is read from the .proto files when the program starts, so nothing is generated. `keepCase` leaves names as the
// documents write them (gpu_milli); without it they become gpuMilli. 64-bit integers are texts, because JavaScript's
// numbers hold 53 bits.

import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const PROTOS = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../protos");
const FILES = ["job", "pool", "node", "event", "scheduler"].map((name) => `callboard/v1/${name}.proto`);
const api = grpc.loadPackageDefinition(
  loader.loadSync(FILES, { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true }),
).callboard.v1;

// What a refusal carries in its trailer: google.rpc.Status, with what is wrong in each field.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message BadRequest { message FieldViolation { string field = 1; string description = 2; } repeated FieldViolation field_violations = 1; }
`, { keepCase: true }).root;

/** A call that the controller refused, or that did not reach it. */
export class CallboardError extends Error {
  constructor(error) {
    super(error.details || error.message);
    this.name = "CallboardError";
    this.code = grpc.status[error.code];
    this.reason = "";
    this.metadata = {};
    this.faults = [];
    const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
    if (!bytes) return; // Not from a controller: nobody answered, or something between did.
    for (const any of details.lookupType("Status").decode(bytes).details) {
      const name = any.type_url.split("/google.rpc.")[1];
      if (name === "ErrorInfo") Object.assign(this, (({ reason, metadata }) => ({ reason, metadata }))(details.lookupType(name).decode(any.value)));
      if (name === "BadRequest") this.faults = details.lookupType(name).decode(any.value).field_violations;
    }
  }
}

/** The token that a controller of this account wrote, or the one that you were given. */
function token() {
  if (process.env.CALLBOARD_TOKEN_FILE) return fs.readFileSync(process.env.CALLBOARD_TOKEN_FILE, "utf8").trim();
  return process.env.CALLBOARD_TOKEN ?? "";
}

/** Services of the controller at `address`, each method a function that returns a promise. */
export class Client {
  /**
   * @param {string} address "host:port"; without TLS on loopback only, since a token must not be seen.
   * @param {{ca?: string, timeoutMs?: number}} options `ca`: file with the authority of a controller with TLS.
   */
  constructor(address, { ca, timeoutMs = 30_000 } = {}) {
    this.timeoutMs = timeoutMs;
    this.metadata = new grpc.Metadata();
    if (token()) this.metadata.set("authorization", `Bearer ${token()}`);
    const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
    // Proxy variables must not capture calls inside a cluster.
    const options = { "grpc.enable_http_proxy": 0, "grpc.keepalive_time_ms": 30_000 };
    const service = (kind) => new api[kind](address, credentials, options);
    this.services = { jobs: service("JobService"), pools: service("PoolService"), events: service("EventService"), scheduler: service("SchedulerService") };
  }

  /** One call: `await client.call("jobs", "SubmitJob", {job: …})`. */
  call(service, method, request) {
    const deadline = Date.now() + this.timeoutMs;
    return new Promise((resolve, reject) =>
      this.services[service][method](request, this.metadata, { deadline }, (error, answer) =>
        error ? reject(new CallboardError(error)) : resolve(answer)));
  }

  /** Events from `revision` on, as they come: `for await (const event of client.watch(1, "jobs/a"))`. */
  async *watch(revision, subject) {
    const stream = this.services.events.Watch({ start_revision: revision, filter: { subject } }, this.metadata);
    try {
      for await (const answer of stream) yield* answer.events;
    } catch (error) {
      throw new CallboardError(error);
    } finally {
      stream.on("error", () => {}); // A cancelled stream ends with an error that says so.
      stream.cancel();
    }
  }

  close() {
    for (const service of Object.values(this.services)) service.close();
  }
}
