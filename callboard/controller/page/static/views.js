// The views of the cluster: overview, jobs, nodes, pools, groups, timeline, events.

import {
  attribute, badge, empty, fill, h, jobLink, link, name, nodeLink, section, showState, text,
} from "./dom.js";
import { GpuMap, legend } from "./gpus.js";
import { List, linked, plain, sorted } from "./list.js";
import { board, call, changed, now, session } from "./store.js";
import {
  ENDED, GONE, GROUP_KINDS, GROUP_STATES, JOB_STATES, NODE_STATES, amount, amounts, byName, bytes, count, counted, family,
  priority, resourceName, said, span, time, units,
} from "./words.js";

const jobHref = (job) => `#/jobs/${encodeURIComponent(job.uid)}`;
const nodeHref = (id) => `#/nodes/${encodeURIComponent(id)}`;

/** Nodes that are there, by rank. */
export const present = () => [...board.nodes.values()].filter((node) => node.state !== "LEFT")
  .sort((a, b) => a.rank - b.rank || byName(a.id, b.id));

/** Jobs that wait, in the order in which they are looked at: priority grows by 1 for each hour of waiting. */
export const queue = () => [...board.jobs.values()].filter((job) => job.state === "PENDING")
  .sort((a, b) => (a.submitted - a.priority * 3600) - (b.submitted - b.priority * 3600) || a.submitted - b.submitted
    || a.id - b.id);

// ---- why jobs wait ----

const reasons = new Map(); // uid → { revision, at, text }
const asked = new Set();
const REASON_LASTS_MS = 15_000;

/** Why a job waits, in a sentence; the controller is asked for those that can be seen, a few at a time. */
export function whyWaiting(job) {
  const words = reasons.get(job.uid)?.text || job.why;
  // Beside the name that is said already.
  const start = `${job.name} waits: `;
  return words.startsWith(start) ? words.slice(start.length) : words;
}

export async function askWhy(rows) {
  for (const job of rows) {
    if (asked.size >= 2) return;
    const known = reasons.get(job.uid);
    const fresh = known && known.revision === job.revision && Date.now() - known.at < REASON_LASTS_MS;
    if (job.state !== "PENDING" || fresh || asked.has(job.uid)) continue;
    asked.add(job.uid);
    call("JobService", "ExplainJob", { name: `jobs/${job.uid}` }).then(({ explanation }) => {
      if (reasons.size > 2_000) reasons.clear();
      reasons.set(job.uid, { revision: job.revision, at: Date.now(), text: explanation.summary ?? "" });
    }, () => {
      // It ended meanwhile, or the controller is busy: its own reason is shown until it is asked again.
      reasons.set(job.uid, { revision: job.revision, at: Date.now(), text: "" });
    }).finally(() => {
      asked.delete(job.uid);
      changed("reasons");
    });
  }
}

// ---- bars ----

/** A bar of parts; `parts`: [[class, amount]] of `whole`. */
export function bar(label) {
  const element = h("div", { class: "bar", role: "img", "aria-label": label });
  return {
    element,
    show(parts, whole, words) {
      while (element.children.length < parts.length) element.append(h("i"));
      parts.forEach(([kind, part], place) => {
        const slice = element.children[place];
        name(slice, kind);
        slice.style.width = `${whole > 0 ? Math.min(100, (100 * part) / whole) : 0}%`;
      });
      attribute(element, "aria-label", words);
    },
  };
}

// ---- overview ----

const WAITING_SHOWN = 6;

function tile(title, href) {
  const value = h("strong");
  const rest = h("span", { class: "rest" });
  const shown = bar(title);
  const below = h("div", { class: "below" });
  const element = h(href ? "a" : "div", { class: "tile", href }, h("span", { class: "title" }, title),
    h("span", { class: "figure" }, value, rest), shown.element, below);
  return { element, value, rest, bar: shown, below };
}

