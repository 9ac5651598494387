// Where a prompt's tokens come from: the four kinds, their words, bars and legends.

import { el } from "./dom.js";
import { count, percent } from "./format.js";

/** In the order in which they are drawn. */
export const KINDS = [
  { name: "exact", word: "exact", meaning: "an equal prefix, reused as it was" },
  { name: "copied", word: "copied", meaning: "equal tokens with another context, reused" },
  { name: "repaired", word: "repaired", meaning: "a donor had them; computed again, as their context changed" },
  { name: "computed", word: "computed", meaning: "no donor had them" },
];

/** Token counts by kind, of a document that has `recomputed` for what is computed. */
export function countsOf(document) {
  return { exact: document.exact, copied: document.copied, repaired: document.repaired, computed: document.recomputed };
}

export const reused = (counts) => counts.exact + counts.copied;
export const total = (counts) => KINDS.reduce((sum, kind) => sum + counts[kind.name], 0);

/** The sum of several counts. */
export function summed(rows) {
  const sum = { exact: 0, copied: 0, repaired: 0, computed: 0 };
  for (const row of rows) for (const { name } of KINDS) sum[name] += row[name];
  return sum;
}

/** A bar of the shares; read out as one sentence. */
export function shares(counts, { tall = false } = {}) {
  const parts = KINDS.filter(({ name }) => counts[name] > 0);
  const label = parts.map(({ name, word }) => `${count(counts[name])} ${word}`).join(", ") || "no tokens";
  return el(
    "div",
    { class: tall ? "strip tall" : "strip", role: "img", "aria-label": label, title: label },
    parts.map(({ name }) => el("span", { class: name, vars: { "--share": counts[name] } })),
  );
}

/** A bar of spans in the order of the prompt; `spans`: start, end, kind, perhaps a title. */
export function positions(spans, label) {
  return el(
    "div",
    { class: "strip tall", role: "img", "aria-label": label },
    spans.map((span) => el("span", { class: span.kind, title: span.title, vars: { "--share": span.end - span.start } })),
  );
}

/** What the colours mean; with `counts` how many tokens each is. */
export function legend(counts) {
  const sum = counts ? total(counts) : 0;
  return el(
    "ul",
    { class: "legend" },
    KINDS.map(({ name, word, meaning }) =>
      el("li", { title: meaning }, el("i", { class: name }), word, counts ? el("b", {}, `${count(counts[name])}`) : null, counts && sum ? percent(counts[name], sum) : null),
    ),
  );
}
