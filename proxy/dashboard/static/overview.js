// What sharing brought and what it cost, over time, by tenant and by key, and what does not work.

import { ask } from "./api.js";
import { bars } from "./chart.js";
import { el } from "./dom.js";
import { brief, bytes, clock, count, counted, percent, seconds, words } from "./format.js";
import { switches } from "./sharing.js";
import { choices, figures, head, panel, table } from "./table.js";
import { KINDS, countsOf, legend, reused, shares, total } from "./tokens.js";

const RANGES = [[60, "1 hour"], [360, "6 hours"], [1440, "24 hours"]];
const GROUPS = [["tenants", "Tenants"], ["keys", "Keys"]];
let minutes = 60;
let group = "tenants";

export const overview = {
  title: "Overview",
  every: 5000,
  load: () => Promise.all([ask("activity", { minutes }), ask("status")]),
  draw([activity, status], { again }) {
    const chosen = RANGES.find(([value]) => value === minutes)[1];
    const range = choices("Time", RANGES, minutes, (value) => {
      minutes = value;
      again();
    });
    return [
      head("Overview", `What sharing brought in the last ${chosen.replace(/^1 /, "")}, and what it cost.`, range),
      problems(status),
      el("section", { class: "panel" }, summary(activity.total, status)),
      activity.total.requests ? overTime(activity) : nothing(),
      activity.total.requests ? byGroup(activity, again) : null,
      switches(status.limits, again),
    ];
  },
};

function summary(sums, status) {
  const counts = countsOf(sums);
  const prompt = total(counts);
  return figures([
    ["Time saved, net", seconds(netSaved(sums)), `${seconds(sums.saved_s)} saved, ${seconds(sums.spent_s)} spent on looking up`],
    ["Prompt tokens reused", percent(reused(counts), prompt), `${brief(reused(counts))} of ${brief(prompt)}`],
    ["Requests", count(sums.requests), sums.failed ? el("span", { class: "bad" }, `${count(sums.failed)} failed`) : "none failed"],
    ["KV in memory", bytes(status.kv_bytes), `of ${bytes(status.kv_budget_bytes)}, ${counted(status.num_nodes, "prompt")}`],
  ]);
}

/** Seconds saved minus seconds spent. */
export const netSaved = (sums) => sums.saved_s - sums.spent_s;

function nothing() {
  return panel(
    "No requests yet",
    null,
    el("p", { class: "empty" }, "Send a request to /v1/chat/completions, or let ", el("code", {}, "kvshare warm"), " send documents. Figures appear here within seconds."),
  );
}

function overTime(activity) {
  const bins = filled(activity);
  const when = (bin) => `${clock(bin.start)} to ${clock(bin.start + activity.step_s)}`;
  const tokens = bins.map((bin) => {
    const counts = countsOf(bin);
    return { start: bin.start, above: counts, title: `${when(bin)}: ${KINDS.map(({ name, word }) => `${count(counts[name])} ${word}`).join(", ")}` };
  });
  const times = bins.map((bin) => ({
    start: bin.start,
    above: { saved: bin.saved_s },
    below: { spent: bin.spent_s },
    title: `${when(bin)}: ${seconds(bin.saved_s)} saved, ${seconds(bin.spent_s)} spent`,
  }));
  const sums = activity.total;
  return el(
    "div",
    { class: "columns" },
    panel("Prompt tokens by source", activity.step_s === 60 ? "per minute" : `per ${count(activity.step_s / 60)} minutes`, legend(countsOf(sums)), bars("Prompt tokens by source over time", tokens, { axis: brief })),
    panel(
      "Time saved and spent",
      "saved: by the plans' estimates; spent: measured",
      el("ul", { class: "legend" }, el("li", {}, el("i", { class: "saved" }), "saved by reuse", el("b", {}, seconds(sums.saved_s))), el("li", {}, el("i", { class: "spent" }), "spent on looking up", el("b", {}, seconds(sums.spent_s)))),
      bars("Seconds saved and spent over time", times, { axis: (value) => seconds(value) }),
    ),
  );
}

/** All bins of the time, also those in which nothing happened. */
export function filled(activity) {
  const zero = { exact: 0, copied: 0, repaired: 0, recomputed: 0, saved_s: 0, spent_s: 0, requests: 0, failed: 0 };
  const known = new Map(activity.bins.map((bin) => [bin.bin, bin]));
  return Array.from({ length: activity.num_bins }, (_, place) => ({
    ...(known.get(place) ?? zero),
    start: activity.start + place * activity.step_s,
  }));
}

/** By tenant, or by key: of one tenant each application has a key of its own. */
function byGroup(activity, again) {
  const rows = activity[group].map((row) => ({ ...row, counts: countsOf(row) }));
  const more = activity[`num_${group}`] - rows.length;
  const title = group === "keys" ? "By key" : "By tenant";
  const own = (row) => (row.key === row.tenant ? row.key : [row.key, el("span", { class: "muted" }, ` ${row.tenant}`)]);
  return panel(
    title,
    more > 0 ? `those that reused most; ${counted(more, "other")}` : null,
    choices("Group", GROUPS, group, (value) => { group = value; again(); }),
    table(
      title,
      [
        { title: group === "keys" ? "Key" : "Tenant", cell: (row) => (group === "keys" ? own(row) : row.tenant) },
        { title: "Source of tokens", cell: (row) => shares(row.counts) },
        { title: "Reused", right: true, cell: (row) => percent(reused(row.counts), total(row.counts)) },
        { title: "Prompt tokens", right: true, cell: (row) => count(total(row.counts)) },
        { title: "Requests", right: true, cell: (row) => count(row.requests) },
        { title: "Saved, net", right: true, cell: (row) => seconds(netSaved(row)) },
      ],
      rows,
    ),
  );
}

/** `replica gpu-1`, or the part's word with a capital letter. */
function labelOf(part) {
  const label = part.name ? `${part.part} ${part.name}` : words(part.part);
  return label[0].toUpperCase() + label.slice(1);
}

/** What does not work as it should, since when, and what to do. */
export function found(status) {
  const lines = [];
  if (!status.ready) lines.push(`The engine is not ready: ${status.detail}.`);
  for (const part of status.parts ?? []) {
    if (part.state !== "ok") lines.push(`${labelOf(part)}, ${part.state} since ${clock(part.since)}: ${part.detail}. What to do: ${part.remedy}.`);
  }
  if (status.num_isolation_denials) lines.push(`${counted(status.num_isolation_denials, "search result")} of another namespace were discarded. Report this.`);
  const failures = status.fallbacks.reduce((sum, row) => sum + row.count, 0);
  if (failures) lines.push(`${counted(failures, "request")} did without a part since the start: ${status.fallbacks.map((row) => `${words(row.component)} (${words(row.reason)}) ${count(row.count)}`).join(", ")}.`);
  return lines;
}

function problems(status) {
  const lines = found(status);
  if (!lines.length) return null;
  return el("section", { class: "panel", "aria-label": "What needs attention" }, el("div", { class: "notice" }, el("h2", {}, "Needs attention"), lines.map((line) => el("p", {}, line))));
}