export function overview() {
  const tiles = {
    gpu: tile("GPUs in use", "#/nodes"), cpu: tile("CPUs in use", "#/nodes"), memory: tile("Memory in use", "#/nodes"),
    jobs: tile("Jobs running", "#/jobs"), nodes: tile("Nodes ready", "#/nodes"),
  };
  const map = new GpuMap({ nodes: present });
  const modes = h("div", { class: "segments", role: "group", "aria-label": "Colour by" },
    ["job", "pool", "state"].map((by) => h("button", { "aria-pressed": String(by === map.by), onclick: (event) => {
      map.colourBy(by);
      for (const other of modes.children) attribute(other, "aria-pressed", String(other === event.target));
    } }, by)));
  const waiting = h("ol", { class: "short" });
  const waitingHead = h("span", { class: "note" });
  const poolList = h("div", { class: "short" });
  const latest = h("ol", { class: "short feed" });
  const gpuBody = h("div", {}, map.element);
  const nothing = empty("No node has joined yet.",
    h("span", {}, "Start an agent on each machine: ", h("code", {}, `callboard agent --controller ${session.me?.controller ?? ""}`)));
  const gpus = h("section", { class: "panel gpu-panel" },
    h("div", { class: "bar-head" }, h("h2", {}, "GPUs"), legend(), h("label", { class: "note" }, "Colour by"), modes), gpuBody);
  const element = h("div", { class: "overview" },
    h("h1", { class: "heard" }, "Overview"),
    h("div", { class: "tiles" }, Object.values(tiles).map((each) => each.element)),
    h("div", { class: "columns" },
      h("div", { class: "main" }, gpus, section("Latest events", latest)),
      h("div", { class: "side" },
        h("section", { class: "panel" }, h("div", { class: "bar-head" }, h("h2", {}, "Waiting"), waitingHead), waiting),
        h("section", { class: "panel" }, h("div", { class: "bar-head" }, h("h2", {}, "Pools"), link("#/pools", "All pools")), poolList))));

  let rows = [];
  return {
    element,
    update(kinds) {
      if (kinds.has("figures") || kinds.has("nodes")) showFigures(tiles);
      const some = [...board.nodes.values()].some((node) => node.state !== "LEFT");
      if (some !== (gpuBody.firstChild === map.element)) fill(gpuBody, some ? map.element : nothing);
      if (some) map.update(kinds);
      if (kinds.has("jobs") || kinds.has("reasons")) {
        if (kinds.has("jobs")) rows = queue();
        showWaiting(waiting, waitingHead, rows);
      }
      if (kinds.has("jobs") || kinds.has("second")) askWhy(rows.slice(0, WAITING_SHOWN));
      if (kinds.has("pools")) showPools(poolList);
      if (kinds.has("events")) showLatest(latest);
    },
    close: () => map.close(),
  };
}

function showFigures(tiles) {
  const { capacity, used, held, lost, nodes: nodeCounts, jobs: jobCounts, reconciling } = board.figures;
  for (const what of ["gpu", "cpu", "memory"]) {
    const each = tiles[what];
    const [all, busy, kept, bad] = [capacity[what] ?? 0, used[what] ?? 0, held[what] ?? 0, lost[what] ?? 0];
    text(each.value, what === "memory" ? bytes(busy) : units(busy));
    text(each.rest, ` of ${amount(what, all)}`);
    const free = Math.max(0, all - busy - kept - bad);
    each.bar.show([["used", busy], ["held", kept], ["lost", bad]], all,
      `${resourceName(what)}: ${amount(what, busy)} in use, ${amount(what, kept)} held, ${amount(what, free)} free`);
    text(each.below, [`${amount(what, free)} free`, kept && `${amount(what, kept)} held`, bad && `${amount(what, bad)} quarantined`]
      .filter(Boolean).join(" · "));
  }
  const of = (...states) => states.reduce((sum, state) => sum + (jobCounts[state] ?? 0), 0);
  const [running, wait] = [of("RUNNING"), of("PENDING")];
  const moving = of("STARTING", "PREEMPTING", "RECOVERING", "STOPPING");
  const living = running + wait + moving;
  text(tiles.jobs.value, count(running));
  text(tiles.jobs.rest, ` of ${count(living)}`);
  tiles.jobs.bar.show([["used", running], ["moving", moving], ["waiting", wait]], living,
    `${running} running, ${moving} starting or stopping, ${wait} waiting`);
  text(tiles.jobs.below, [`${count(wait)} waiting`, moving && `${count(moving)} starting or stopping`,
    of("FAILED") && `${count(of("FAILED"))} failed`].filter(Boolean).join(" · "));
  const there = Object.entries(nodeCounts).filter(([state]) => state !== "LEFT").reduce((sum, [, many]) => sum + many, 0);
  const ready = nodeCounts.READY ?? 0;
  text(tiles.nodes.value, count(ready));
  text(tiles.nodes.rest, ` of ${count(there)}`);
  tiles.nodes.bar.show([["used", ready]], there, `${ready} of ${there} nodes are ready`);
  const others = Object.entries(nodeCounts).filter(([state, many]) => state !== "READY" && state !== "LEFT" && many)
    .map(([state, many]) => `${count(many)} ${said(NODE_STATES, state).word.toLowerCase()}`);
  text(tiles.nodes.below, reconciling ? "waiting for known nodes after a restart" : others.join(" · ") || (there ? "all take work" : "none has joined"));
}

