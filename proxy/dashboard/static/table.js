// Tables with aligned numbers, and what stands there while they are empty.

import { el } from "./dom.js";

/**
 * A table. `columns`: {title, cell(row), right, prose, head}; a cell is text or an element. `key(row)` names a row's
 * first cell for the focus.
 */
export function table(caption, columns, rows, { empty = "Nothing yet.", row: attributes = () => ({}) } = {}) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const kind = (column) => (column.right ? "right" : column.prose ? "prose" : null);
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col", class: kind(column), title: column.hint }, column.title)))),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            attributes(row),
            columns.map((column, place) =>
              el(place ? "td" : "th", { class: kind(column), scope: place ? null : "row" }, column.cell(row)),
            ),
          ),
        ),
      ),
    ),
  );
}

/** A panel with a heading and a sentence next to it. */
export function panel(title, note, ...children) {
  return el("section", { class: "panel" }, el("header", {}, el("h2", {}, title), note ? el("p", {}, note) : null), children);
}

/** A heading of a view, with a sentence and controls. */
export function head(title, sentence, ...controls) {
  return el("div", { class: "head" }, el("div", {}, el("h1", { tabindex: -1 }, title), el("p", {}, sentence)), controls);
}

/** Big numbers: [term, value, note] each. */
export function figures(entries) {
  return el(
    "dl",
    { class: "figures" },
    entries.map(([term, value, note]) => el("div", { class: "figure" }, el("dt", {}, term), el("dd", {}, value), note ? el("dd", {}, note) : null)),
  );
}

/** Small ones: [term, value] each. */
export function facts(entries) {
  return el(
    "dl",
    { class: "facts" },
    entries.filter(([, value]) => value !== null && value !== undefined).map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]),
  );
}

/** Buttons of which one is pressed: [value, text] each. */
export function choices(label, entries, chosen, choose) {
  return el(
    "div",
    { class: "choices", role: "group", "aria-label": label },
    entries.map(([value, text]) =>
      el("button", { type: "button", "data-key": `choice-${text}`, "aria-pressed": String(value === chosen), on: { click: () => choose(value) } }, text),
    ),
  );
}
