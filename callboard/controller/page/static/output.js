// What a job prints, live: the newest lines of all its workers or of one.

import { fill, h, text } from "./dom.js";
import { count } from "./words.js";

const KEPT = 4_000; // lines
const TAIL = 300; // lines of each worker to begin with
const COLOURS = /\u001b\[[0-9;?]*[ -/]*[@-~]/g;

export class Output {
  constructor(job) {
    this.uid = job.uid;
    this.attempt = 0;
    this.workers = "";
    this.waiting = [];
    this.open = new Map(); // worker and stream → the beginning of a line that has not ended
    this.lines = h("div", { class: "lines" });
    this.box = h("div", { class: "output", tabindex: "0", role: "log", "aria-label": "Output", "aria-live": "off" }, this.lines);
    this.note = h("span", { class: "note" });
    this.worker = h("select", { "aria-label": "Worker", onchange: () => this.begin() }, h("option", { value: "" }, "All workers"));
    this.tries = h("select", { "aria-label": "Attempt", onchange: () => this.begin() });
    this.keepUp = h("input", { type: "checkbox", checked: true });
    this.wrap = h("input", { type: "checkbox", checked: true, onchange: () => this.box.classList.toggle("unwrapped", !this.wrap.checked) });
    this.box.addEventListener("scroll", () => {
      // Whoever scrolls up reads; whoever comes back to the end follows again.
      const end = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
      if (this.keepUp.checked !== end && !this.moving) this.keepUp.checked = end;
    }, { passive: true });
    this.element = h("section", { class: "panel" },
      h("div", { class: "bar-head" }, h("h2", {}, "Output"), this.note, h("span", { class: "grow" }), this.worker, this.tries,
        h("label", { class: "check" }, this.keepUp, "Follow"), h("label", { class: "check" }, this.wrap, "Wrap")),
      this.box);
  }

  /** Follows the job as it is now. */
  follow(job, state) {
    const workers = [...new Set((job.workers ?? []).map((each) => `${each.key.component}/${each.key.rank ?? 0}`))].slice(0, 500);
    if (workers.join() !== this.workers) {
      const chosen = this.worker.value;
      this.workers = workers.join();
      fill(this.worker, h("option", { value: "" }, "All workers"), workers.map((each) => h("option", { value: each }, each)));
      this.worker.value = workers.includes(chosen) ? chosen : "";
    }
    const attempt = job.attempt ?? 0;
    if (attempt !== this.attempt) {
      this.attempt = attempt;
      const all = Array.from({ length: Math.min(attempt, 50) }, (_, place) => attempt - place);
      fill(this.tries, h("option", { value: "" }, attempt ? `Attempt ${attempt}, and on` : "Attempt"),
        all.slice(1).map((each) => h("option", { value: each }, `Attempt ${each}`)));
      this.begin();
    }
    if (!attempt) text(this.note, state === "PENDING" ? "It has not started yet." : "It never started.");
  }

  begin() {
    this.source?.close();
    this.lines.replaceChildren();
    this.open.clear();
    this.waiting = [];
    if (!this.attempt) return;
    const asked = new URLSearchParams({ job: this.uid, tail: TAIL });
    if (this.worker.value) {
      const [component, rank] = this.worker.value.split("/");
      asked.set("component", component);
      asked.set("rank", rank);
    }
    if (this.tries.value) asked.set("attempt", this.tries.value);
    text(this.note, "Reading…");
    this.source = new EventSource(`api/output?${asked}`);
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.addEventListener("caught_up", () => this.say("Live"));
    this.source.addEventListener("gap", (event) => {
      const { why, worker } = JSON.parse(event.data);
      this.line(worker, why, "gap");
    });
    this.source.addEventListener("end", () => {
      this.source.close();
      this.say("Complete");
    });
    this.source.addEventListener("refused", (event) => {
      this.source.close();
      this.say(JSON.parse(event.data).why);
    });
    this.source.onerror = () => {
      // Begun anew rather than gone on: what is shown is the newest lines anyway.
      this.source.close();
      this.say("The connection was lost; reading again…");
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.begin(), 3_000);
    };
  }

  say(words) {
    this.status = words;
    text(this.note, words === "Live" || words === "Complete"
      ? `${words}${this.lines.childElementCount || this.waiting.length ? "" : ": nothing printed yet"}` : words);
  }

  take({ worker, attempt, text: said, error, discarded }) {
    if (discarded) this.line(worker, `${count(discarded)} bytes before this are no longer kept`, "gap");
    const key = `${worker} ${attempt} ${error ? 2 : 1}`;
    const lines = ((this.open.get(key) ?? "") + said).split("\n");
    const rest = lines.pop();
    if (rest.length > 20_000) lines.push(rest);
    this.open.set(key, rest.length > 20_000 ? "" : rest);
    for (const line of lines) this.line(worker, line.replace(/\r$/, "").split("\r").at(-1), error ? "error" : "");
  }

  line(worker, words, kind) {
    this.waiting.push([worker, words.replace(COLOURS, ""), kind]);
    if (this.waiting.length > KEPT) this.waiting.splice(0, this.waiting.length - KEPT);
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = undefined;
    const fresh = document.createDocumentFragment();
    for (const [worker, words, kind] of this.waiting) {
      fresh.append(h("div", { class: kind }, h("b", {}, worker), kind === "error" ? h("em", {}, "err") : null, h("span", {}, words)));
    }
    this.waiting = [];
    this.lines.append(fresh);
    while (this.lines.childElementCount > KEPT) this.lines.firstChild.remove();
    if (this.status) this.say(this.status);
    if (this.keepUp.checked) {
      this.moving = true;
      this.box.scrollTop = this.box.scrollHeight;
      requestAnimationFrame(() => { this.moving = false; });
    }
  }

  close() {
    this.source?.close();
    clearTimeout(this.timer);
    if (this.frame) cancelAnimationFrame(this.frame);
  }
}