function showWaiting(list, head, rows) {
  text(head, rows.length ? `${count(rows.length)}, next first` : "");
  if (!rows.length) {
    fill(list, empty("Nothing waits."));
    return;
  }
  fill(list, rows.slice(0, WAITING_SHOWN).map((job) => h("li", {},
    h("div", { class: "line" }, jobLink(job), h("span", { class: "note" }, job.pool),
      h("span", { class: "end note" }, job.gpu ? `${units(job.gpu)} GPU` : "no GPU")),
    h("p", { class: "why", title: whyWaiting(job) }, whyWaiting(job)))),
  rows.length > WAITING_SHOWN && h("li", {}, link("#/jobs?state=PENDING", `All ${count(rows.length)} waiting jobs`)));
}

function poolBars(pool) {
  const names = Object.keys({ ...pool.nominal, ...pool.used }).sort((a, b) => {
    const order = ["gpu", "cpu", "memory"];
    return (order.indexOf(a) + 9) % 9 - (order.indexOf(b) + 9) % 9 || byName(a, b);
  });
  return names.map((what) => {
    const [used, nominal] = [pool.used[what] ?? 0, pool.nominal[what]];
    const limited = nominal !== undefined;
    const borrowed = limited ? Math.max(0, used - nominal) : 0;
    const nominated = pool.nominated[what] ?? 0;
    const whole = limited ? Math.max(nominal, used + nominated) : Math.max(used, 1);
    const shown = bar("");
    const words = `${resourceName(what)}: ${amount(what, used)} used${limited ? ` of ${amount(what, nominal)}` : ", not limited"}`
      + `${borrowed ? `, ${amount(what, borrowed)} of it borrowed` : ""}`;
    if (limited) shown.show([["used", used - borrowed], ["borrowed", borrowed], ["held", nominated]], whole, words);
    else name(shown.element, "bar unlimited");
    return h("div", { class: "quota" }, h("span", {}, resourceName(what)), shown.element,
      h("span", { class: "end" }, limited ? `${amount(what, used)} / ${amount(what, nominal)}` : `${amount(what, used)}, no limit`,
        borrowed > 0 && h("em", {}, ` ${amount(what, borrowed)} borrowed`)));
  });
}

function showPools(list) {
  const rows = [...board.pools.values()].sort((a, b) => byName(a.id, b.id));
  if (!rows.length) {
    fill(list, empty("There is no pool yet.", h("span", {}, "Jobs need one: ", h("code", {}, "callboard pool create NAME"))));
    return;
  }
  const lines = rows.length > 2 ? 1 : 2;
  fill(list, rows.slice(0, 8).map((pool) => h("div", { class: "pool-short" },
    h("div", { class: "line" }, link(`#/jobs?pool=${encodeURIComponent(pool.id)}`, pool.id),
      h("span", { class: "end note" }, `${count(pool.active)} active · ${count(pool.pending)} waiting`)),
    poolBars(pool).slice(0, lines))));
}

// ---- events ----

function subjectLink(event) {
  const [kind, id, ...rest] = event.subject.split("/");
  const label = rest.length ? `${id} ${rest.slice(1).join("/")}` : id ?? kind;
  if (kind === "jobs" && id) return link(`#/jobs/${encodeURIComponent(event.facts?.uid ?? id)}`, label);
  if (kind === "nodes" && id) return link(nodeHref(id), label);
  return h("span", {}, label ?? event.subject);
}

export function eventLine(event) {
  return h("li", {}, h("time", {}, time(event.at, now())), h("span", { class: "kind" }, event.type),
    subjectLink(event), h("span", { class: "why", title: event.why }, event.why));
}

function showLatest(list) {
  const newest = board.events.slice(-8).reverse();
  if (newest.length) fill(list, newest.map(eventLine));
  else fill(list, empty("Nothing has happened yet."));
}

// ---- views that are a list with a search and filters ----

/** The search words of a view, and what they find in a row's words. */
function finder(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return (haystack) => {
    if (!words.length) return true;
    const said = haystack().toLowerCase();
    return words.every((word) => said.includes(word));
  };
}

/** Where filters are kept: in the address, so that going back and links keep them. */
function remember(query) {
  const path = location.hash.split("?")[0];
  const written = query.toString();
  history.replaceState(null, "", written ? `${path}?${written}` : path);
}

function chips(label, choices, chosen, choose) {
  const buttons = new Map();
  const element = h("div", { class: "chips", role: "group", "aria-label": label });
  return {
    element,
    show(counts) {
      for (const [key, words] of choices) {
        if (!buttons.has(key)) {
          const number = h("b");
          const button = h("button", { onclick: () => choose(key) }, words, number);
          buttons.set(key, { button, number });
          element.append(button);
        }
        const { button, number } = buttons.get(key);
        text(number, count(counts[key] ?? 0));
        attribute(button, "aria-pressed", String(chosen() === key));
      }
    },
  };
}

