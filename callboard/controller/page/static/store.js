// What the page knows: the board, kept up to date by the controller's event stream, and when it was last heard of.

const EVENTS_KEPT = 2_000;
const SILENT_MS = 12_000; // the controller says something every 5 s
const HIDDEN_MS = 60_000; // a tab that nobody looks at for so long stops following, and goes on when it is seen
const MEASURED = 2_000;

/** What the board holds: rows by id. */
export const board = {
  nodes: new Map(), jobs: new Map(), pools: new Map(), groups: new Map(), events: [], figures: null,
};

export const session = { me: null, state: "loading", heard: 0, shift: 0, tries: 0, why: "" };

const listeners = new Set();
let position = "";
let source = null;
let timer = 0;
let hidden = 0;
let dirty = new Set();
let frame = 0;
let received = [];

/** Time of the controller, in ms. */
export const now = () => Date.now() + session.shift;

/** Calls `listen(kinds)` before the next paint whenever something changed; returns what ends it. */
export function subscribe(listen) {
  listeners.add(listen);
  return () => listeners.delete(listen);
}

/** Has what changed painted, in the next frame and once, however much comes before that. */
export function changed(...kinds) {
  for (const kind of kinds) dirty.add(kind);
  if (!frame) frame = requestAnimationFrame(paint);
}

const painted = new MessageChannel();
painted.port1.onmessage = ({ data }) => {
  // Posted in a frame, this comes after the frame was painted.
  const end = performance.now();
  for (const start of data) performance.measure("event-to-paint", { start, end });
  if (performance.getEntriesByName("event-to-paint").length > MEASURED) performance.clearMeasures("event-to-paint");
};

function paint() {
  frame = 0;
  const kinds = dirty;
  dirty = new Set();
  for (const listen of [...listeners]) listen(kinds);
  if (received.length) painted.port2.postMessage(received);
  received = [];
}

export async function ask(path, body, method = "POST", signal = null) {
  const request = { method, headers: { "x-callboard-page": "1" }, cache: "no-store", signal };
  if (body !== undefined) {
    request.headers["content-type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, request);
  } catch {
    throw Object.assign(new Error("the controller can't be reached"), { code: "UNREACHABLE" });
  }
  const plain = await answer.json().catch(() => ({}));
  if (answer.ok) return plain;
  if (answer.status === 401 && session.me) {
    session.me = null;
    session.why = plain.why ?? "";
    stop();
    setState("login");
  }
  throw Object.assign(new Error(plain.why ?? `the controller answered with ${answer.status}`), { code: plain.code });
}

/** Calls a method of a service. */
export const call = (service, method, request = {}) => ask(`api/call/${service}/${method}`, request);

/** Whether whoever reads may call a method. */
export const may = (method) => session.me?.may.includes(method) ?? false;

function setState(state) {
  if (session.state !== state) {
    session.state = state;
    changed("session");
  }
}

export async function start() {
  try {
    const me = await ask("api/me", undefined, "GET");
    if (!me.name) {
      session.me = null;
      session.facts = me;
      setState("login");
      return;
    }
    session.me = me;
    await load();
  } catch (error) {
    again(error);
  }
}

async function load() {
  const whole = await ask("api/board", undefined, "GET");
  board.nodes = new Map(whole.nodes.map((row) => [row.id, row]));
  board.jobs = new Map(whole.jobs.map((row) => [row.id, row]));
  board.pools = new Map(whole.pools.map((row) => [row.id, row]));
  board.groups = new Map(whole.groups.map((row) => [row.id, row]));
  board.events = whole.events;
  board.figures = whole.figures;
  position = `${whole.board}-${whole.seq}`;
  heard(whole.now);
  changed("nodes", "jobs", "pools", "groups", "events", "figures", "whole");
  follow();
}

function follow() {
  source?.close();
  source = new EventSource(`api/stream?from=${position}`);
  clearTimeout(timer);
  timer = setTimeout(silent, SILENT_MS);
  source.onopen = () => {
    clearTimeout(timer);
    session.tries = 0;
    // Nothing was missed: what happened meanwhile comes first. Until then the silence of before counts no more.
    session.heard = Date.now();
    setState("live");
  };
  source.onmessage = (event) => {
    const came = performance.now();
    position = event.lastEventId;
    apply(JSON.parse(event.data));
    received.push(came);
  };
  source.addEventListener("tick", (event) => heard(JSON.parse(event.data).now));
  source.addEventListener("reset", () => {
    source.close();
    load().catch(again);
  });
  source.addEventListener("refused", (event) => {
    source.close();
    const { why, code } = JSON.parse(event.data);
    if (code === "UNAUTHENTICATED") start();
    else again(new Error(why));
  });
  source.onerror = () => {
    source.close();
    again(new Error("the connection was lost"));
  };
}

function stop() {
  source?.close();
  clearTimeout(timer);
}

/** Tries again, sooner at first than later. */
function again(error) {
  source?.close();
  if (session.state === "login") return;
  session.why = error.message;
  setState(session.heard ? "lost" : "unreachable");
  const wait = Math.min(10_000, 500 * 2 ** session.tries) * (0.75 + Math.random() / 2);
  session.tries += 1;
  clearTimeout(timer);
  timer = setTimeout(retry, wait);
}

const silent = () => again(new Error("the controller is silent"));

/** Goes on where the stream stopped, or begins anew. */
export function retry() {
  clearTimeout(timer);
  if (!session.me || !position) start();
  else ask("api/me", undefined, "GET", AbortSignal.timeout(SILENT_MS)).then((me) => (me.name ? follow() : start()), again);
}

function heard(controllerNow) {
  session.heard = Date.now();
  session.shift = controllerNow - session.heard;
}

function put(kind, rows) {
  if (!rows) return;
  for (const row of rows) board[kind].set(row.id, row);
  changed(kind);
}

function apply(delta) {
  heard(delta.now);
  for (const kind of ["nodes", "jobs", "pools", "groups"]) put(kind, delta[kind]);
  for (const [kind, ids] of Object.entries(delta.gone ?? {})) {
    for (const id of ids) board[kind].delete(id);
    changed(kind);
  }
  if (delta.figures) {
    board.figures = delta.figures;
    changed("figures");
  }
  if (delta.events) {
    const newest = board.events.at(-1)?.id ?? 0;
    board.events.push(...delta.events.filter((event) => event.id > newest));
    if (board.events.length > EVENTS_KEPT * 1.2) board.events.splice(0, board.events.length - EVENTS_KEPT);
    changed("events");
  }
}

setInterval(() => {
  if (session.state === "live" && Date.now() - session.heard > SILENT_MS) silent();
  changed("second");
}, 1_000);

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) {
    hidden = setTimeout(() => {
      if (session.state === "live") {
        stop();
        session.state = "asleep";
      }
    }, HIDDEN_MS);
  } else if (session.state === "asleep") {
    follow();
  }
});

export async function logIn(body) {
  session.me = await ask("api/login", body);
  session.state = "loading";
  changed("session");
  await load();
}

export async function logOut() {
  await ask("api/logout", {});
  location.reload();
}
