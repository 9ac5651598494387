// The frame: the key, which view is shown, and when it is asked for again.

import { ask, key } from "./api.js";
import { el, fill } from "./dom.js";
import { fidelity } from "./fidelity.js";
import { live } from "./live.js";
import { memory } from "./memory.js";
import { overview } from "./overview.js";
import { replicas } from "./replicas.js";
import { tree } from "./tree.js";
import { why } from "./why.js";

const VIEWS = { overview, live, why, tree, memory, fidelity, replicas };
const main = document.getElementById("main");
const asksForKeys = document.documentElement.dataset.keys !== "no";
let shown = 0; // counts what was asked for: an answer that comes late is not drawn
let timer = null;
let current = null; // the view that is shown

async function show({ moved }) {
  const turn = ++shown;
  clearTimeout(timer);
  const [name, ...place] = (location.hash.slice(1) || "overview").split("/").map(decodeURIComponent);
  const view = VIEWS[name] ?? overview;
  current = null;
  if (asksForKeys && !key.get()) return login();
  if (moved) mark(view);
  try {
    const [answer, status] = await Promise.all([view.load(...place), moved ? ask("status") : null]);
    if (turn !== shown) return;
    if (status) server(status);
    const redraw = () => fill(main, view.draw(answer, tools));
    const tools = { again: () => show({ moved: false }), redraw };
    redraw();
    current = view;
    if (moved) focus();
  } catch (error) {
    if (turn !== shown) return;
    if (error.status === undefined) throw error;
    if (error.status === 401 || error.status === 403) return login(error);
    return failed(error);
  }
  if (view.every && !view.isPaused?.()) timer = setTimeout(() => show({ moved: false }), view.every);
}

/** Say which view it is, in the title and in the list of views. */
function mark(view) {
  document.title = `${view.title} – KVShare`;
  const links = Object.entries(VIEWS).map(([name, each]) =>
    el("li", {}, el("a", { href: `#${name}`, "aria-current": each === view ? "page" : null, "data-key": `nav-${name}` }, each.title)),
  );
  fill(document.getElementById("nav"), links);
}

function server(status) {
  fill(document.getElementById("server"), `${status.model} · ${status.version}`);
  document.getElementById("sign-out").hidden = !key.get();
}

/** To the heading: a screen reader reads what came, and Tab goes on from there. */
function focus() {
  window.scrollTo(0, 0);
  main.querySelector("h1")?.focus({ preventScroll: true });
}

function failed(error) {
  const triesAgain = error.status === 0 || error.status >= 500; // else the address names what is not there
  const text = triesAgain ? `${error.message} This page tries again.` : error.message;
  fill(main, el("h1", { tabindex: -1 }, "No figures"), el("p", { class: "notice bad", role: "alert" }, text));
  if (triesAgain) timer = setTimeout(() => show({ moved: false }), 3000);
}

function login(error) {
  document.title = "KVShare";
  const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const enter = (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    show({ moved: true });
  };
  const local = error && !asksForKeys;
  fill(
    main,
    el(
      "section",
      { class: "panel login" },
      el("h1", { tabindex: -1 }, local ? "Not from here" : "Admin key"),
      error ? el("p", { class: "bad", role: "alert" }, error.message) : null,
      local
        ? el("p", {}, "Open this page on the machine of the server, by 127.0.0.1 or localhost, or configure keys: see docs/dashboard.md.")
        : el(
            "form",
            { on: { submit: enter } },
            el("div", { class: "field" }, el("label", { for: "key" }, "A key with the role admin"), input),
            el("p", { class: "small muted" }, "It stays in this tab, and is sent to this server only."),
            el("div", { class: "row" }, el("button", { type: "submit", class: "main" }, "Open")),
          ),
    ),
  );
  (local ? main.querySelector("h1") : input).focus();
}

document.getElementById("sign-out").addEventListener("click", (event) => {
  key.forget();
  shown += 1;
  event.currentTarget.hidden = true;
  clearTimeout(timer);
  fill(document.getElementById("nav"));
  fill(document.getElementById("server"));
  if (asksForKeys) login();
  else show({ moved: true });
});
window.addEventListener("hashchange", () => show({ moved: true }));
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && current?.every && !current.isPaused?.()) show({ moved: false });
});
show({ moved: true });