function picker(label, all, value, choose) {
  const select = h("select", { "aria-label": label, onchange: () => choose(select.value) });
  let known = null;
  return {
    element: select,
    show(ids) {
      if (ids.join("\n") === known) return;
      known = ids.join("\n");
      fill(select, h("option", { value: "" }, all), ids.map((id) => h("option", { value: id }, id)));
      select.value = value();
    },
  };
}

function listView({ title, tools, list, nothing, update, hint = "Search" }) {
  const search = h("input", { type: "search", placeholder: `${hint} (/)`, "aria-label": hint });
  const summary = h("span", { class: "note" });
  const holder = h("div", { class: "holder" }, list.element);
  const element = h("div", { class: "listing" }, h("div", { class: "tools" }, h("h1", {}, title), summary, tools, search), holder);
  let none = null;
  return {
    element, search, summary,
    /** Shows rows, or says why there are none. */
    show(rows, any) {
      list.show(rows);
      const want = rows.length ? null : any ? "found" : "none";
      if (want !== none) {
        none = want;
        holder.querySelector(".empty")?.remove();
        if (want) holder.append(want === "found" ? empty("Nothing matches.", "Take a word out of the search, or another filter.") : nothing());
      }
    },
    update, close: () => list.close(),
  };
}

// ---- jobs ----

const GROUPS_OF_STATES = {
  "": Object.keys(JOB_STATES), PENDING: ["PENDING"], RUNNING: ["RUNNING"], ended: [...ENDED],
  moving: ["STARTING", "PREEMPTING", "RECOVERING", "STOPPING"], FAILED: ["FAILED"],
};

function since(job) {
  if (ENDED.has(job.state)) return job.ended;
  return job.state === "RUNNING" ? job.running : job.state === "PENDING" ? job.submitted : job.story.at(-1)?.[0] ?? job.submitted;
}

const labelled = (job) => Object.entries(job.labels ?? {}).map(([key, value]) => `${key}=${value}`).join(" ");

export function jobs(query) {
  const order = Object.keys(JOB_STATES);
  const columns = [
    { title: "State", width: "118px", cell: () => h("div", {}, h("span")),
      show: (cell, job) => showState(cell.firstChild, said(JOB_STATES, job.state)), sort: (job) => order.indexOf(job.state) },
    linked("Job", "minmax(120px, 1.3fr)", (job) => job.name, jobHref, { sort: (job) => job.name, compare: byName }),
    plain("Pool", "minmax(70px, .6fr)", (job) => [job.pool, ...(job.pools ?? [])].join(", "), { sort: (job) => job.pool, phone: false }),
    plain("Priority", "76px", (job) => priority(job.priority), { end: true, sort: (job) => job.priority, down: true, phone: false }),
    plain("Workers", "86px", (job) => (ENDED.has(job.state) ? count(job.workers) : `${count(job.ready)}/${count(job.workers)}`),
      { end: true, sort: (job) => job.workers, down: true, phone: false }),
    plain("GPUs", "64px", (job) => (job.gpu ? units(job.gpu) : "–"), { end: true, sort: (job) => job.gpu, down: true }),
    plain("For", "92px", (job) => span(now() - since(job)) + (ENDED.has(job.state) ? " ago" : ""),
      { end: true, sort: since, down: true, phone: false }),
    plain("Why", "minmax(140px, 3fr)", (job) => (job.state === "PENDING" ? whyWaiting(job) : job.why),
      { phone: false, hint: (job) => (job.state === "PENDING" ? whyWaiting(job) : job.why) }),
  ];
  const filter = { state: query.get("state") ?? "", pool: query.get("pool") ?? "", words: query.get("q") ?? "" };
  let rows = [];
  const list = new List({ columns, label: "Jobs", onsort: () => refresh() });
  const states = chips("State", [["", "All"], ["PENDING", "Waiting"], ["moving", "Starting or stopping"], ["RUNNING", "Running"],
    ["FAILED", "Failed"], ["ended", "Ended"]], () => filter.state, (key) => set({ state: key }));
  const pool = picker("Pool", "All pools", () => filter.pool, (value) => set({ pool: value }));
  const view = listView({
    title: "Jobs", tools: [states.element, pool.element], list, hint: "Search name, label, reason",
    nothing: () => empty("There is no job yet.", h("span", {}, "Submit one: ", h("code", {}, "callboard job submit FILE"))),
    update(kinds) {
      if (kinds.has("pools")) pool.show([...board.pools.keys()].sort(byName));
      if (kinds.has("jobs")) refresh();
      else if (kinds.has("reasons") || kinds.has("second")) list.show(rows);
      if (kinds.has("jobs") || kinds.has("second") || kinds.has("reasons")) askWhy(list.visible());
    },
  });
  view.search.value = filter.words;
  view.search.addEventListener("input", () => set({ words: view.search.value }));

  function set(some) {
    Object.assign(filter, some);
    const written = new URLSearchParams();
    if (filter.state) written.set("state", filter.state);
    if (filter.pool) written.set("pool", filter.pool);
    if (filter.words) written.set("q", filter.words);
    remember(written);
    list.scroller.scrollTop = 0;
    refresh();
  }

  function refresh() {
    const counts = { "": board.jobs.size };
    const wanted = new Set(GROUPS_OF_STATES[filter.state] ?? GROUPS_OF_STATES[""]);
    const found = finder(filter.words);
    rows = [];
    for (const job of board.jobs.values()) {
      for (const [key, members] of Object.entries(GROUPS_OF_STATES)) {
        if (key && members.includes(job.state)) counts[key] = (counts[key] ?? 0) + 1;
      }
      if (!wanted.has(job.state)) continue;
      if (filter.pool && job.pool !== filter.pool && !job.pools?.includes(filter.pool)) continue;
      if (found(() => `${job.name} ${job.pool} ${labelled(job)} ${job.why} ${job.uid}`)) rows.push(job);
    }
    if (list.order) rows = sorted(rows, columns, list.order);
    else if (filter.state === "PENDING") rows = inQueueOrder(rows);
    else rows.sort((a, b) => ENDED.has(a.state) - ENDED.has(b.state) || b.id - a.id);
    states.show(counts);
    text(view.summary, rows.length === board.jobs.size ? "" : `${count(rows.length)} of ${count(board.jobs.size)}`);
    view.show(rows, board.jobs.size > 0);
  }

  return {
    ...view,
    moved(next) {
      const wanted = { state: next.get("state") ?? "", pool: next.get("pool") ?? "", words: next.get("q") ?? "" };
      if (JSON.stringify(wanted) === JSON.stringify(filter)) return;
      view.search.value = wanted.words;
      set(wanted);
    },
  };
}

