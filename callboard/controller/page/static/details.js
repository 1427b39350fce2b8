// The pages of one job and of one node: everything about it, why, what it prints, and what can be done.

import {
  attribute, badge, confirm, empty, fill, h, icon, jobLink, link, loading, nodeLink, section, showState, text, toast,
} from "./dom.js";
import { GpuMap } from "./gpus.js";
import { List, plain } from "./list.js";
import { Output } from "./output.js";
import { board, call, may, now, session } from "./store.js";
import {
  ENDED, JOB_STATES, NODE_STATES, WORKER_STATES, amount, amounts, bytes, count, counted, fromProto, ms, priority, resourceName,
  said, sentence, span, time, units,
} from "./words.js";
import { bar, eventLine, segments } from "./views.js";

const AGAIN_MS = 1_000; // between two looks at one thing, however often it changes
const WAITING_MS = 10_000; // why something waits changes without a change of its own

/** Facts as a list of terms; those without a value are left out. */
function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false)
    .map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

/** Looks at something of the API when its row changes, and not too often. */
function looker(look, failed) {
  let [last, timer, running, closed] = [0, 0, false, false];
  async function run() {
    timer = 0;
    running = true;
    last = Date.now();
    try {
      await look();
    } catch (error) {
      if (!closed) failed(error);
    }
    running = false;
  }
  return {
    soon() {
      if (timer || running || closed) return;
      timer = setTimeout(run, Math.max(0, last + AGAIN_MS - Date.now()));
    },
    older: (limit) => Date.now() - last > limit,
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}

async function act(words, done, run) {
  try {
    await run();
    toast(done);
  } catch (error) {
    toast(`${words}: ${error.message}.`, "fail");
  }
}

function gone(what, name, error) {
  return h("div", { class: "page" }, empty(`${what} ${name} can't be shown.`, `${error.message}.`, link(what === "Job" ? "#/jobs" : "#/nodes", "Back to the list")));
}

// ---- a job ----

export function jobPage(wanted) {
  const element = h("div", { class: "page" }, loading("the job"));
  const parts = {};
  let revision = null;
  let job = null;
  let state = "";

  const row = () => {
    for (const each of board.jobs.values()) if (each.uid === wanted) return each;
    // A name stands for the newest job that has it.
    let found;
    for (const each of board.jobs.values()) if (each.name === wanted && (!found || each.id > found.id)) found = each;
    return found;
  };

  const look = looker(async () => {
    const answer = await call("JobService", "GetJob", { name: `jobs/${wanted}` });
    job = answer.job;
    state = job.state.replace("JOB_STATE_", "");
    if (!parts.built) build();
    show();
    if (!ENDED.has(state)) showWhy((await call("JobService", "ExplainJob", { name: `jobs/${job.uid}` })).explanation);
    else parts.why.hidden = true;
  }, (error) => {
    if (!job) fill(element, gone("Job", wanted, error));
  });

  function build() {
    parts.built = true;
    parts.state = badge(said(JOB_STATES, state));
    parts.reason = h("p", { class: "lead" });
    parts.facts = h("div");
    parts.why = h("section", { class: "panel why-panel", hidden: true });
    parts.track = h("div", { class: "track tall" });
    parts.story = h("ol", { class: "story" });
    parts.failed = h("div");
    parts.yielded = h("div");
    parts.spec = h("pre", { class: "code" });
    parts.workers = new List({ columns: workerColumns(), label: "Workers", tall: "fit", of: (worker) => worker.generation });
    parts.workersTitle = h("h2");
    parts.output = may("ReadJobOutput") ? new Output(job) : null;
    parts.cancel = may("CancelJob") && h("button", { class: "danger", onclick: cancel }, "Cancel job…");
    parts.preempt = may("PreemptJob") && h("button", { class: "preempt", onclick: preempt }, "Preempt job…");
    fill(element,
      h("p", { class: "crumbs" }, link("#/jobs", "Jobs"), " / ", job.name.replace("jobs/", "")),
      h("header", { class: "page-head" }, h("h1", {}, job.name.replace("jobs/", "")), parts.state, h("span", { class: "grow" }), parts.preempt, parts.cancel),
      parts.reason, parts.facts, parts.why,
      h("section", { class: "panel" }, parts.workersTitle, parts.workers.element),
      parts.failed, parts.yielded,
      parts.output ? parts.output.element : section("Output", h("p", { class: "note" }, "What jobs print is not for your role.")),
      h("section", { class: "panel" }, h("h2", {}, "Attempts over time"), parts.track, parts.story),
      h("details", { class: "panel" }, h("summary", {}, h("h2", {}, "What was asked")), parts.spec));
  }

  function show() {
    const spec = job.spec;
    showState(parts.state, said(JOB_STATES, state));
    text(parts.reason, sentence(job.state_reason));
    if (parts.cancel) parts.cancel.hidden = ENDED.has(state);
    if (parts.preempt) parts.preempt.hidden = !["STARTING", "RUNNING"].includes(state);
    const started = ms(job.running_time);
    const kill = ms(job.kill_time);
    fill(parts.facts, facts([
      ["Pool", link(`#/jobs?pool=${encodeURIComponent(spec.pool)}`, spec.pool)],
      ["Priority", priority(Number(spec.priority_milli ?? 5000))],
      ["Submitted", `${time(ms(job.submit_time), now())}`],
      started ? ["Running since", time(started, now())] : ["Running since", "never ran"],
      ["Ended", job.end_time && time(ms(job.end_time), now())],
      ["Attempt", count(job.attempt ?? 0)],
      ["Yielded", job.preemptions ? counted(job.preemptions, "time") : ""],
      ["Restarted", job.restarts ? counted(job.restarts, "time") : ""],
      ["Killed at the latest", kill ? time(kill, now()) : ""],
      ["Exit code", job.exit_code || ""],
      ["Checkpoint", job.checkpoint_lost ? `lost: ${job.checkpoint_lost}` : job.has_checkpoint ? "kept" : ""],
      ["Labels", Object.entries(spec.labels ?? {}).map(([key, value]) => `${key}=${value}`).join(", ")],
      ["Placement groups", (job.placement_groups ?? []).slice(0, 6).join(", ") + ((job.placement_groups ?? []).length > 6 ? " …" : "")],
      ["Id", h("span", { class: "id" }, job.uid)],
    ]));
    const workers = job.workers ?? [];
    parts.workers.scroller.style.height = `${Math.min(12, Math.max(1, workers.length)) * 30 + 34}px`;
    parts.workers.show(workers.map((worker) => ({ ...worker, id: worker.generation })));
    text(parts.workersTitle, state === "PENDING" && workers.length ? `Workers of attempt ${job.attempt}` : "Workers");
    parts.workers.element.parentElement.hidden = !workers.length;
    showStory();
    showFailures();
    const victims = job.victims ?? [];
    fill(parts.yielded, victims.length ? section("Jobs that yielded to it", victimList(victims)) : null);
    text(parts.spec, JSON.stringify(tidied(spec), null, 2));
    parts.output?.follow(job, state);
  }

  function showStory() {
    const history = job.history ?? [];
    const story = history.map((line) => [ms(line.time), line.state]);
    const first = story[0]?.[0] ?? now();
    const end = ms(job.end_time) || now();
    segments(parts.track, { story, ended: ms(job.end_time) }, Math.max(1000, end - first), end);
    fill(parts.story, history.map((line, place) => {
      const until = story[place + 1]?.[0] ?? (ENDED.has(line.state) ? 0 : now());
      return h("li", {}, h("time", {}, time(ms(line.time), now())), badge(said(JOB_STATES, line.state)),
        h("span", { class: "note" }, until ? span(until - ms(line.time)) : ""), h("span", { class: "why" }, line.reason));
    }).reverse());
  }

  function showFailures() {
    const failures = job.failures ?? [];
    if (!failures.length && !job.traceback && !job.stderr_tail) {
      parts.failed.replaceChildren();
      return;
    }
    fill(parts.failed, section("What failed",
      h("ol", { class: "story" }, failures.map((failure) => h("li", {}, h("time", {}, time(ms(failure.time), now())),
        h("span", {}, `${failure.worker}${failure.cause ? " (first cause)" : ""}`),
        h("span", { class: "note" }, failure.node_id ? nodeLink(failure.node_id) : "", ` attempt ${failure.attempt}`),
        h("span", { class: "why" }, failure.message)))),
      job.traceback && h("pre", { class: "code" }, job.traceback),
      job.stderr_tail && [h("h3", {}, "End of its standard error"), h("pre", { class: "code" }, job.stderr_tail)]));
  }

  function showWhy(account) {
    const reasons = account.reasons ?? [];
    const help = account.unblock ?? [];
    const victims = account.victims ?? [];
    const waits = state === "PENDING" || (job.waiting_for ?? []).length;
    parts.why.hidden = !waits;
    if (!waits) return;
    fill(parts.why,
      h("h2", {}, state === "PENDING" ? "Why it waits" : "Why it has fewer workers than it should"),
      h("p", { class: "lead" }, reasons.length ? "" : sentence(account.summary?.replace(`${job.spec.name} waits: `, "")),
        account.queue_position ? ` It is number ${account.queue_position} in the queue.` : ""),
      reasonList(reasons.slice(0, REASONS_FIRST)),
      reasons.length > REASONS_FIRST ? h("details", { open: parts.why.querySelector("details")?.open },
        h("summary", {}, counted(reasons.length - REASONS_FIRST, "more reason")),
        reasonList(reasons.slice(REASONS_FIRST, REASONS_MOST)),
        reasons.length > REASONS_MOST && h("p", { class: "note" }, `All of them: callboard job explain ${job.uid}`)) : null,
      help.length ? [h("h3", {}, `What would help${help.length > 1 ? ", all together" : ""}`), h("ul", {}, help.map((line) => h("li", {}, line)))] : null,
      victims.length ? [h("h3", {}, "Who yields to it"), victimList(victims)] : null);
  }

  async function preempt() {
    const name = job.name.replace("jobs/", "");
    const filled = await confirm({
      title: `Preempt ${name}?`, action: "Preempt job",
      lines: [`Its ${counted((job.workers ?? []).length, "worker")} will be asked to yield, and then ended. It starts again when there is room.`],
      fields: [{ name: "reason", label: "Reason", hint: "For the event log; may be left empty." }],
    });
    if (!filled) return;
    await act(`${name} was not preempted`, `${name} yields.`, () =>
      call("JobService", "PreemptJob", { name: `jobs/${job.uid}`, reason: filled.reason || `preempted on the page by ${session.me.name}` }));
    look.soon();
  }

  async function cancel() {
    const name = job.name.replace("jobs/", "");
    const filled = await confirm({
      title: `Cancel ${name}?`, action: "Cancel job", danger: true,
      lines: [`Its ${counted((job.workers ?? []).length, "worker")} will be asked to stop, then ended. It will not start again.`],
      fields: [{ name: "reason", label: "Reason", hint: "For the event log; may be left empty." }],
    });
    if (!filled) return;
    await act(`${name} was not cancelled`, `${name} is being cancelled.`, () =>
      call("JobService", "CancelJob", { name: `jobs/${job.uid}`, reason: filled.reason || `cancelled on the page by ${session.me.name}` }));
    look.soon();
  }

  return {
    element,
    update(kinds) {
      const known = row();
      const latest = known ? `${known.revision}/${known.state}/${known.ready}` : "none";
      if (latest !== revision || kinds.has("whole")) {
        revision = latest;
        look.soon();
      } else if (kinds.has("second") && job && !ENDED.has(state) && look.older(WAITING_MS)) {
        look.soon();
      }
    },
    close() {
      look.close();
      parts.workers?.close();
      parts.output?.close();
    },
  };
}

const REASONS_FIRST = 6;
const REASONS_MOST = 200;
const reasonList = (reasons) => (reasons.length
  ? h("ul", { class: "reasons" }, reasons.map((reason) => h("li", {}, reason.message))) : null);

function workerColumns() {
  const devices = (worker) => (worker.allocation?.devices ?? [])
    .map((share) => `${share.index ?? 0}${share.milli < 1000 ? ` (${units(share.milli)})` : ""}`).join(", ");
  return [
    { title: "State", width: "118px", cell: () => h("div", {}, h("span")),
      show: (cell, worker) => showState(cell.firstChild, said(WORKER_STATES, worker.state.replace("WORKER_STATE_", ""))) },
    plain("Worker", "minmax(90px, .8fr)", (worker) => `${worker.key.component}/${worker.key.rank ?? 0}`),
    { title: "Node", width: "minmax(90px, .8fr)", cell: () => h("div", {}, h("a")), show: (cell, worker) => {
      const node = worker.allocation?.node_id ?? "";
      text(cell.firstChild, node || "–");
      attribute(cell.firstChild, "href", node ? `#/nodes/${encodeURIComponent(node)}` : null);
    } },
    plain("GPUs", "minmax(60px, .5fr)", (worker) => devices(worker) || "–"),
    plain("Holds", "minmax(110px, 1fr)", (worker) => amounts(fromProto(worker.allocation?.resources)), { phone: false }),
    plain("Pid", "72px", (worker) => worker.pid || "–", { end: true, phone: false }),
    plain("Start took", "88px", (worker) => (Number(worker.start_ms ?? 0) ? `${units(Number(worker.start_ms))} s` : "–"), { end: true, phone: false }),
    plain("Why", "minmax(120px, 1.6fr)", (worker) => [worker.state_reason, worker.checkpoint_lost && `checkpoint lost: ${worker.checkpoint_lost}`]
      .filter(Boolean).join("; "), { phone: false, hint: (worker) => worker.cold_reason ? `Started cold: ${worker.cold_reason}` : worker.state_reason }),
  ];
}

function victimList(victims) {
  return h("ul", { class: "reasons" }, victims.slice(-20).reverse().map((victim) => h("li", {},
    h("span", { class: "kind" }, victim.victim),
    h("span", {}, victim.reason, victim.yield_ms !== undefined ? ` Took ${units(Number(victim.yield_ms))} s` : " Under way",
      victim.outcome ? ` (${victim.outcome.toLowerCase()}).` : "."))));
}

/** A spec without what was not stated, and with lines instead of JSON in texts. */
function tidied(value) {
  if (Array.isArray(value)) return value.map(tidied);
  if (value === null || typeof value !== "object") return value;
  const kept = Object.entries(value).filter(([, each]) => each !== "" && each !== "[]" && each !== "{}");
  return Object.fromEntries(kept.map(([key, each]) => [key, tidied(each)]));
}

// ---- a node ----

export function nodePage(id) {
  const element = h("div", { class: "page" }, loading("the node"));
  const parts = {};
  let known = null;
  let node = null;
  let map = null;

  const look = looker(async () => {
    node = (await call("NodeService", "GetNode", { name: `nodes/${id}` })).node;
    if (!parts.built) build();
    show();
  }, (error) => {
    if (!node) fill(element, gone("Node", id, error));
  });

  function build() {
    parts.built = true;
    map = new GpuMap({ nodes: () => [board.nodes.get(id)].filter(Boolean), large: true });
    parts.state = badge(said(NODE_STATES, stateOf()));
    parts.reason = h("p", { class: "lead" });
    parts.trouble = h("div");
    parts.facts = h("div");
    parts.bars = h("div", { class: "quotas" });
    parts.workers = h("div");
    parts.events = h("ol", { class: "short feed" });
    parts.cordon = may("CordonNode") && h("button", { onclick: cordon }, "Cordon…");
    parts.uncordon = may("UncordonNode") && h("button", { onclick: uncordon }, "Uncordon…");
    parts.drain = may("DrainNode") && h("button", { class: "danger", onclick: drain }, "Drain…");
    fill(element,
      h("p", { class: "crumbs" }, link("#/nodes", "Nodes"), " / ", id),
      h("header", { class: "page-head" }, h("h1", {}, id), parts.state, h("span", { class: "grow" }),
        parts.uncordon, parts.cordon, parts.drain),
      parts.reason, parts.trouble, parts.facts,
      (node.devices ?? []).length ? section("GPUs", map.element) : null,
      section("Use", parts.bars),
      section("Workers with GPUs", parts.workers),
      section("Latest events", parts.events));
  }

  const stateOf = () => node.state.replace("NODE_STATE_", "");

  function show() {
    const state = stateOf();
    showState(parts.state, said(NODE_STATES, state));
    text(parts.reason, sentence(node.state_reason));
    const closed = state === "CORDONED" || state === "DRAINING";
    const there = state !== "LEFT" && state !== "LOST";
    if (parts.cordon) parts.cordon.hidden = closed || !there;
    if (parts.uncordon) parts.uncordon.hidden = !closed;
    if (parts.drain) parts.drain.hidden = state === "DRAINING" || !there;
    const quarantined = node.quarantined_workers ?? [];
    fill(parts.trouble,
      node.ray_fault && h("div", { class: "problem-box" }, icon("cross"), h("p", {}, `It is in no Ray cluster: ${node.ray_fault.message}`)),
      quarantined.map((each) => h("div", { class: "problem-box" }, icon("cross"), h("p", {},
        `${each.worker.job} ${each.worker.component}/${each.worker.rank ?? 0} could not be proved gone`,
        each.pid ? ` (pid ${each.pid})` : "", `: ${each.reason}`))));
    const model = node.devices?.[0]?.device;
    fill(parts.facts, facts([
      ["Rank", count(node.rank ?? 0)], ["Host", node.hostname], ["Node group", node.node_group],
      ["GPU model", model ? `${model.model || "not said"}${node.simulated ? " (simulated)" : ""}` : ""],
      ["GPU memory", Number(model?.memory_bytes ?? 0) ? bytes(Number(model.memory_bytes)) : ""],
      ["Joined", time(ms(node.join_time), now())], ["Workers run", node.runtime === "ray" ? "in Ray" : "as plain processes"],
      ["Ray", [node.ray_version, node.ray_head && "head"].filter(Boolean).join(", ")], ["Python", node.python_version],
      ["Agent", [node.version, node.agent_pid && `pid ${node.agent_pid}`].filter(Boolean).join(", ")],
      ["Address", node.address], ["Killed at the latest", node.kill_time && time(ms(node.kill_time), now())],
      ["Labels", Object.entries(node.labels ?? {}).map(([key, value]) => `${key}=${value}`).join(", ")],
    ]));
    const [capacity, used, held, lost] = [node.capacity, node.used, node.held, node.quarantined].map(fromProto);
    fill(parts.bars, Object.keys(capacity).filter((what) => capacity[what]).map((what) => {
      const shown = bar("");
      shown.show([["used", used[what] ?? 0], ["held", held[what] ?? 0], ["lost", lost[what] ?? 0]], capacity[what],
        `${resourceName(what)}: ${amount(what, used[what] ?? 0)} of ${amount(what, capacity[what])} in use`);
      return h("div", { class: "quota" }, h("span", {}, resourceName(what)), shown.element,
        h("span", { class: "end" }, `${amount(what, used[what] ?? 0)} / ${amount(what, capacity[what])}`));
    }));
    showWorkers();
    showEvents();
    map.draw();
  }

  function showWorkers() {
    const devices = board.nodes.get(id)?.devices ?? [];
    const held = new Map();
    devices.forEach(([, , , ...users], index) => users.forEach(([job, component, rank, milli]) => {
      const key = `${job} ${component}/${rank}`;
      if (!held.has(key)) held.set(key, { job: board.jobs.get(job), worker: `${component}/${rank}`, on: [] });
      held.get(key).on.push(milli < 1000 ? `GPU ${index} (${units(milli)})` : `GPU ${index}`);
    }));
    fill(parts.workers, held.size ? h("ul", { class: "reasons" }, [...held.values()].map((each) => h("li", {},
      each.job ? jobLink(each.job) : "a job", h("span", { class: "kind" }, each.worker),
      h("span", { class: "note" }, each.on.join(", ")), each.job && badge(said(JOB_STATES, each.job.state)))))
      : empty("No worker has a GPU of this node."));
  }

  function showEvents() {
    const own = board.events.filter((event) => event.subject === `nodes/${id}` || event.facts?.node === id).slice(-12).reverse();
    fill(parts.events, own.length ? own.map(eventLine) : empty("Nothing has happened lately."));
  }

  async function cordon() {
    const filled = await confirm({
      title: `Cordon ${id}?`, action: "Cordon", lines: ["Nothing new will start on it. What runs goes on."],
    });
    if (filled) await act(`${id} was not cordoned`, `${id} is cordoned.`, () => call("NodeService", "CordonNode", { name: `nodes/${id}` }));
    look.soon();
  }

  async function uncordon() {
    const filled = await confirm({
      title: `Uncordon ${id}?`, action: "Uncordon", lines: ["It will take work again. A drain that is under way ends."],
    });
    if (filled) await act(`${id} was not uncordoned`, `${id} takes work again.`, () => call("NodeService", "UncordonNode", { name: `nodes/${id}` }));
    look.soon();
  }

  async function drain() {
    const workers = board.nodes.get(id)?.workers ?? 0;
    const filled = await confirm({
      title: `Drain ${id}?`, action: "Drain", danger: true,
      lines: [`Nothing new will start on it, and its ${counted(workers, "worker")} will yield. Their jobs wait for room elsewhere.`],
      fields: [
        { name: "minutes", label: "Minutes until it must be empty", type: "number", min: 0, hint: "Empty: by the timeouts of the jobs." },
        { name: "reason", label: "Reason", hint: "For the event log; may be left empty." },
      ],
    });
    if (filled) {
      const within = Math.round(Number(filled.minutes || 0) * 60_000);
      await act(`${id} was not drained`, `${id} is being drained.`, () => call("NodeService", "DrainNode",
        { name: `nodes/${id}`, within_ms: String(within), reason: filled.reason || `drained on the page by ${session.me.name}` }));
    }
    look.soon();
  }

  return {
    element,
    update(kinds) {
      const row = board.nodes.get(id);
      if (row !== known || kinds.has("whole")) {
        known = row;
        look.soon();
      }
      if (!parts.built) return;
      if (kinds.has("jobs") || kinds.has("nodes")) showWorkers();
      if (kinds.has("events")) showEvents();
      map.update(kinds);
    },
    close() {
      look.close();
      map?.close();
    },
  };
}
