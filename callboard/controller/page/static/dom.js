// Elements: made, changed as little as possible, asked for confirmation.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, listeners (`onclick`) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child);
  }
  return element;
}

/** Puts new children in place of the old ones. */
export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** Changes a text only where it is another: the browser then has nothing to lay out. */
export function text(element, value) {
  const said = String(value);
  if (element.textContent !== said) element.textContent = said;
  return element;
}

export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

export function name(element, value) {
  if (element.className !== value) element.className = value;
}

const SHAPES = {
  dot: [["circle", { cx: 6, cy: 6, r: 4 }]],
  ring: [["circle", { cx: 6, cy: 6, r: 3.5, class: "line" }]],
  half: [["circle", { cx: 6, cy: 6, r: 3.5, class: "line" }], ["path", { d: "M6 2.5a3.5 3.5 0 0 1 0 7z" }]],
  down: [["path", { d: "M2 3.5h8L6 10z" }]],
  turn: [["path", { d: "M9.5 6A3.5 3.5 0 1 1 8 3.1M8.2 1.2v2.4H5.8", class: "line" }]],
  square: [["rect", { x: 2.5, y: 2.5, width: 7, height: 7, rx: 1 }]],
  check: [["path", { d: "M2.2 6.4l2.6 2.6 5-5.6", class: "line" }]],
  cross: [["path", { d: "M2.8 2.8l6.4 6.4M9.2 2.8L2.8 9.2", class: "line" }]],
  bar: [["circle", { cx: 6, cy: 6, r: 4, class: "line" }], ["path", { d: "M3.2 8.8l5.6-5.6", class: "line" }]],
};

const shapes = new Map();
export function icon(shape) {
  if (!shapes.has(shape)) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 12 12");
    svg.setAttribute("class", "icon");
    svg.setAttribute("aria-hidden", "true");
    for (const [tag, attributes] of SHAPES[shape]) {
      const part = document.createElementNS(SVG, tag);
      for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
      svg.append(part);
    }
    shapes.set(shape, svg);
  }
  return shapes.get(shape).cloneNode(true);
}

/** The state of something: a shape, a tone and a word. */
export function badge(state) {
  const element = h("span");
  showState(element, state);
  return element;
}

export function showState(element, state) {
  if (element.dataset.word === state.word) return;
  element.dataset.word = state.word;
  element.className = `badge ${state.tone}`;
  fill(element, icon(state.shape), state.word);
}

/** A link to a page of this page. */
export const link = (href, ...children) => h("a", { href }, ...children);
export const jobLink = (job) => link(`#/jobs/${encodeURIComponent(job.uid)}`, job.name);
export const nodeLink = (id) => link(`#/nodes/${encodeURIComponent(id)}`, id);

export function section(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...children);
}

/** What is said where there is nothing to show. */
export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", { class: "title" }, title), more.map((line) => h("p", {}, line)));
}

export const loading = (what) => h("p", { class: "loading", role: "status" }, `Loading ${what}…`);

export function toast(message, tone = "") {
  const element = h("div", { class: `toast ${tone}` }, message,
    h("button", { class: "plain", "aria-label": "Close", onclick: () => element.remove() }, "×"));
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), tone === "fail" ? 15_000 : 6_000);
}

/**
 * Asks before something is done; resolves with what was filled in, or with null.
 * `fields`: [{ name, label, hint, type, value }]
 */
export function confirm({ title, lines, action, fields = [], danger = false }) {
  const inputs = fields.map((field) =>
    h("input", { name: field.name, type: field.type ?? "text", value: field.value ?? "", maxlength: 500, min: field.min }));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      lines.map((line) => h("p", {}, line)),
      fields.map((field, place) => h("label", {}, h("span", {}, field.label), inputs[place],
        field.hint && h("small", {}, field.hint))),
      h("div", { class: "buttons" },
        h("button", { value: "", type: "submit", formnovalidate: true }, "Back"),
        h("button", { value: "do", type: "submit", class: danger ? "danger" : "primary" }, action))));
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const filled = Object.fromEntries(fields.map((field, place) => [field.name, inputs[place].value.trim()]));
      resolve(dialog.returnValue === "do" ? filled : null);
      dialog.remove();
    });
    dialog.showModal();
    (inputs[0] ?? dialog.querySelector("button[value='']")).focus();
  });
}