function inQueueOrder(rows) {
  const places = new Map(queue().map((job, place) => [job.id, place]));
  return rows.sort((a, b) => places.get(a.id) - places.get(b.id));
}

// ---- nodes ----

function nodeGpus(node) {
  const used = node.devices.reduce((sum, [milli]) => sum + milli, 0);
  return `${units(used)}/${node.devices.length}`;
}

export function nodes() {
  const stateOrder = Object.keys(NODE_STATES);
  const share = (node, what) => (node.capacity[what] ? (node.used[what] ?? 0) / node.capacity[what] : 0);
  const cells = {
    title: "GPUs", width: "minmax(96px, 1.4fr)", phone: "102px", sort: (node) => share(node, "gpu"), down: true,
    cell: () => h("div", {}, h("span", { class: "minis" })),
    show: (cell, node) => minis(cell.firstChild, node),
  };
  const columns = [
    { title: "State", width: "126px", phone: "104px", cell: () => h("div", {}, h("span")),
      show: (cell, node) => showState(cell.firstChild, said(NODE_STATES, node.state)), sort: (node) => stateOrder.indexOf(node.state) },
    linked("Node", "minmax(110px, 1fr)", (node) => node.id, (node) => nodeHref(node.id), { phone: "minmax(60px, 1fr)", sort: (node) => node.id, compare: byName }),
    cells,
    plain("In use", "72px", nodeGpus, { end: true, sort: (node) => share(node, "gpu"), down: true, phone: false }),
    plain("CPU", "92px", (node) => `${units(node.used.cpu ?? 0)}/${units(node.capacity.cpu ?? 0)}`,
      { end: true, sort: (node) => share(node, "cpu"), down: true, phone: false }),
    plain("Memory", "150px", (node) => `${bytes(node.used.memory ?? 0)} / ${bytes(node.capacity.memory ?? 0)}`,
      { end: true, sort: (node) => share(node, "memory"), down: true, phone: false }),
    plain("Workers", "72px", (node) => count(node.workers), { end: true, sort: (node) => node.workers, down: true, phone: false }),
    plain("Group", "minmax(60px, .5fr)", (node) => node.group ?? "–", { sort: (node) => node.group ?? "", phone: false }),
    plain("Why", "minmax(120px, 1.8fr)", (node) => node.why, { phone: false, hint: (node) => node.why }),
  ];
  const filter = { state: "", words: "" };
  const sets = { "": null, READY: ["READY"], closed: ["CORDONED", "DRAINING"], ill: ["SUSPECT", "LOST"], JOINING: ["JOINING"] };
  let rows = [];
  const list = new List({ columns, label: "Nodes", onsort: () => refresh() });
  const states = chips("State", [["", "All"], ["READY", "Ready"], ["closed", "Cordoned or draining"], ["ill", "Not heard of or lost"]],
    () => filter.state, (key) => { filter.state = key; refresh(); });
  const view = listView({
    title: "Nodes", tools: [states.element], list, hint: "Search name, host, label",
    nothing: () => empty("No node has joined yet.", h("span", {}, "Start an agent on each machine: ",
      h("code", {}, `callboard agent --controller ${session.me.controller}`))),
    update(kinds) {
      if (kinds.has("nodes")) refresh();
    },
  });
  view.search.addEventListener("input", () => { filter.words = view.search.value; refresh(); });

  function refresh() {
    const all = present();
    const found = finder(filter.words);
    const counts = { "": all.length };
    for (const [key, members] of Object.entries(sets)) {
      if (members) counts[key] = all.filter((node) => members.includes(node.state)).length;
    }
    rows = all.filter((node) => (!sets[filter.state] || sets[filter.state].includes(node.state))
      && found(() => `${node.id} ${node.host ?? ""} ${node.group ?? ""} ${node.model ?? ""} ${node.why} ${labelled(node)}`));
    rows = sorted(rows, columns, list.order);
    states.show(counts);
    text(view.summary, rows.length === all.length ? "" : `${count(rows.length)} of ${count(all.length)}`);
    view.show(rows, all.length > 0);
  }

  return view;
}

