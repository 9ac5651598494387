// Where KV is held, how full that is, and what was evicted.

import { ask } from "./api.js";
import { evict, pin } from "./actions.js";
import { el } from "./dom.js";
import { bytes, count, percent, words } from "./format.js";
import { facts, figures, head, panel, table } from "./table.js";

const CAUSES = { capacity: "to make room", end: "the end of a prompt, to make room", lost: "their KV was lost", quota: "their tenant's limit" };

export const memory = {
  title: "Memory",
  every: 5000,
  load: () => Promise.all([ask("stats"), ask("status")]),
  draw([stats, status], { again }) {
    const sums = stats.totals;
    return [
      head("Memory", "Where KV is held, how full that is, and what left it since the start."),
      el(
        "section",
        { class: "panel" },
        figures([
          ["KV in memory", bytes(status.kv_bytes), `of ${bytes(status.kv_budget_bytes)} (${percent(status.kv_bytes, status.kv_budget_bytes)})`],
          ["Pinned", bytes(stats.pins.num_bytes), `at most ${bytes(stats.pins.max_bytes)}`],
          ["Stored once", percent(sums.num_tokens - sums.num_stored_tokens, sums.num_tokens), "of prompt tokens need no KV of their own"],
          ["Reached by no key", bytes(unreachable(stats, status)), "of prompts whose keys are gone: evict them in Tree"],
          ["Evicted", count(Object.values(status.evictions).reduce((sum, each) => sum + each, 0)), "prompts and ends of prompts"],
        ]),
      ),
      panel("Tiers", "since the start", tiers(status)),
      el("div", { class: "columns" }, panel("Evictions", "since the start", evictions(status)), panel("Index", null, index(status))),
      sums.num_nodes
        ? el(
            "div",
            { class: "row" },
            el("button", { type: "button", class: "danger", on: { click: () => evict({ all: true }, "everything", again) } }, "Evict everything …"),
            sums.num_pinned ? el("button", { type: "button", on: { click: () => pin("unpin", { all: true }, "everything", null, again) } }, "Unpin everything …") : null,
          )
        : null,
    ];
  },
};

/** Bytes of KV in namespaces that no configured key uses. A server without keys has one client, who reaches all. */
export function unreachable({ namespaces, owners = {} }, { asks_for_keys: hasKeys }) {
  if (!hasKeys) return 0;
  return namespaces.reduce((sum, { namespace, num_bytes: size }) => sum + (owners[namespace]?.keys.length ? 0 : size), 0);
}

function fullness(used, most) {
  const label = `${percent(used, most)} used`;
  return el("div", { class: "strip", role: "img", "aria-label": label, title: label }, el("span", { class: "used", vars: { "--share": used } }), el("span", { class: "free", vars: { "--share": Math.max(0, most - used) } }));
}

function tiers(status) {
  return table(
    "Tiers",
    [
      { title: "Tier", cell: (row) => row.name },
      { title: "Full", cell: (row) => fullness(row.num_bytes, row.max_bytes) },
      { title: "KV", right: true, cell: (row) => bytes(row.num_bytes) },
      { title: "Room for", right: true, cell: (row) => bytes(row.max_bytes) },
      { title: "Segments", right: true, cell: (row) => count(row.num_segments) },
      { title: "Read", right: true, cell: (row) => count(row.num_hits) },
      { title: "Not there", right: true, cell: (row) => count(row.num_misses - row.num_late - row.num_dropped) },
      { title: "Too late", right: true, cell: (row) => count(row.num_late) },
      { title: "Damaged", right: true, cell: (row) => count(row.num_dropped) },
      { title: "To be written", right: true, cell: (row) => bytes(row.num_due_bytes) },
    ],
    status.tiers,
    { empty: status.replicas.length ? "The KV is in the memory of the replicas: see Replicas." : "No tier is open." },
  );
}

function evictions(status) {
  return table(
    "Evictions",
    [
      { title: "Cause", cell: ([cause]) => CAUSES[cause] ?? words(cause) },
      { title: "Prompts", right: true, cell: ([, number]) => count(number) },
    ],
    Object.entries(status.evictions),
    { empty: "Nothing was evicted: all that was stored is still there." },
  );
}

function index({ index: state, num_embedding: waiting }) {
  if (!state) return el("p", { class: "empty" }, "This server has no index.");
  return facts([
    ["written", state.paused ? el("span", { class: "bad" }, `paused: ${state.paused}`) : "yes"],
    ["prompts that wait for it", count(state.num_waiting)],
    ["prompts to embed", count(waiting)],
    ["metadata and index on disk", state.store_bytes === null ? null : bytes(state.store_bytes)],
    ["free on its disk", state.free_bytes === null ? null : bytes(state.free_bytes)],
    ...Object.entries(state.circuits).map(([part, now]) => [words(part), now === "closed" ? "works" : el("span", { class: "bad" }, words(now))]),
  ]);
}
