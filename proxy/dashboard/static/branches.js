// The prompts of a namespace as a table that opens: fifty of each level, and more on demand.

import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import { ago, bytes, count } from "./format.js";
import { choices, table } from "./table.js";

const PAGE = 50;
const MOST_BY_BYTES = 20000; // prompts: with more the server takes longer than a second to weigh all
const ORDERS = [["hits", "Copied most"], ["tokens", "Longest"], ["age", "Oldest"], ["bytes", "Most KV"]];

/** `totals`: of the namespace. */
export function branches(namespace, totals) {
  const place = el("div", {});
  const state = { sort: "hits", roots: [], known: 0, opened: new Map() };
  const orders = ORDERS.filter(([name]) => name !== "bytes" || totals.num_nodes <= MOST_BY_BYTES);

  async function loadRoots() {
    const page = await ask("tree", { namespace, sort: state.sort, depth: 1, limit: PAGE, skip: state.roots.length || null });
    state.roots.push(...page.roots);
    state.known = page.num_roots;
  }

  async function loadBelow(entry) {
    const below = state.opened.get(entry.id) ?? [];
    const page = await ask("tree", { root: entry.id, sort: state.sort, depth: 2, limit: PAGE, skip: below.length || null });
    state.opened.set(entry.id, [...below, ...(page.roots[0]?.children ?? [])]);
  }

  function* rows(entries, level) {
    for (const entry of entries) {
      yield { entry, level };
      const below = state.opened.get(entry.id);
      if (!below) continue;
      yield* rows(below, level + 1);
      if (below.length < entry.num_children) yield { more: entry, left: entry.num_children - below.length, level: level + 1 };
    }
  }

  const attempt = async (action) => {
    try {
      await action();
      draw();
    } catch (error) {
      fill(place, el("p", { class: "bad", role: "alert" }, error.message));
    }
  };

  const toggle = (entry) => attempt(async () => {
    if (!state.opened.delete(entry.id)) await loadBelow(entry);
  });

  const reorder = (sort) => attempt(async () => {
    Object.assign(state, { sort, roots: [], opened: new Map() });
    await loadRoots();
  });

  function first({ entry, more, left, level }) {
    if (more) return branch(level, el("button", { type: "button", class: "quiet", "data-key": `more-${more.id}`, on: { click: () => attempt(() => loadBelow(more)) } }, `${count(left)} more below ${more.id}`));
    const isOpen = state.opened.has(entry.id);
    const twist = entry.num_children
      ? el("button", { type: "button", class: "twist", "data-key": `twist-${entry.id}`, "aria-expanded": String(isOpen), "aria-label": `Prompts below ${entry.id}`, on: { click: () => toggle(entry) } })
      : el("span", { class: "twist leaf", "aria-hidden": "true" });
    return branch(level, twist, el("a", { href: `#tree/${entry.id}` }, String(entry.id)), entry.pinned ? el("span", { class: "muted small" }, "pinned") : null);
  }

  const cell = (text) => (row) => (row.more ? "" : text(row.entry));

  function draw() {
    const columns = [
      { title: "Prompt", cell: first },
      { title: "Tokens", right: true, cell: cell((entry) => count(entry.num_tokens)) },
      { title: "Own KV", right: true, hint: "what its eviction frees", cell: cell((entry) => bytes(entry.own_bytes)) },
      { title: "Shared KV", right: true, hint: "that other prompts use as well", cell: cell((entry) => bytes(entry.num_bytes - entry.own_bytes)) },
      { title: "With those below", right: true, hint: "KV that only it and the prompts below it use", cell: cell((entry) => bytes(entry.subtree_bytes)) },
      { title: "Below", right: true, cell: cell((entry) => count(entry.num_children)) },
      { title: "Copied", right: true, cell: cell((entry) => count(entry.num_hits)) },
      { title: "Last used", right: true, cell: cell((entry) => ago(entry.idle_s)) },
    ];
    const left = state.known - state.roots.length;
    fill(
      place,
      choices("Order", orders, state.sort, reorder),
      table("Prompts", columns, [...rows(state.roots, 0)], { empty: "Nothing is stored here." }),
      left > 0 ? el("button", { type: "button", class: "more", "data-key": "more", on: { click: () => attempt(loadRoots) } }, `Show ${Math.min(PAGE, left)} of ${count(left)} more`) : null,
    );
  }

  place.className = "results";
  attempt(loadRoots);
  return place;
}

function branch(level, ...parts) {
  return el("span", { class: "branch", vars: { "--level": level } }, parts);
}