/** A small cell for each GPU of a node. */
function minis(holder, node) {
  while (holder.children.length > node.devices.length) holder.lastChild.remove();
  while (holder.children.length < node.devices.length) holder.append(h("i"));
  node.devices.forEach(([used, held, lost], place) => {
    name(holder.children[place], lost ? "lost" : used >= 1000 ? "full" : used ? "part" : held ? "held" : "free");
  });
  attribute(holder, "title", `${nodeGpus(node)} GPUs in use`);
}

// ---- pools ----

export function pools() {
  const body = h("div", { class: "cards" });
  const summary = h("span", { class: "note" });
  const element = h("div", { class: "listing" }, h("div", { class: "tools" }, h("h1", {}, "Pools"), summary), body);
  return {
    element,
    update(kinds) {
      if (!kinds.has("pools")) return;
      const rows = [...board.pools.values()].sort((a, b) => byName(a.id, b.id));
      text(summary, rows.length ? counted(rows.length, "pool") : "");
      fill(body, rows.length ? rows.map(poolCard)
        : empty("There is no pool yet.", h("span", {}, "Jobs need one: ", h("code", {}, "callboard pool create NAME"))));
    },
    close() {},
  };
}

function poolCard(pool) {
  const [total, reserved, reservedIdle, dynamic, dynamicIdle] = pool.groups;
  const notes = [
    pool.cohort && `Shares quota in cohort ${pool.cohort}`, pool.deleting && "Is being deleted",
    pool.stop === "HOLD" && "Admits nothing new", pool.stop === "HOLD_AND_DRAIN" && "Admits nothing new and empties",
    pool.members.length && `Members: ${pool.members.join(", ")}`,
  ].filter(Boolean);
  return h("section", { class: "panel card" },
    h("div", { class: "bar-head" }, h("h2", {}, pool.id),
      link(`#/jobs?pool=${encodeURIComponent(pool.id)}`, `${counted(pool.active, "active job")}, ${count(pool.pending)} waiting`)),
    poolBars(pool),
    !Object.keys({ ...pool.nominal, ...pool.used }).length && h("p", { class: "note" }, "Nothing is limited, and nothing is used."),
    h("p", { class: "note" }, `Placement groups: ${total}`,
      total ? ` (${reserved} reserved, ${reservedIdle} of them idle; ${dynamic} dynamic, ${dynamicIdle} idle)` : "",
      ` · ${count(pool.made)} made, reused ${counted(pool.reused, "time")}`),
    notes.length ? h("p", { class: "note" }, `${notes.join(" · ")}.`) : null);
}

// ---- placement groups ----

