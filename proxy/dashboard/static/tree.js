// What is stored: by tenant, the prompts of one, and one prompt. The server sorts and counts; a page has fifty.

import { ask } from "./api.js";
import { evict, pin } from "./actions.js";
import { el } from "./dom.js";
import { ago, bytes, count, counted, percent } from "./format.js";
import { editsOf, piecesOf } from "./prompt.js";
import { branches } from "./branches.js";
import { facts, figures, head, panel, table } from "./table.js";

export const tree = {
  title: "Tree",
  load: async (place, below) => {
    if (place === "of") return { namespace: below, ...(await ask("stats", { namespace: below })) };
    return place ? { node: await ask(`node/${encodeURIComponent(place)}`) } : ask("stats");
  },
  draw(found, { again }) {
    if (found.node) return prompt(found.node, found.node.owners ?? {}, again);
    return found.namespace ? ofTenant(found, again) : tenants(found, again);
  },
};

/** Whose a namespace is, in words. */
export function ownerName(owners, namespace) {
  const owner = owners?.[namespace];
  if (!owner) return `namespace ${namespace.slice(0, 8)}`;
  if (owner.scope === "private" && !owner.keys.length) return `${owner.tenant} (private, its key is gone)`;
  return owner.scope === "private" ? `${owner.tenant} (private: ${owner.keys.join(", ")})` : owner.tenant;
}

function tenants(stats, again) {
  const rows = [...stats.namespaces].sort((one, other) => other.num_bytes - one.num_bytes);
  const shown = rows.slice(0, 100);
  const sums = stats.totals;
  return [
    head("Tree", "Stored prompts, below those that they were edited from. KV never crosses tenants."),
    el(
      "section",
      { class: "panel" },
      figures([
        ["Prompts", count(sums.num_nodes), `${counted(sums.num_roots, "root")}, ${counted(sums.max_depth, "level")} deep`],
        ["Tokens of prompts", count(sums.num_tokens), `${count(sums.num_stored_tokens)} are stored (${percent(sums.num_stored_tokens, sums.num_tokens)})`],
        ["KV", bytes(sums.num_bytes), counted(sums.num_segments, "segment")],
        ["Pinned", count(sums.num_pinned), "prompts that are not evicted for room"],
      ]),
    ),
    panel(
      "By tenant",
      rows.length > shown.length ? `the largest ${shown.length} of ${count(rows.length)} namespaces` : "one for each model, tenant and salt",
      table(
        "By tenant",
        [
          { title: "Tenant", cell: (row) => el("a", { href: `#tree/of/${row.namespace}` }, ownerName(stats.owners, row.namespace)) },
          { title: "KV", right: true, cell: (row) => bytes(row.num_bytes) },
          { title: "of all", right: true, cell: (row) => percent(row.num_bytes, sums.num_bytes) },
          { title: "Prompts", right: true, cell: (row) => count(row.num_nodes) },
          { title: "Tokens of prompts", right: true, cell: (row) => count(row.num_tokens) },
          { title: "Stored tokens", right: true, cell: (row) => count(row.num_stored_tokens) },
          { title: "Pinned", right: true, cell: (row) => count(row.num_pinned) },
        ],
        shown,
        { empty: "Nothing is stored yet. Each prompt of at least sharing.min_prompt_tokens tokens is stored after its answer." },
      ),
      rows.length ? el("div", { class: "row" }, el("button", { type: "button", class: "danger", on: { click: () => evict({ all: true }, "everything", again) } }, "Evict everything …")) : null,
    ),
  ];
}

function ofTenant(found, again) {
  const name = ownerName(found.owners, found.namespace);
  const all = `all prompts of ${name} in this namespace`; // others have its salted and private prompts
  const sums = found.totals;
  const sizes = { num_nodes: sums.num_nodes, num_bytes: sums.num_bytes };
  const leave = () => { location.hash = "#tree"; };
  return [
    head(name, `${counted(sums.num_nodes, "prompt")} with ${bytes(sums.num_bytes)} of KV, ${sums.num_pinned ? `${count(sums.num_pinned)} pinned` : "none pinned"}`, el("a", { href: "#tree" }, "All tenants")),
    panel("Prompts", null, branches(found.namespace, sums)),
    el(
      "div",
      { class: "row" },
      el("button", { type: "button", on: { click: () => pin("pin", { namespace: found.namespace }, all, sizes, again) } }, "Pin all …"),
      sums.num_pinned ? el("button", { type: "button", on: { click: () => pin("unpin", { namespace: found.namespace }, all, null, again) } }, "Unpin all …") : null,
      el("button", { type: "button", class: "danger", on: { click: () => evict({ namespace: found.namespace }, all, leave) } }, "Evict all …"),
    ),
  ];
}

function prompt(node, owners, again) {
  const link = (id) => el("a", { href: `#tree/${id}` }, String(id));
  const leave = async () => {
    const { namespaces } = await ask("stats"); // the tenant's last prompt may be gone
    location.hash = namespaces.some((each) => each.namespace === node.namespace) ? `#tree/of/${node.namespace}` : "#tree";
  };
  const lineage = [...node.parents].reverse();
  return [
    head(`Prompt ${node.id}`, `${counted(node.num_tokens, "token")} of ${ownerName(owners, node.namespace)}`, el("a", { href: `#tree/of/${node.namespace}` }, "All prompts of this tenant")),
    el(
      "section",
      { class: "panel" },
      figures([
        ["Its own KV", bytes(node.own_bytes), "what its eviction frees"],
        ["KV shared with others", bytes(node.num_bytes - node.own_bytes), `${percent(node.num_bytes - node.own_bytes, node.num_bytes)} of what it uses`],
        ["Copied from", counted(node.num_hits, "time"), `last used ${ago(node.idle_s)}`],
        ["Stored", ago(node.age_s), node.pinned ? "pinned" : "may be evicted for room"],
      ]),
      facts([
        ["lineage", lineage.length ? [lineage.map((id) => [link(id), " › "]), el("b", {}, String(node.id))] : "a root: computed in full"],
        ["children", node.children.length ? [node.children.slice(0, 20).map((id, place) => [place ? ", " : "", link(id)]), node.num_children > 20 ? ` and ${count(node.num_children - 20)} more` : ""] : "none"],
        ["exact up to", `token ${count(node.exact_length)}`],
      ]),
      el(
        "div",
        { class: "row" },
        node.pinned
          ? el("button", { type: "button", on: { click: () => pin("unpin", { node: node.id }, `prompt ${node.id}`, null, again) } }, "Unpin …")
          : el("button", { type: "button", on: { click: () => pin("pin", { node: node.id }, `prompt ${node.id}`, { num_nodes: 1, num_bytes: node.num_bytes }, again) } }, "Pin …"),
        el("button", { type: "button", class: "danger", disabled: node.pinned, on: { click: () => evict({ node: node.id }, `prompt ${node.id}`, leave) } }, "Evict …"),
      ),
    ),
    panel("Where its KV lies", null, piecesOf(node)),
    node.edits ? panel("Edits", `from its parent ${node.parents[0]}`, editsOf(node.edits)) : null,
    panel(
      "Shares KV with",
      null,
      table("Shares KV with", [{ title: "Prompt", cell: (row) => link(row.id) }, { title: "Tokens", right: true, cell: (row) => count(row.num_tokens) }], node.shared_with.slice(0, 50), { empty: "No other prompt." }),
      node.num_shared_with > 50 ? el("p", { class: "small muted" }, `and ${count(node.num_shared_with - 50)} more`) : null,
    ),
  ];
}
