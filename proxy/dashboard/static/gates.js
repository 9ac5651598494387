// What a plan had to pass, in order, and what each gate measured.

import { el } from "./dom.js";
import { count, counted, nats, percent, seconds, words } from "./format.js";

const GATES = [
  { name: "May it share?", reasons: ["off", "model_unshared", "experiment", "reduced", "exact_only"], measured: (_, status) => `mode of the server: ${status.limits.mode}` },
  { name: "Is it long enough?", reasons: ["short_prompt"], measured: (plan, status) => `${counted(plan.num_tokens, "token")}; at least ${count(status.limits.min_prompt_tokens)} are looked up` },
  { name: "Is something similar stored?", reasons: ["no_candidates", "nothing_in_common"], measured: similar },
  { name: "Does it pay?", reasons: ["not_enough_saved", "does_not_pay"], measured: ({ estimate, saved_s }) => (estimate ? `${seconds(estimate.full_s)} without sharing, ${seconds(estimate.shared_s)} with it` : `${seconds(saved_s)} saved`) },
  { name: "Is it true enough?", reasons: ["deviates_too_much", "rotation_unknown", "too_much_relocated"], measured: deviation },
  { name: "Is its KV there?", reasons: ["kv_gone", "kv_late", "kv_elsewhere", "lookup_failed"], measured: () => "all of what the plan copies" },
];

const SEARCH = GATES.findIndex((gate) => gate.reasons.includes("no_candidates"));

/** How many stored prompts were found, and what the best one has of this prompt, as far as it was estimated. */
function similar(plan) {
  const donors = plan.donors ?? [];
  const most = Math.max(0, ...donors.map((donor) => donor.score ?? 0));
  return counted(donors.length, "stored prompt") + (most ? `; the nearest has ${percent(Math.min(most, 1), 1)} of this one` : "");
}

/** Which gate a reason belongs to; -1 for one of another part. */
export function gateOf(reason) {
  return GATES.findIndex((gate) => gate.reasons.includes(reason));
}

/** passed, stopped or skipped for each gate of a plan. */
export function states(plan) {
  const stopped = gateOf(plan.reason);
  const unsearched = plan.decision === "full" && plan.donors?.length === 0; // too short to pay: nothing was looked up
  return GATES.map((_, place) => {
    if (place === stopped) return "stopped";
    if (unsearched && place === SEARCH) return "skipped";
    return stopped !== -1 && place > stopped && plan.decision === "full" ? "skipped" : "passed";
  });
}

const WORDS = { passed: "✓ passed", stopped: "✕ stopped", skipped: "not reached" };

/** The list. A gate that stopped a better plan may have let a lesser one pass. */
export function gates(plan, status) {
  const shown = states(plan);
  const foreign = plan.reason && gateOf(plan.reason) === -1;
  return [
    el(
      "ol",
      { class: "gates" },
      GATES.map((gate, place) =>
        el(
          "li",
          {},
          el("span", { class: `tag ${shown[place]}` }, WORDS[shown[place]]),
          el("span", {}, gate.name),
          el("span", { class: "muted" }, shown[place] === "skipped" ? "" : gate.measured(plan, status), shown[place] === "stopped" ? el("span", { class: "bad" }, ` ${words(plan.reason)}${plan.decision === "full" ? "" : ": a plan that shares more was refused"}`) : null),
        ),
      ),
    ),
    foreign ? el("p", { class: "bad small" }, `Stopped elsewhere: ${words(plan.reason)}.`) : null,
  ];
}

function deviation({ prediction, copied }) {
  if (!prediction) return copied ? "" : "nothing approximate in it: no deviation";
  return `expected ${nats(prediction.expected)} nats; ${nats(prediction.bound)} is rarely exceeded, the limit is ${nats(prediction.limit)}`;
}
