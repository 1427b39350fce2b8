// The picture of all GPUs: a cell each, in the colour of who has it. A canvas, because there may be ten thousand.
//
// Colour is never the only sign: what is used is filled (a share as far as it goes), what is held is hatched, what is
// quarantined is crossed, what is free is hollow, and a node that takes no work has a dashed frame.

import { attribute, h, text } from "./dom.js";
import { board } from "./store.js";
import { GONE, NODE_STATES, counted, said, units } from "./words.js";

const HUES = 12;
const MANY = 40; // nodes; from there on cells have no room for names

export class GpuMap {
  constructor({ nodes, large = false, height = 560 }) {
    this.chosen = nodes;
    this.large = large;
    this.height = height;
    this.by = "job";
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-describedby": "gpu-at" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.at = h("p", { id: "gpu-at", class: "heard", "aria-live": "polite" });
    this.element = h("div", { class: "gpus" }, this.canvas, this.tip, this.at);
    this.pen = this.canvas.getContext("2d");
    this.places = [];
    this.drawn = new Map();
    this.focus = -1;
    this.width = 0;
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.themed = () => this.draw();
    this.theme.addEventListener("change", this.themed);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const found = this.find(event.offsetX, event.offsetY);
      if (found) location.hash = `#/nodes/${encodeURIComponent(found.node.id)}`;
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.focus = -1; this.draw(); });
  }

  close() {
    this.watch.disconnect();
    this.theme.removeEventListener("change", this.themed);
  }

  /** Colours by "job", "pool" or "state". */
  colourBy(what) {
    this.by = what;
    this.draw();
  }

  /** Draws everything anew. */
  draw() {
    const width = Math.floor(this.element.clientWidth);
    if (!width) return;
    this.nodes = this.chosen();
    this.read();
    this.lay(width);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.tall * ratio);
    this.canvas.style.height = `${this.tall}px`;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawn.clear();
    this.nodes.forEach((node, place) => this.node(node, place));
    this.say();
  }

  /** Draws the nodes that changed; everything where nodes came or went. */
  update(kinds) {
    if (kinds.has("whole")) return this.draw();
    if (!kinds.has("nodes") && !kinds.has("jobs")) return undefined;
    const nodes = this.chosen();
    if (nodes.length !== this.nodes?.length || nodes.some((node, place) => node.id !== this.nodes[place].id)) {
      return this.draw();
    }
    this.nodes = nodes;
    let any = false;
    nodes.forEach((node, place) => {
      if (this.drawn.get(node.id) !== node) {
        any = true;
        this.node(node, place);
      }
    });
    if (any) this.say();
    return undefined;
  }

  read() {
    const style = getComputedStyle(this.element);
    const of = (name) => style.getPropertyValue(name).trim();
    this.hues = Array.from({ length: HUES }, (_, place) => of(`--hue-${place}`));
    this.ink = {
      text: of("--text"), muted: of("--muted"), line: of("--line"), surface: of("--surface"), free: of("--cell-free"),
      held: of("--cell-held"), lost: of("--fail"), accent: of("--accent"), oncell: of("--on-cell"), used: of("--run"),
    };
    this.font = style.fontFamily;
  }

  lay(width) {
    const nodes = this.nodes;
    const most = Math.max(1, ...nodes.map((node) => node.devices.length));
    this.places = [];
    this.named = this.large || nodes.length <= MANY;
    this.narrow = width < 560;
    if (this.named) {
      // A row for each node: its name, then its cells with the names of jobs.
      const label = this.large ? 0 : this.narrow ? 92 : Math.min(190, Math.max(96, width * 0.17));
      const columns = this.narrow ? Math.min(most, 4) : Math.min(most, this.large ? 8 : 16);
      const gap = 4;
      const cell = Math.min(this.large ? 240 : 190, (width - label - gap - 4) / columns - gap);
      const tall = this.large ? 54 : nodes.length <= 4 ? 40 : nodes.length <= 14 ? 28 : 18;
      let top = 0;
      nodes.forEach((node) => {
        const lines = Math.max(1, Math.ceil(node.devices.length / columns));
        this.places.push({ x: 2, y: top + 2, label, columns, cell, tall, gap, w: width, h: lines * (tall + gap) + 2 });
        top += lines * (tall + gap) + (this.large ? 0 : 4);
      });
      this.tall = Math.max(24, top + 2);
      return;
    }
    // A block for each node; cells as large as the height allows.
    const across = most > 4 ? Math.ceil(most / 2) : most;
    const lines = Math.ceil(most / across);
    let size = 18;
    let blocks = 1;
    for (; size > 5; size -= 0.5) {
      blocks = Math.max(1, Math.floor((width + 5) / (across * size + 6)));
      if (Math.ceil(nodes.length / blocks) * (lines * size + 6) <= this.height) break;
    }
    const w = across * size + 1;
    const tall = lines * size + 1;
    const spread = Math.min(12, (width - blocks * w) / Math.max(1, blocks - 1));
    nodes.forEach((_, place) => {
      const x = (place % blocks) * (w + spread);
      const y = Math.floor(place / blocks) * (tall + 5);
      this.places.push({ x: x + 1, y: y + 1, label: 0, columns: across, cell: size - 1, tall: size - 1, gap: 1, w, h: tall });
    });
    this.across = blocks;
    this.tall = Math.ceil(nodes.length / blocks) * (tall + 5) + 2;
  }

  node(node, place) {
    const at = this.places[place];
    const { pen, ink } = this;
    pen.clearRect(at.x - 1.5, at.y - 1.5, at.w + 3, at.h + 3);
    const works = node.state === "READY";
    if (at.label) {
      pen.font = `500 12px ${this.font}`;
      pen.textBaseline = "middle";
      pen.fillStyle = works ? ink.text : ink.muted;
      const word = works ? "" : said(NODE_STATES, node.state).word;
      const two = word && at.tall >= 36;
      const middle = at.y + at.tall / 2;
      pen.fillText(fitting(pen, word && !two ? `${node.id} · ${word}` : node.id, at.label - 8), 0, two ? middle - 8 : middle);
      pen.font = `11px ${this.font}`;
      if (two) pen.fillText(fitting(pen, word, at.label - 8), 0, middle + 8);
    }
    pen.globalAlpha = GONE.has(node.state) ? 0.35 : 1;
    node.devices.forEach((device, index) => {
      const x = at.x + at.label + (index % at.columns) * (at.cell + at.gap);
      const y = at.y + Math.floor(index / at.columns) * (at.tall + at.gap);
      this.cell(x, y, at.cell, at.tall, device, index);
    });
    if (!node.devices.length && this.named) {
      pen.fillStyle = ink.muted;
      pen.font = `12px ${this.font}`;
      pen.fillText("no GPU", at.x + at.label, at.y + at.tall / 2);
    }
    pen.globalAlpha = 1;
    if (!works) {
      pen.setLineDash([2, 2]);
      pen.lineWidth = 1;
      pen.strokeStyle = node.state === "LOST" ? ink.lost : ink.text;
      if (this.named) pen.strokeRect(at.x + at.label - 1.5, at.y - 1.5, at.columns * (at.cell + at.gap) - at.gap + 3, at.h - at.gap + 1);
      else pen.strokeRect(at.x - 1, at.y - 1, at.w + 0.5, at.h + 0.5);
      pen.setLineDash([]);
    }
    if (place === this.focus) {
      pen.lineWidth = 2;
      pen.strokeStyle = ink.accent;
      pen.strokeRect(at.x, at.y - 0.5, at.w - 1, at.h);
    }
    this.drawn.set(node.id, node);
  }

  cell(x, y, w, tall, [used, held, lost, ...users], index) {
    const { pen, ink } = this;
    pen.fillStyle = ink.free;
    pen.fillRect(x, y, w, tall);
    let from = 0;
    const part = (milli, colour) => {
      const wide = Math.max(1, (w * Math.min(milli, 1000 - from)) / 1000);
      pen.fillStyle = colour;
      pen.fillRect(x + (w * from) / 1000, y, wide, tall);
      from += milli;
    };
    let named = 0;
    for (const [job, , , milli] of users) {
      part(milli, this.colour(job));
      named += milli;
    }
    // Of jobs that the reader may not know of, the amounts alone.
    if (used > named) part(used - named, this.ink.held);
    if (held) this.hatch(x + (w * from) / 1000, y, (w * Math.min(held, 1000 - from)) / 1000, tall);
    if (lost) this.crossed(x, y, w, tall);
    if (!used && !held && !lost) {
      pen.strokeStyle = ink.line;
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, w - 1, tall - 1);
    }
    if (w >= 46 && tall >= 16) this.label(x, y, w, tall, { used, held, lost, users, index });
  }

  label(x, y, w, tall, { used, held, lost, users, index }) {
    const { pen, ink } = this;
    const job = users.length ? board.jobs.get(users[0][0]) : null;
    const first = job ? job.name : used ? "others" : lost ? "quarantined" : held ? "held" : "free";
    const more = users.length > 1 ? ` +${users.length - 1}` : "";
    const [, component, rank, milli] = users[0] ?? [];
    const under = users.length ? `${component}/${rank}${milli < 1000 ? ` · ${units(milli)}` : ""}` : `GPU ${index}`;
    const two = tall >= 36;
    const write = (from, width, colour) => {
      if (width <= 0) return;
      pen.save();
      pen.beginPath();
      pen.rect(from, y, width, tall);
      pen.clip();
      pen.textBaseline = "middle";
      pen.fillStyle = colour;
      pen.font = `${job ? 600 : 400} ${tall >= 26 ? 12 : 11}px ${this.font}`;
      pen.fillText(fitting(pen, first + more, w - 12), x + 6, y + (two ? tall / 2 - 7 : tall / 2));
      if (two) {
        pen.font = `11px ${this.font}`;
        pen.fillText(fitting(pen, under, w - 12), x + 6, y + tall / 2 + 8);
      }
      pen.restore();
    };
    // On what is filled and on what is free in colours of their own: a share ends amid the words.
    const filled = users.length ? (w * Math.min(1000, used)) / 1000 : 0;
    write(x, filled, ink.oncell);
    write(x + filled, w - filled, users.length ? ink.text : lost ? ink.lost : ink.muted);
  }

  hatch(x, y, w, tall) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, w, tall);
    pen.clip();
    pen.strokeStyle = this.ink.held;
    pen.lineWidth = 1.5;
    // Words may lie upon it.
    pen.globalAlpha *= this.named ? 0.4 : 1;
    pen.beginPath();
    for (let at = -tall; at < w; at += 4) {
      pen.moveTo(x + at, y + tall);
      pen.lineTo(x + at + tall, y);
    }
    pen.stroke();
    pen.restore();
  }

  crossed(x, y, w, tall) {
    const { pen } = this;
    const side = Math.min(w, tall, 22);
    const [left, top] = [w > 46 ? x + w - side : x, y + (tall - side) / 2];
    pen.strokeStyle = this.ink.lost;
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, w - 1.5, tall - 1.5);
    pen.beginPath();
    pen.moveTo(left + 3, top + 3);
    pen.lineTo(left + side - 3, top + side - 3);
    pen.moveTo(left + side - 3, top + 3);
    pen.lineTo(left + 3, top + side - 3);
    pen.stroke();
  }

  colour(id) {
    const job = board.jobs.get(id);
    if (!job) return this.ink.held;
    if (this.by === "job") return this.hues[(job.id * 5) % HUES];
    if (this.by === "pool") return this.hues[(this.poolPlace(job.pool) * 5) % HUES];
    return job.state === "RUNNING" ? this.ink.used : job.state === "STARTING" ? this.hues[0] : this.hues[4];
  }

  poolPlace(pool) {
    if (!this.pools || this.pools.size !== board.pools.size) {
      this.pools = new Map([...board.pools.keys()].sort().map((id, place) => [id, place]));
    }
    return this.pools.get(pool) ?? 0;
  }

  say() {
    let [free, used, all] = [0, 0, 0];
    for (const node of this.nodes) {
      for (const [usedMilli, held, lost] of node.devices) {
        all += 1;
        if (usedMilli) used += 1;
        else if (!held && !lost) free += 1;
      }
    }
    attribute(this.canvas, "aria-label",
      `${counted(all, "GPU")} of ${counted(this.nodes.length, "node")}: ${used} in use, ${free} free. `
      + "Arrow keys go from node to node, Enter opens one; the list of nodes says the same in words.");
  }

  find(x, y) {
    const place = this.places.findIndex((at) => x >= at.x && x <= at.x + at.w && y >= at.y && y <= at.y + at.h);
    if (place < 0) return null;
    const at = this.places[place];
    const column = Math.floor((x - at.x - at.label) / (at.cell + at.gap));
    const index = Math.floor((y - at.y) / (at.tall + at.gap)) * at.columns + column;
    const node = this.nodes[place];
    const inside = x >= at.x + at.label && column < at.columns && index < node.devices.length;
    return { node, place, index: inside ? index : -1 };
  }

  point(event) {
    const found = this.find(event.offsetX, event.offsetY);
    this.tip.hidden = !found;
    this.canvas.style.cursor = found ? "pointer" : "default";
    if (!found) return;
    text(this.tip, describe(found.node, found.index));
    const left = Math.min(event.offsetX + 12, this.element.clientWidth - this.tip.offsetWidth - 4);
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${event.offsetY + 14}px)`;
  }

  key(event) {
    const columns = this.named ? 1 : this.across;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (step) {
      event.preventDefault();
      const before = this.focus;
      this.focus = Math.max(0, Math.min(this.nodes.length - 1, this.focus < 0 ? 0 : this.focus + step));
      if (before >= 0 && this.nodes[before]) this.node(this.nodes[before], before);
      this.node(this.nodes[this.focus], this.focus);
      text(this.at, describe(this.nodes[this.focus], -1));
    } else if (event.key === "Enter" && this.focus >= 0) {
      location.hash = `#/nodes/${encodeURIComponent(this.nodes[this.focus].id)}`;
    }
  }
}

