// The page's frame: what is open, who reads, whether the controller is heard, and which view is shown.

import { append, attribute, fill, h, icon, text, toast } from "./dom.js";
import { jobPage, nodePage } from "./details.js";
import { board, logIn, logOut, now, retry, session, start, subscribe } from "./store.js";
import { events, groups, jobs, nodes, overview, pools, timeline } from "./views.js";
import { sentence, span } from "./words.js";

const TABS = [
  ["", "Overview", overview], ["jobs", "Jobs", jobs], ["nodes", "Nodes", nodes], ["pools", "Pools", pools],
  ["groups", "Groups", groups], ["timeline", "Timeline", timeline], ["events", "Events", events],
];

const content = document.getElementById("content");
const banner = document.getElementById("banner");
const top = document.getElementById("top");

let view = null;
let shown = "";
let tabs = [];
let live = null;

/** Where we are: "#/jobs/x?state=RUNNING" → { parts: ["jobs", "x"], query }. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

function drawTop() {
  const me = session.me;
  live = h("span", { class: "live" }, icon("dot"), h("span", {}));
  tabs = TABS.filter(([name]) => name !== "groups" || !me?.trainer).map(([name, word]) =>
    h("a", { href: `#/${name}`, "data-tab": name }, word));
  fill(top,
    h("a", { class: "brand", href: "#/" }, h("img", { src: "static/icon.svg", alt: "", width: 20, height: 20 }), "callboard",
      me && h("span", { class: "where" }, me.controller)),
    h("nav", { "aria-label": "Views" }, me ? tabs : []),
    me && h("div", { class: "who" }, live,
      h("span", { class: "name", title: me.role ? `${me.name}, ${me.role}` : `${me.name}: everything is allowed` },
        me.name, me.role && h("small", {}, me.role)),
      me.name !== "guest" && me.name !== "anybody" && h("button", { class: "plain", onclick: logOut }, "Log out"),
      me.name === "guest" && h("button", { class: "plain", onclick: () => show("login") }, "Log in")));
  said();
}

/** Says whether what is shown is how things are now. */
function said() {
  const words = { live: "Live", loading: "Loading", lost: "Disconnected", unreachable: "Disconnected", asleep: "Paused" };
  if (live) {
    attribute(live, "data-state", session.state);
    text(live.lastChild, words[session.state] ?? "");
  }
  document.body.classList.toggle("old", session.state === "lost");
  if (session.state !== "lost" && session.state !== "unreachable") {
    if (banner.firstChild) banner.replaceChildren();
    return;
  }
  const since = session.heard ? `Last update ${span(Date.now() - session.heard)} ago. ` : "";
  const line = `${since}Reconnecting: ${session.why}.`;
  if (!banner.firstChild) {
    fill(banner, h("strong", {}, "Disconnected."), h("span", {}), h("button", { onclick: retry }, "Try now"));
  }
  text(banner.children[1], line);
}

function loginView() {
  const token = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await logIn({ token: token.value });
    } catch (error) {
      text(problem, sentence(error.message));
      token.select();
    }
  };
  return {
    element: h("div", { class: "login" }, h("form", { onsubmit: submit },
      h("h1", {}, "Log in"),
      h("p", {}, "On the controller's machine, ", h("code", {}, "callboard page"), " prints a link that logs you in."),
      h("label", { for: "token" }, "Token"), token,
      h("small", {}, "Yours is in the file that ", h("code", {}, "callboard login"), " or an operator gave you."),
      problem, h("button", { class: "primary", type: "submit" }, "Log in"))),
    update() {}, close() {},
  };
}

function unreachableView() {
  return {
    element: h("div", { class: "login" }, h("div", {},
      h("h1", {}, "The controller can't be reached"),
      h("p", {}, "Is it running? On its machine, ", h("code", {}, "callboard status"), " says so."),
      h("button", { class: "primary", onclick: retry }, "Try now"))),
    update() {}, close() {},
  };
}

function show(forced) {
  const { parts, query } = place();
  const ready = session.me && board.figures;
  const key = forced ?? (session.state === "login" ? "login" : !ready && session.state === "unreachable" ? "unreachable"
    : !ready ? "loading" : `/${parts.join("/")}`);
  const [first = "", second] = parts;
  for (const tab of tabs) attribute(tab, "aria-current", tab.dataset.tab === first ? "page" : null);
  if (key === shown) {
    view?.moved?.(query);
    return;
  }
  shown = key;
  view?.close();
  view = null;
  if (key === "loading") {
    fill(content, skeleton());
    return;
  }
  if (key === "login") view = loginView();
  else if (key === "unreachable") view = unreachableView();
  else if (first === "jobs" && second) view = jobPage(second);
  else if (first === "nodes" && second) view = nodePage(second);
  else view = (TABS.find(([name]) => name === first) ?? TABS[0])[2](query);
  fill(content, view.element);
  content.scrollTop = 0;
  view.update(new Set(["whole", "nodes", "jobs", "pools", "groups", "events", "figures", "second"]));
  document.title = [second ?? TABS.find(([name]) => name === first)?.[1], "callboard"].filter(Boolean).join(" · ");
}

/** The shape of the page before there is anything to show. */
function skeleton() {
  const tiles = h("div", { class: "tiles" }, [1, 2, 3, 4, 5].map(() => h("div", { class: "tile ghost" })));
  return append(h("div", { class: "overview", "aria-busy": "true" }), [
    h("p", { class: "heard", role: "status" }, "Loading…"), tiles,
    h("div", { class: "columns" }, h("div", { class: "panel ghost tall" }), h("div", { class: "panel ghost tall" })),
  ]);
}

subscribe((kinds) => {
  if (kinds.has("session")) {
    drawTop();
    show();
  }
  if (kinds.has("whole") || (kinds.has("figures") && shown === "loading")) show();
  if (kinds.has("session") || kinds.has("second")) said();
  view?.update(kinds);
});

addEventListener("hashchange", () => {
  show();
  content.focus({ preventScroll: true });
});

addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
  const search = document.querySelector("input[type=search]");
  if (search) {
    event.preventDefault();
    search.focus();
  }
});

addEventListener("error", (event) => toast(`The page met a defect: ${event.message}`, "fail"));
addEventListener("unhandledrejection", (event) => toast(sentence(String(event.reason?.message ?? event.reason)), "fail"));

async function begin() {
  drawTop();
  show();
  const code = /^#login=([\w-]+)$/.exec(location.hash)?.[1];
  if (code) {
    // Not kept in the history: it counts once.
    history.replaceState(null, "", "#/");
    try {
      await logIn({ code });
      return;
    } catch (error) {
      toast(sentence(error.message), "fail");
    }
  }
  await start();
}

begin();
globalThis.callboard = { now };
