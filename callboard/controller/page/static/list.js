// A list of any length: only the rows that can be seen are elements, and they are used again as it scrolls.

import { attribute, h, text } from "./dom.js";

const SPARE = 6; // rows above and below what is seen
const REST_MS = 150; // after the last step of a scroll

export class List {
  /**
   * columns: [{ title, width, cell: () => element, show: (element, row) => void, sort?: (row) => value, end?: bool,
   *             phone?: false, or its width there }]; `show` changes the element of its column to say what the row says.
   * label: what the list holds, for those who hear it.
   * height: of a row in px; the same for all.
   */
  constructor({ columns, label, height = 30, onsort, order, tall, of = (row) => row.id }) {
    this.columns = columns;
    this.height = height;
    this.of = of;
    this.rows = [];
    this.pool = [];
    this.first = -1;
    this.order = order ?? null;
    const template = columns.map((column) => column.width).join(" ");
    this.heads = columns.map((column, place) => this.head(column, place, onsort));
    this.header = h("div", { class: "row head", role: "row" }, this.heads);
    this.body = h("div", { class: "rows", role: "rowgroup" });
    this.scroller = h("div", { class: `list ${tall ?? ""}`, role: "table", "aria-label": label, tabindex: "-1" },
      h("div", { role: "rowgroup", class: "headgroup" }, this.header), this.body);
    this.scroller.style.setProperty("--columns", template);
    this.scroller.style.setProperty("--phone", columns.filter((each) => each.phone !== false).map((each) => each.phone ?? each.width).join(" "));
    this.scroller.style.setProperty("--height", `${height}px`);
    this.scroller.addEventListener("scroll", () => {
      this.draw();
      clearTimeout(this.rests);
      this.rests = setTimeout(() => this.settle(), REST_MS);
    }, { passive: true });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.element = this.scroller;
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.scroller);
  }

  head(column, place, onsort) {
    const classes = `${column.end ? "end" : ""} ${column.phone === false ? "wide" : ""}`;
    if (!column.sort || !onsort) return h("div", { class: classes, role: "columnheader" }, column.title);
    return h("div", { class: classes, role: "columnheader" },
      h("button", { class: "sort", onclick: () => {
        this.order = { by: place, down: this.order?.by === place ? !this.order.down : Boolean(column.down) };
        onsort(this.order);
      } }, column.title));
  }

  /** Shows these rows. */
  show(rows) {
    this.rows = rows;
    this.fresh = true;
    attribute(this.scroller, "aria-rowcount", rows.length + 1);
    this.heads.forEach((head, place) => attribute(head, "aria-sort",
      this.order?.by === place ? (this.order.down ? "descending" : "ascending") : null));
    const tall = `${rows.length * this.height}px`;
    if (this.body.style.height !== tall) this.body.style.height = tall;
    this.draw();
  }

  /** Shows the rows that can be seen; asked for with every change, so it only writes what is new. */
  draw() {
    const top = this.scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / this.height) - SPARE);
    const seen = Math.ceil((this.scroller.clientHeight || 600) / this.height) + 2 * SPARE;
    if (first === this.first && seen === this.seen && !this.fresh) return;
    this.turn(first - this.first);
    const shown = this.rows.slice(first, first + seen);
    while (this.pool.length < shown.length) this.pool.push(this.make());
    this.pool.forEach((line, place) => {
      const row = shown[place];
      if (row === undefined) {
        if (!line.element.hidden) line.element.hidden = true;
        return;
      }
      const at = (first + place) * this.height;
      // A row that stays where it is costs a browser nothing: it neither lays it out nor paints it.
      if (!this.fresh && line.row === row && line.at === at && !line.element.hidden) return;
      if (line.element.hidden) line.element.hidden = false;
      if (line.at !== at) {
        line.element.style.transform = `translateY(${at}px)`;
        line.at = at;
        attribute(line.element, "aria-rowindex", first + place + 2);
      }
      line.row = row;
      this.columns.forEach((column, index) => column.show(line.cells[index], row, line.element));
    });
    this.first = first;
    this.seen = seen;
    this.fresh = false;
  }

  /** Takes the lines that so many rows of scrolling left behind to the other end, for the rows that come into view. */
  turn(by) {
    if (by === 0 || Math.abs(by) >= this.pool.length) return;
    if (by > 0) this.pool.push(...this.pool.splice(0, by));
    else this.pool.unshift(...this.pool.splice(by));
  }

  /** Puts the elements in the order in which they are seen, for the tab key and for those who hear the page: once it no
   * longer scrolls, since that is laid out anew, and not under somebody's focus, which would be lost. */
  settle() {
    if (this.body.contains(document.activeElement)) return;
    const elements = this.pool.map((line) => line.element);
    if (elements.some((element, place) => element !== this.body.children[place])) this.body.append(...elements);
  }

  /** The rows that can be seen, for those who ask more about them. */
  visible() {
    return this.pool.filter((line) => !line.element.hidden && line.row).map((line) => line.row);
  }

  make() {
    const cells = this.columns.map((column) => {
      const cell = column.cell();
      cell.classList.add("cell", ...(column.end ? ["end"] : []), ...(column.phone === false ? ["wide"] : []));
      cell.setAttribute("role", "cell");
      return cell;
    });
    const element = h("div", { class: "row", role: "row" }, cells);
    this.body.append(element);
    return { element, cells, at: -1 };
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const line = this.pool.find((each) => each.element.contains(document.activeElement));
    if (!line) return;
    event.preventDefault();
    const at = line.at + step * this.height;
    const next = this.pool.find((each) => !each.element.hidden && each.at === at);
    if (!next) return;
    next.element.querySelector("a, button")?.focus({ preventScroll: true });
    if (at < this.scroller.scrollTop) this.scroller.scrollTop = at;
    const below = at + 2 * this.height - this.scroller.scrollTop - this.scroller.clientHeight;
    if (below > 0) this.scroller.scrollTop += below;
  }

  close() {
    clearTimeout(this.rests);
    this.watch.disconnect();
  }
}

/** A column of plain text. */
export const plain = (title, width, say, more = {}) => ({
  title, width, cell: () => h("div"), show: (cell, row) => {
    const value = say(row);
    text(cell, value);
    if (more.hint) attribute(cell, "title", more.hint(row));
  }, ...more,
});

/** A column with a link. */
export const linked = (title, width, say, href, more = {}) => ({
  title, width, cell: () => h("div", {}, h("a")), show: (cell, row) => {
    text(cell.firstChild, say(row));
    attribute(cell.firstChild, "href", href(row));
  }, ...more,
});

/** Rows in the order of a column; equal ones as they were. */
export function sorted(rows, columns, order) {
  if (!order) return rows;
  const key = columns[order.by].sort;
  const compare = columns[order.by].compare ?? ((a, b) => (a < b ? -1 : a > b ? 1 : 0));
  const sign = order.down ? -1 : 1;
  return rows.map((row) => [key(row), row]).sort((a, b) => sign * compare(a[0], b[0])).map(([, row]) => row);
}
