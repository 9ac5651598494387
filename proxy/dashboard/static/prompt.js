// Parts of one stored prompt: how it was edited, and where its KV lies.

import { el } from "./dom.js";
import { bytes, count, words } from "./format.js";
import { table } from "./table.js";
import { positions } from "./tokens.js";

const MOST = 200;
const SHORT = 6;

/** An edit script: a bar over the target, and its steps. */
export function editsOf(edits) {
  const counts = Object.entries(edits.counts).filter(([, tokens]) => tokens > 0);
  const spans = edits.ops
    .filter(({ target: [start, end] }) => end > start)
    .map(({ op, target: [start, end] }) => ({ start, end, kind: op === "keep" ? "copied" : "computed", title: `${words(op)} tokens ${count(start)} to ${count(end)}` }));
  return [
    el("p", { class: "small" }, counts.map(([op, tokens]) => `${words(op)} ${count(tokens)}`).join(", "), " tokens"),
    positions(spans, "Blue is kept from the other prompt, grey is new"),
    el("ul", { class: "legend" }, el("li", {}, el("i", { class: "copied" }), "kept"), el("li", {}, el("i", { class: "computed" }), "new")),
    folded(edits.ops.length, "edits", table(
      "Edits",
      [
        { title: "Edit", cell: (row) => words(row.op) },
        { title: "Tokens there", right: true, cell: (row) => range(row.source) },
        { title: "Tokens here", right: true, cell: (row) => range(row.target) },
      ],
      edits.ops.slice(0, MOST),
    )),
    edits.ops.length > MOST ? el("p", { class: "small muted" }, `and ${count(edits.ops.length - MOST)} more edits`) : null,
  ];
}

/** The pieces of KV of a prompt. */
export function piecesOf(node) {
  const kind = (piece) => (piece.num_references > 1 ? "copied" : "computed");
  return [
    positions(
      node.pieces.map((piece) => ({ ...piece, kind: kind(piece), title: `tokens ${count(piece.start)} to ${count(piece.end)}, ${bytes(piece.num_bytes)}` })),
      "Blue is shared with other prompts, grey is its own",
    ),
    el("ul", { class: "legend" }, el("li", {}, el("i", { class: "copied" }), "shared with other prompts"), el("li", {}, el("i", { class: "computed" }), "its own")),
    folded(node.pieces.length, "pieces", table(
      "Pieces of KV",
      [
        { title: "Tokens", cell: (row) => range([row.start, row.end]) },
        { title: "KV", right: true, cell: (row) => bytes(row.num_bytes) },
        { title: "Prompts that use it", right: true, cell: (row) => count(row.num_references) },
        { title: "Moved by", right: true, cell: (row) => count(row.shift) },
        { title: "Generation", right: true, hint: "0: computed from its own context alone", cell: (row) => count(row.generation) },
      ],
      node.pieces.slice(0, MOST),
    )),
  ];
}

/** A long table opens on demand. */
function folded(length, what, shown) {
  return length > SHORT ? el("details", {}, el("summary", {}, `All ${count(length)} ${what}`), shown) : shown;
}

const range = ([start, end]) => (end > start ? `${count(start)} – ${count(end)}` : `at ${count(start)}`);
