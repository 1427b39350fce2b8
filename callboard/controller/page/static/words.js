// Words, units and signs of the page: how states, amounts and times are said.

/** State of a job → the word for it, the shape beside it, and its tone. Waiting first: the order of lists. */
export const JOB_STATES = {
  PENDING: { word: "Waiting", shape: "ring", tone: "wait" },
  STARTING: { word: "Starting", shape: "half", tone: "start" },
  RUNNING: { word: "Running", shape: "dot", tone: "run" },
  PREEMPTING: { word: "Yielding", shape: "down", tone: "yield" },
  RECOVERING: { word: "Recovering", shape: "turn", tone: "recover" },
  STOPPING: { word: "Stopping", shape: "square", tone: "stop" },
  SUCCEEDED: { word: "Succeeded", shape: "check", tone: "done" },
  FAILED: { word: "Failed", shape: "cross", tone: "fail" },
  CANCELLED: { word: "Cancelled", shape: "bar", tone: "done" },
};

export const NODE_STATES = {
  READY: { word: "Ready", shape: "dot", tone: "run" },
  JOINING: { word: "Joining", shape: "half", tone: "start" },
  CORDONED: { word: "Cordoned", shape: "bar", tone: "wait" },
  DRAINING: { word: "Draining", shape: "down", tone: "yield" },
  SUSPECT: { word: "Not heard of", shape: "ring", tone: "recover" },
  LOST: { word: "Lost", shape: "cross", tone: "fail" },
  LEFT: { word: "Left", shape: "bar", tone: "done" },
};

export const WORKER_STATES = {
  ASSIGNED: { word: "Assigned", shape: "ring", tone: "wait" },
  STARTING: { word: "Starting", shape: "half", tone: "start" },
  READY: { word: "Ready", shape: "dot", tone: "run" },
  STOPPING: { word: "Stopping", shape: "square", tone: "stop" },
  STOPPED: { word: "Stopped", shape: "check", tone: "done" },
  QUARANTINED: { word: "Quarantined", shape: "cross", tone: "fail" },
  LOST: { word: "Lost", shape: "cross", tone: "fail" },
};

export const GROUP_STATES = {
  NOMINATED: { word: "Planned", shape: "ring", tone: "wait" },
  CREATING: { word: "Being made", shape: "half", tone: "start" },
  READY: { word: "Ready", shape: "dot", tone: "run" },
  REMOVING: { word: "Being removed", shape: "square", tone: "stop" },
  BACKOFF: { word: "Tried again later", shape: "turn", tone: "recover" },
};

export const GROUP_KINDS = { RESERVED: "Reserved", DYNAMIC: "Dynamic", PRIVATE: "One job's own" };

export const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
export const GONE = new Set(["LOST", "LEFT"]);

const UNKNOWN = { word: "Unknown", shape: "ring", tone: "stop" };
/** How a state is said; one that a newer controller knows is shown by its own name. */
export const said = (table, state) => table[state] ?? { ...UNKNOWN, word: state };

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dated = new Intl.DateTimeFormat(undefined, {
  month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

export const count = (number) => whole.format(number);
/** "1 job", "12 jobs" */
export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Milli-units as units: 1500 → "1.5". */
export const units = (milli) => short.format(milli / 1000);

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function bytes(amount) {
  let size = 0;
  while (amount >= 1024 && size < SIZES.length - 1) {
    amount /= 1024;
    size += 1;
  }
  return `${amount >= 100 ? whole.format(amount) : short.format(amount)} ${SIZES[size]}`;
}

const NAMES = { cpu: "CPU", gpu: "GPU", memory: "Memory" };
export const resourceName = (name) => NAMES[name] ?? name;
export const amount = (name, value) => (name === "memory" ? bytes(value) : units(value));

/** Amounts as one line: "2 GPU, 8 CPU, 16 GiB". */
export function amounts(resources) {
  const order = ["gpu", "cpu", "memory"];
  const names = [...order.filter((name) => resources[name]), ...Object.keys(resources).filter((name) => !order.includes(name))];
  const parts = names.filter((name) => resources[name]).map((name) =>
    name === "memory" ? bytes(resources[name]) : `${units(resources[name])} ${resourceName(name)}`);
  return parts.join(", ") || "nothing";
}

/** Amounts of a message of the API, whose names carry units. */
export function fromProto(resources = {}) {
  const found = {
    gpu: Number(resources.gpu_milli ?? 0), cpu: Number(resources.cpu_milli ?? 0), memory: Number(resources.memory_bytes ?? 0),
  };
  for (const [name, milli] of Object.entries(resources.custom_milli ?? {})) found[name] = Number(milli);
  return found;
}

/** A span of time, in its two largest units: "3 h 12 min". */
export function span(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 60) return `${s} s`;
  const min = Math.floor(s / 60);
  if (min < 60) return min < 10 && s % 60 ? `${min} min ${s % 60} s` : `${min} min`;
  const h = Math.floor(min / 60);
  if (h < 24) return min % 60 ? `${h} h ${min % 60} min` : `${h} h`;
  const days = Math.floor(h / 24);
  return h % 24 ? `${days} d ${h % 24} h` : `${days} d`;
}

const DAY_MS = 24 * 3600 * 1000;
/** A time of day, with its date unless that is today's. */
export function time(ms, now) {
  if (!ms) return "–";
  return Math.abs(now - ms) < DAY_MS && new Date(ms).getDate() === new Date(now).getDate()
    ? clock.format(ms) : dated.format(ms);
}

/** A reason as a sentence: reasons are written to follow a colon. A name that comes first stays as it is. */
export function sentence(words = "") {
  const begun = /^[a-z]+(?=[\s,]|$)/.test(words) ? words.charAt(0).toUpperCase() + words.slice(1) : words;
  return words && `${begun}${/[.!?…]$/.test(words) ? "" : "."}`;
}

/** A time of a message of the API, in ms; 0: none. */
export const ms = (text) => (text ? Date.parse(text) : 0);

/** A priority in milli as people write it: 5000 → "5". */
export const priority = units;

const TYPES = {
  job: "Job", worker: "Worker", node: "Node", group: "Group", pool: "Pool", preemption: "Preemption",
  policy: "Policy", controller: "Controller",
};
/** Family of an event's type. */
export const family = (type) => TYPES[type.split(".")[0]] ?? type.split(".")[0];

/** Orders names as people do: node-2 before node-10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