export function groups() {
  const jobCell = (title, width, pick) => ({
    title, width, sort: (group) => board.jobs.get(group[pick])?.name ?? "",
    cell: () => h("div", {}, h("a")),
    show: (cell, group) => {
      const job = board.jobs.get(group[pick]);
      text(cell.firstChild, job?.name ?? "–");
      attribute(cell.firstChild, "href", job ? jobHref(job) : null);
    },
  });
  const columns = [
    { title: "State", width: "138px", phone: "104px", cell: () => h("div", {}, h("span")), sort: (group) => group.state,
      show: (cell, group) => showState(cell.firstChild, said(GROUP_STATES, group.state)) },
    plain("Group", "90px", (group) => group.id, { phone: "60px", sort: (group) => group.number }),
    plain("Kind", "110px", (group) => GROUP_KINDS[group.kind] ?? group.kind, { sort: (group) => group.kind, phone: false }),
    plain("Pool", "minmax(70px, .6fr)", (group) => group.pool || "none", { sort: (group) => group.pool, phone: false }),
    jobCell("Used by", "minmax(100px, 1fr)", "job"),
    { ...jobCell("Held for", "minmax(80px, .8fr)", "nominee"), phone: false },
    plain("Bundles", "minmax(130px, 1.4fr)", bundles, { phone: false, hint: bundles }),
    plain("Uses", "60px", (group) => count(group.uses), { end: true, sort: (group) => group.uses, down: true, phone: false }),
    plain("Idle for", "84px", (group) => (group.idle ? span(now() - group.idle) : "–"),
      { end: true, sort: (group) => group.idle || Infinity, phone: false }),
    plain("Why", "minmax(100px, 1.4fr)", (group) => group.why, { phone: false, hint: (group) => group.why }),
  ];
  let rows = [];
  const list = new List({ columns, label: "Placement groups", onsort: () => refresh() });
  const view = listView({
    title: "Placement groups", tools: [], list, hint: "Search group, pool, job",
    nothing: () => empty("There is no placement group.", "One is made when a job starts."),
    update(kinds) {
      if (kinds.has("groups")) refresh();
      else if (kinds.has("second")) list.show(rows);
    },
  });
  let words = "";
  view.search.addEventListener("input", () => { words = view.search.value; refresh(); });

  function refresh() {
    const found = finder(words);
    rows = [...board.groups.values()].filter((group) =>
      found(() => `${group.id} ${group.pool} ${board.jobs.get(group.job)?.name ?? ""} ${group.kind} ${group.why}`));
    rows = list.order ? sorted(rows, columns, list.order) : rows.sort((a, b) => b.number - a.number);
    text(view.summary, counted(rows.length, "group"));
    view.show(rows, board.groups.size > 0);
  }

  return view;
}

function bundles(group) {
  const on = new Map();
  for (const [node] of group.bundles) on.set(node, (on.get(node) ?? 0) + 1);
  const shown = [...on].slice(0, 3).map(([node, many]) => (many > 1 ? `${node} ×${many}` : node)).join(", ");
  const first = group.bundles.length ? ` · ${amounts(group.bundles[0][1])} each` : "";
  return `${shown}${on.size > 3 ? ` and ${on.size - 3} nodes` : ""}${first}`;
}

// ---- timeline ----

const WINDOWS = [[5 * 60_000, "5 min"], [30 * 60_000, "30 min"], [2 * 3600_000, "2 h"], [12 * 3600_000, "12 h"]];
const TICKS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400].map((s) => s * 1000);
const MARKED = { "preemption.decided": "yield", "node.ready": "run", "node.lost": "fail", "node.left": "done", "node.draining": "wait" };

export function timeline() {
  // As long as something has been going on, and half an hour at most.
  const first = Math.min(...[...board.jobs.values()].map((job) => job.story[0]?.[0] ?? Infinity));
  let length = now() - first < WINDOWS[0][0] ? WINDOWS[0][0] : WINDOWS[1][0];
  let rows = [];
  let words = "";
  const track = {
    title: "", width: "minmax(200px, 1fr)", cell: () => h("div", { class: "track" }),
    show: (cell, job) => segments(cell, job, length),
  };
  const axis = h("div", { class: "axis" });
  const columns = [
    linked("Job", "minmax(110px, 200px)", (job) => job.name, jobHref),
    plain("Attempts", "72px", (job) => count(job.attempt), { end: true, phone: false }), track,
  ];
  const list = new List({ columns, label: "Jobs over time", height: 26 });
  list.heads[2].append(axis);
  const windows = h("div", { class: "segments", role: "group", "aria-label": "Time shown" }, WINDOWS.map(([ms, said_]) =>
    h("button", { "aria-pressed": String(ms === length), onclick: (event) => {
      length = ms;
      for (const other of windows.children) attribute(other, "aria-pressed", String(other === event.target));
      refresh();
    } }, said_)));
  const key = h("ul", { class: "legend" }, ["PENDING", "STARTING", "RUNNING", "PREEMPTING", "STOPPING"].map((state) =>
    h("li", {}, h("i", { class: `segment ${JOB_STATES[state].tone}` }), JOB_STATES[state].word.toLowerCase())));
  const view = listView({
    title: "Timeline", tools: [windows, key], list, hint: "Search name, pool",
    nothing: () => empty("Nothing has run yet."),
    update(kinds) {
      if (kinds.has("jobs")) refresh();
      else if (kinds.has("second")) draw();
    },
  });
  view.search.addEventListener("input", () => { words = view.search.value; refresh(); });

  function refresh() {
    const from = now() - length;
    const found = finder(words);
    rows = [...board.jobs.values()].filter((job) => (!job.ended || job.ended >= from) && job.story.length
      && found(() => `${job.name} ${job.pool} ${labelled(job)}`));
    // What moved last comes first, and what only waits comes last.
    rows.sort((a, b) => (a.state === "PENDING" && !a.attempt) - (b.state === "PENDING" && !b.attempt)
      || b.story.at(-1)[0] - a.story.at(-1)[0] || b.id - a.id);
    draw();
  }

  function draw() {
    view.show(rows, board.jobs.size > 0);
    text(view.summary, counted(rows.length, "job"));
    const end = now();
    const step = TICKS.find((each) => length / each <= 7) ?? TICKS.at(-1);
    const ticks = [];
    // One at the edge would lie over the heading before it.
    for (let at = Math.ceil((end - 0.97 * length) / step) * step; at <= end; at += step) ticks.push(at);
    const noted = board.events.filter((event) => MARKED[event.type] && event.at >= end - length).slice(-200);
    fill(axis, ticks.map((at) => {
      const tick = h("time", {}, time(at, end).slice(0, step < 60_000 ? 8 : 5));
      tick.style.left = `${(100 * (at - end + length)) / length}%`;
      return tick;
    }), noted.map((event) => {
      const mark = h("i", { class: MARKED[event.type], title: `${time(event.at, end)} ${event.type} ${event.subject}: ${event.why}` });
      mark.style.left = `${(100 * (event.at - end + length)) / length}%`;
      return mark;
    }));
  }

  return view;
}