/** A node, or one of its GPUs, in words. */
export function describe(node, index) {
  const state = said(NODE_STATES, node.state).word.toLowerCase();
  if (index < 0) {
    const used = node.devices.filter(([usedMilli]) => usedMilli).length;
    return `${node.id} · ${state}\n${used} of ${counted(node.devices.length, "GPU")} in use`;
  }
  const [used, held, lost, ...users] = node.devices[index];
  const lines = [`${node.id} · GPU ${index}${node.state === "READY" ? "" : ` · ${state}`}`];
  for (const [job, component, rank, milli] of users) {
    const share = milli < 1000 ? ` · ${units(milli)} GPU` : "";
    lines.push(`${board.jobs.get(job)?.name ?? "a job"} · ${component}/${rank}${share}`);
  }
  const named = users.reduce((sum, [, , , milli]) => sum + milli, 0);
  if (used > named) lines.push(`${units(used - named)} GPU of jobs that you may not see`);
  if (held) lines.push(`${units(held)} GPU held for a job or a placement group`);
  if (lost) lines.push(`${units(lost)} GPU quarantined: a process could not be proved gone`);
  if (!used && !held && !lost) lines.push("free");
  return lines.join("\n");
}

function fitting(pen, words, width) {
  if (pen.measureText(words).width <= width) return words;
  let most = Math.floor((words.length * width) / pen.measureText(words).width);
  while (most > 1 && pen.measureText(`${words.slice(0, most)}…`).width > width) most -= 1;
  return most > 1 ? `${words.slice(0, most)}…` : "";
}

/** What the signs of the picture mean. */
export function legend() {
  return h("ul", { class: "legend" },
    ["used", "held", "free", "lost", "closed"].map((sign) => h("li", {}, h("i", { class: `cell-${sign}` }), {
      used: "in use", held: "held", free: "free", lost: "quarantined", closed: "node takes no work",
    }[sign])));
}
