// Submits a job, watches it run, asks why a second one waits, cancels both, and shows what a refusal says.
//
//   npm ci
//   CALLBOARD_TOKEN_FILE=STATE_DIR/token node jobs.mjs 127.0.0.1:7700

import { randomUUID } from "node:crypto";
import { CallboardError, Client } from "./callboard.mjs";

const client = new Client(process.argv[2] ?? process.env.CALLBOARD_CONTROLLER ?? "127.0.0.1:7700");

const gpu = (n) => ({ cpu_milli: 100, gpu_milli: 1000 * n });
const job = (name, resources) => ({
  name,
  pool: "javascript",
  components: [{ name: "main", command: ["sh", "-c", "echo hello; sleep 600"], resources }],
});

async function submit(spec) {
  // The request id makes a repeated call harmless: it returns the same job.
  const { job } = await client.call("jobs", "SubmitJob", { spec, request_id: randomUUID() });
  return job;
}

async function until(name, states, from) {
  for await (const event of client.watch(from, `jobs/${name}`)) {
    if (event.subject === `jobs/${name}` && states.includes(event.state)) return event;
  }
}

try {
  const { stats } = await client.call("scheduler", "GetStats", {});
  await client.call("pools", "CreatePool", { pool_id: "javascript", spec: { nominal: { gpu_milli: 2000 }, limited: ["gpu"] } });

  await submit(job("js-first", gpu(2)));
  // A watch from a revision before the submit misses nothing.
  console.log("js-first is", (await until("js-first", ["RUNNING"], stats.revision)).state);

  const second = await submit(job("js-second", gpu(1)));
  console.log("js-second is", second.state.replace("JOB_STATE_", ""));
  const { explanation } = await client.call("jobs", "ExplainJob", { name: "jobs/js-second" });
  console.log("why:", explanation.summary);

  try {
    await submit({ ...job("js-wrong", gpu(1)), components: [{ name: "1", command: ["true"], workers: -1 }] });
  } catch (error) {
    if (!(error instanceof CallboardError)) throw error;
    console.log("refused:", error.code, error.reason);
    for (const { field, description } of error.faults) console.log(`  ${field}: ${description}`);
  }

  for (const name of ["js-second", "js-first"]) await client.call("jobs", "CancelJob", { name: `jobs/${name}`, reason: "the example ends" });
  console.log("js-first is", (await until("js-first", ["CANCELLED"], stats.revision)).state);
} finally {
  client.close();
}