/** The states of a job as parts of a track that shows the last `length` ms. */
export function segments(cell, job, length, end = now()) {
  const from = end - length;
  let used = 0;
  const words = [];
  job.story.forEach(([at, state], place) => {
    if (ENDED.has(state)) return;
    const until = job.story[place + 1]?.[0] ?? (job.ended || end);
    if (until < from) return;
    const part = cell.children[used] ?? cell.appendChild(h("i"));
    used += 1;
    const left = Math.max(0, (100 * (at - from)) / length);
    name(part, `segment ${said(JOB_STATES, state).tone}`);
    part.style.left = `${left}%`;
    part.style.width = `max(2px, ${Math.min(100 - left, (100 * (until - Math.max(at, from))) / length)}%)`;
    const line = `${said(JOB_STATES, state).word} for ${span(until - at)}, from ${time(at, end)}`;
    attribute(part, "title", line);
    words.push(line);
  });
  while (cell.children.length > used) cell.lastChild.remove();
  attribute(cell, "aria-label", words.slice(-4).join("; "));
}

// ---- events ----

export function events(query) {
  const columns = [
    plain("Time", "132px", (event) => time(event.at, now()), { phone: "76px" }),
    { title: "Kind", width: "168px", phone: "minmax(80px, 1fr)", cell: () => h("div", { class: "kind" }), show: (cell, event) => text(cell, event.type) },
    { title: "About", width: "minmax(120px, 1fr)", phone: "minmax(90px, 1.1fr)", cell: () => h("div"), show: (cell, event) => {
      if (cell.dataset.id === String(event.id)) return;
      cell.dataset.id = event.id;
      fill(cell, subjectLink(event));
    } },
    plain("What", "minmax(160px, 2.4fr)", (event) => event.why, { hint: (event) => event.why, phone: false }),
  ];
  const filter = { kind: query.get("kind") ?? "", words: query.get("q") ?? "" };
  const list = new List({ columns, label: "Events, newest first" });
  const kinds_ = [["", "All"], ["job", "Jobs"], ["preemption", "Preemptions"], ["node", "Nodes"], ["worker", "Workers"], ["group", "Groups"]];
  const chosen = chips("Kind", kinds_, () => filter.kind, (key) => { filter.kind = key; refresh(); });
  const view = listView({
    title: "Events", tools: [chosen.element], list, hint: "Search events",
    nothing: () => empty("Nothing has happened yet."),
    update(kinds) {
      if (kinds.has("events")) refresh();
    },
  });
  view.search.value = filter.words;
  view.search.addEventListener("input", () => { filter.words = view.search.value; refresh(); });

  function refresh() {
    const found = finder(filter.words);
    const counts = { "": board.events.length };
    const rows = [];
    for (const event of board.events) {
      const kind = event.type.split(".")[0];
      counts[kind] = (counts[kind] ?? 0) + 1;
      if (filter.kind && kind !== filter.kind) continue;
      if (found(() => `${event.type} ${event.subject} ${event.why} ${family(event.type)}`)) rows.push(event);
    }
    rows.reverse();
    chosen.show(counts);
    text(view.summary, board.events.length >= 1000 ? `the newest ${count(board.events.length)}; older ones: callboard events` : "");
    view.show(rows, board.events.length > 0);
  }

  return view;
}

