// The latest requests as they come, and the slowest lookups among them.

import { ask } from "./api.js";
import { el } from "./dom.js";
import { clockWithSeconds, count, percent, seconds, words } from "./format.js";
import { choices, head, panel, table } from "./table.js";
import { countsOf, legend, reused, shares, summed, total } from "./tokens.js";

const MOST = 100;
const LOOKUP = ["prefix", "fingerprint", "embedding", "plan", "fetch"];
let running = true;
let filter = "";

export const live = {
  title: "Live",
  every: 2000,
  isPaused: () => !running,
  load: () => ask("requests", { limit: MOST }),
  draw({ requests }, { again, redraw }) {
    const rows = requests.filter(matches);
    return [
      head(
        "Live",
        `The last ${MOST} requests, newest first; the server remembers 1,024. No prompt text is kept.`,
        el(
          "div",
          { class: "row" },
          el("div", { class: "field" }, el("label", { for: "filter" }, "Key, tenant or outcome"), el("input", { id: "filter", type: "search", "data-key": "filter", value: filter, on: { input: (event) => { filter = event.target.value; redraw(); } } })),
          choices("Updates", [[true, "Running"], [false, "Paused"]], running, (value) => { running = value; again(); }),
        ),
      ),
      panel("Slowest lookups", "of these requests", slowest(rows)),
      panel("Requests", filter ? `${count(rows.length)} of ${count(requests.length)}` : null, rows.length ? legend() : null, latest(rows, requests.length)),
    ];
  },
};

function matches(request) {
  const text = [request.key, request.tenant, request.endpoint, request.mode, ...request.prompts.flatMap((prompt) => [prompt.decision, prompt.reason])].join(" ");
  return text.toLowerCase().includes(filter.trim().toLowerCase());
}

/** Seconds of all stages of the lookup. */
export function lookupSeconds(request) {
  return LOOKUP.reduce((sum, stage) => sum + (request.seconds[stage] ?? 0), 0);
}

function slowest(requests) {
  const rows = requests.map((request) => ({ request, took: lookupSeconds(request) })).filter((row) => row.took > 0);
  rows.sort((one, other) => other.took - one.took);
  const stage = (name) => ({ title: words(name), right: true, cell: (row) => seconds(row.request.seconds[name]) });
  return table(
    "Slowest lookups",
    [
      { title: "Request", cell: (row) => link(row.request, "slow") },
      { title: "Key", cell: (row) => row.request.key },
      { title: "Lookup", right: true, cell: (row) => seconds(row.took) },
      ...LOOKUP.map(stage),
      { title: "Prompt tokens", right: true, cell: (row) => count(total(tokensOf(row.request))) },
    ],
    rows.slice(0, 5),
    { empty: "No request was looked up yet." },
  );
}

function latest(rows, all) {
  return table(
    "Requests",
    [
      { title: "Came in", cell: (row) => link(row, "at") },
      { title: "Key", cell: (row) => who(row) },
      { title: "Outcome", cell: (row) => outcome(row) },
      { title: "Source of tokens", cell: (row) => (total(tokensOf(row)) ? shares(tokensOf(row)) : el("span", { class: "muted" }, "not tokenized")) },
      { title: "Prompt tokens", right: true, cell: (row) => count(total(tokensOf(row))) },
      { title: "Reused", right: true, cell: (row) => percent(reused(tokensOf(row)), total(tokensOf(row))) },
      { title: "Lookup", right: true, cell: (row) => seconds(lookupSeconds(row) || null) },
      { title: "First token", right: true, cell: (row) => seconds(row.seconds.first_token) },
      { title: "In all", right: true, cell: (row) => seconds(row.seconds.total) },
    ],
    rows,
    { empty: all ? "No request matches." : "No requests yet. They appear here within two seconds." },
  );
}

const tokensOf = (request) => summed(request.prompts.map(countsOf));

function link(request, place) {
  return el("a", { href: `#why/${request.id}`, "data-key": `${place}-${request.id}`, title: "Why it was shared so" }, clockWithSeconds(request.at));
}

function who(request) {
  return request.key === request.tenant ? request.key : [request.key, el("span", { class: "muted" }, ` ${request.tenant}`)];
}

function outcome(request) {
  if (request.status === null) return el("span", { class: "muted" }, "under way");
  if (request.status >= 400) return el("span", { class: "bad" }, `failed (${request.status})`);
  const reason = request.cache_miss_reason?.type;
  const decision = { full: "nothing shared", exact: "prefix shared", approx: "copies shared" }[request.prompts[0]?.decision] ?? "not planned";
  return reason ? [decision, el("span", { class: "muted" }, `: ${words(reason)}`)] : decision;
}
