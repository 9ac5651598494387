// How true answers are promised to be, what the gates decided, and whether sharing pays.

import { ask } from "./api.js";
import { el } from "./dom.js";
import { count, counted, nats, percent, words } from "./format.js";
import { facts, figures, head, panel, table } from "./table.js";

const MINUTES = 1440;

export const fidelity = {
  title: "Fidelity",
  every: 5000,
  load: () => Promise.all([ask("activity", { minutes: MINUTES }), ask("status")]),
  draw: ([activity, status]) => [
    head("Fidelity", "How far answers may deviate from those of a full prefill, and what was refused for it."),
    el("section", { class: "panel" }, el("h2", { class: "verdict" }, promise(status.limits)), el("p", { class: "muted" }, "By prediction, from a calibration. What is measured on answers of this server stands below.")),
    panel("Measured on answers", "since the start", shadows(status.shadow, status.limits)),
    panel("Decisions of the last 24 hours", "by prompt", decisions(activity.decisions, status.reasons)),
    panel("Whether sharing pays", null, control(status.control)),
  ],
};

/** The promise in one sentence. */
export function promise({ mode, max_deviation: most, max_risk: risk }) {
  if (mode === "off") return "Nothing is shared: answers are those of a full prefill.";
  if (mode === "exact" || most === 0) return "Only equal prefixes are shared: answers are those of a full prefill.";
  if (risk >= 1) return `On average, answers with copies deviate by at most ${nats(most)} nats, by prediction.`;
  return `At most ${percent(risk, 1)} of the answers with copies may deviate by more than ${nats(most)} nats.`;
}

/** What was found of answers that were computed once more in full. */
function shadows(found, limits) {
  if (!found) return el("p", { class: "empty" }, "In front of vLLM no deviations are measured while it serves: ", el("code", {}, "kvshare calibrate"), " does.");
  const compared = found.num_compared;
  if (!compared) {
    return found.share
      ? el("p", { class: "empty" }, `Of approximate answers ${percent(found.share, 1)} are computed once more in full. None was yet.`)
      : el("p", { class: "empty" }, "No answer is computed once more in full: set ", el("code", {}, "control.shadow_share"), ", for one in a hundred to 0.01.");
  }
  const isAbove = limits.max_risk < 1 && found.num_above > limits.max_risk * compared;
  const share = `${count(found.num_above)} of ${count(compared)}`;
  return figures([
    ["Deviate by more than allowed", isAbove ? el("span", { class: "bad" }, share) : share, limits.max_risk < 1 ? `${percent(limits.max_risk, 1)} may` : "no share is promised"],
    ["Mean deviation", nats(found.measured / compared), `nats; ${nats(found.expected / compared)} were expected of these`],
    ["Largest", nats(found.largest), `nats; the limit is ${nats(limits.max_deviation)}`],
    ["Computed in full", percent(found.share, 1), found.num_left_out ? `of approximate answers; ${count(found.num_left_out)} left out, as one was under way` : "of approximate answers"],
  ]);
}

const OUTCOMES = { approx: "copies shared", exact: "prefix shared", full: "nothing shared" };

function decisions(rows, reasons) {
  return table(
    "Decisions",
    [
      { title: "Outcome", cell: (row) => OUTCOMES[row.decision] ?? row.decision },
      { title: "What stopped more", cell: (row) => (row.reason ? el("span", { title: reasons[row.reason] }, words(row.reason)) : el("span", { class: "muted" }, "nothing")) },
      { title: "Prompts", right: true, cell: (row) => count(row.prompts) },
      { title: "Computed", right: true, hint: "share of their tokens", cell: (row) => percent(row.computed, row.prompt_tokens) },
      { title: "Expected deviation", right: true, hint: "mean of the plans that were predicted, used or refused, in nats", cell: (row) => nats(row.expected) },
      { title: "Largest bound", right: true, hint: "rarely exceeded, in nats", cell: (row) => nats(row.bound) },
      { title: "Limit", right: true, cell: (row) => nats(row.limit) },
    ],
    rows,
    { empty: "No prompt was planned yet." },
  );
}

function control(state) {
  if (!state || !state.unshared_share) {
    return el("p", { class: "empty" }, "This server does not compare itself with one that shares nothing: set control.unshared_share.");
  }
  return [
    facts([
      ["time without sharing, to compare", percent(state.unshared_share, 1)],
      ...Object.entries(state.num_requests).map(([arm, number]) => [`requests: ${words(arm)}`, count(number)]),
    ]),
    table(
      "By load",
      [
        { title: "Requests at a time", cell: (row) => row.load },
        { title: "Shared", prose: true, cell: (row) => row.shared },
        { title: "Slower with sharing", right: true, cell: (row) => (row.slower === null ? "not known yet" : percent(row.slower, 1)) },
        { title: "Compared", right: true, cell: (row) => `${counted(row.num_blocks_more + row.num_blocks_less, "block")} of time` },
      ],
      state.loads,
      { empty: "No load was seen yet." },
    ),
  ];
}
