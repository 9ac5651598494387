// Why a prompt is shared as it is: of a prompt that is pasted, or of a request that was served.

import { ask, command } from "./api.js";
import { announce, el, fill } from "./dom.js";
import { clockWithSeconds, count, nats, percent, seconds, words } from "./format.js";
import { gates } from "./gates.js";
import { editsOf, piecesOf } from "./prompt.js";
import { facts, figures, head, panel, table } from "./table.js";
import { countsOf, legend, positions, reused, shares, summed, total } from "./tokens.js";

const FORMS = [["chat", "Chat message"], ["completions", "Completion"], ["body", "JSON body of a request"]];
const MODES = [["", "as the server does"], ["approx", "approx"], ["exact", "exact"], ["off", "off"]];
const asked = { text: "", form: "chat", mode: "", whose: "" };

export const why = {
  title: "Why",
  load: async (id) => ({
    status: await ask("status"),
    request: id ? await opened(id) : null,
    owners: id ? [] : ownersOf(await ask("tenants")),
  }),
  draw: ({ status, request, owners }) => (request ? served(request, status) : pasted(status, owners)),
};

/* A prompt that is pasted */

/** Whose stored prompts a prompt can be planned from: value and text of each. Private keys have a space of their own. */
export function ownersOf({ tenants }) {
  const rows = tenants.flatMap(({ tenant, keys }) => [
    keys.some((key) => key.scope === "tenant") ? [new URLSearchParams({ tenant }).toString(), tenant] : null,
    ...keys.filter((key) => key.scope === "private").map(({ name }) => [new URLSearchParams({ tenant, key: name }).toString(), `${tenant}, key ${name}`]),
  ]);
  return [["", "the tenant of your key"], ...rows.filter(Boolean)];
}

function pasted(status, owners) {
  const result = el("div", { class: "results", id: "result" });
  const field = (name, label, control) => el("div", { class: "field" }, el("label", { for: name }, label), control);
  const select = (name, entries) =>
    el("select", { id: name, on: { change: (event) => { asked[name] = event.target.value; } } }, entries.map(([value, text]) => el("option", { value, selected: value === asked[name] }, text)));
  const text = el("textarea", { id: "text", required: true, spellcheck: "false", placeholder: "Paste a prompt …" });
  text.value = asked.text;
  const button = el("button", { type: "submit", class: "main" }, "Explain");
  const form = el(
    "form",
    { class: "panel", on: { submit: (event) => { event.preventDefault(); asked.text = text.value; explain(status, result, button); } } },
    field("text", "Prompt", text),
    el("div", { class: "row" }, field("form", "Sent as", select("form", FORMS)), field("mode", "Mode", select("mode", MODES)), owners.length > 1 ? field("whose", "As for", select("whose", owners)) : null, button),
    el("p", { class: "small muted" }, "Planned from what that tenant has stored; nothing is computed or stored. To open a request that was served, choose it in ", el("a", { href: "#live" }, "Live"), "."),
  );
  return [head("Why", "Which stored prompts a prompt would be built from, and what kept it from sharing more."), form, result];
}

async function explain(status, result, button) {
  button.disabled = true;
  try {
    const { api, body } = bodyOf(asked, status.model);
    const document = await command(`explain?${new URLSearchParams([...new URLSearchParams(asked.whose), ["api", api], ["texts", "true"]])}`, body);
    fill(result, explained(document, status));
    announce(verdict(document));
  } catch (error) {
    fill(result, el("p", { class: "notice bad", role: "alert" }, error.message));
  } finally {
    button.disabled = false;
  }
}

/** The API and the body of what was pasted. Throws an Error for text that is not a JSON object. */
export function bodyOf({ text, form, mode }, model) {
  const options = mode ? { kvshare: { mode } } : {};
  if (form === "chat") return { api: "chat", body: { model, messages: [{ role: "user", content: text }], ...options } };
  if (form === "completions") return { api: "completions", body: { model, prompt: text, ...options } };
  let body;
  try {
    body = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}.`);
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) throw new Error("Expected a JSON object: the body of a request.");
  const api = "input" in body ? "responses" : "prompt" in body ? "completions" : "chat";
  return { api, body: { ...body, model, ...options } };
}

function explained(document, status) {
  const counts = countsOf(document);
  return [
    el(
      "section",
      { class: "panel" },
      el("h2", { class: "verdict" }, verdict(document)),
      whom(document.planned_for, document.mode),
      document.cache_miss_reason ? el("p", {}, document.cache_miss_reason.message) : null,
      positions(document.spans.map(drawn), "The prompt from its first token to its last"),
      legend(counts),
      figures([
        ["Without sharing", seconds(document.estimate.full_s), "estimated prefill"],
        ["With this plan", seconds(document.estimate.shared_s), "with its lookup"],
        ["Saved", seconds(document.estimate.saved_s), percent(document.estimate.saved_s, document.estimate.full_s)],
      ]),
    ),
    panel("What decided", "in the order of a request's way", gates(document, status)),
    coloured(document),
    panel("Candidates", "stored prompts that were compared", donors(document)),
    Object.keys(document.stage_ms).length ? panel("Time of this lookup", null, facts(Object.entries(document.stage_ms).map(([stage, ms]) => [words(stage), seconds(ms / 1000)]))) : null,
  ];
}

/** Whose stored prompts were looked at, and the most that was allowed. */
function whom(planned, mode) {
  const key = planned.key ? `the private key ${planned.key} of ` : "";
  return el("p", { class: "muted small" }, `Planned for ${key}tenant ${planned.tenant}, mode ${mode}.`);
}

/** One sentence for a plan. */
export function verdict(document) {
  const counts = countsOf(document);
  const prompt = total(counts);
  if (!reused(counts)) return `All ${count(prompt)} tokens would be computed.`;
  const parts = [counts.exact ? `${count(counts.exact)} as an equal prefix` : null, counts.copied ? `${count(counts.copied)} copied` : null];
  return `${count(reused(counts))} of ${count(prompt)} tokens would be reused (${percent(reused(counts), prompt)}): ${parts.filter(Boolean).join(" and ")}.`;
}

const KIND_OF_SPAN = { exact: "exact", copied: "copied", repair: "repaired", placeholder: "computed" };

function drawn(span) {
  const kind = KIND_OF_SPAN[span.kind];
  const from = span.donor ? `, from prompt ${span.donor}${span.shift ? `, moved by ${span.shift}` : ""}` : "";
  return { ...span, kind, title: `tokens ${count(span.start)} to ${count(span.end)}: ${kind}${from}` };
}

/** The client's own text, by where its tokens come from. */
function coloured(document) {
  if (!document.spans.some((span) => span.text)) return null;
  return panel(
    "Your prompt",
    "with the model's template; what would be computed is not marked",
    el("div", { class: "text", tabindex: 0, role: "region", "aria-label": "Your prompt, coloured" }, document.spans.map(drawn).map((span) => el("mark", { class: span.kind, title: span.title }, span.text))),
    legend(),
  );
}

function donors(document) {
  return table(
    "Candidates",
    [
      { title: "Prompt", cell: (row) => el("a", { href: `#tree/${row.node}` }, String(row.node)) },
      { title: "Tokens used", right: true, cell: (row) => count(row.tokens_used) },
      { title: "Outcome", cell: (row) => words(row.outcome) },
      { title: "Found by", cell: (row) => row.sources.map(words).join(", ") },
      { title: "Similarity", right: true, cell: (row) => (row.similarity === null ? "–" : row.similarity.toFixed(2)) },
    ],
    document.donors,
    { empty: "None: nothing similar is stored in this namespace." },
  );
}

/* A request that was served */

async function opened(id) {
  const request = await ask(`requests/${encodeURIComponent(id)}`);
  const node = request.stored?.[0]?.node;
  const donor = request.prompts[0]?.donors?.[0];
  const isThere = (id) => Boolean(id) && !request.gone.includes(id);
  const nothing = () => null; // evicted just now
  return {
    ...request,
    node: isThere(node) ? await ask(`node/${encodeURIComponent(node)}`).catch(nothing) : null,
    diff: isThere(node) && isThere(donor) && node !== donor ? await ask("diff", { a: donor, b: node, min_run: 16 }).catch(nothing) : null,
  };
}

function served(request, status) {
  const counts = summed(request.prompts.map(countsOf));
  const prompt = request.prompts[0];
  return [
    head(`Request at ${clockWithSeconds(request.at)}`, `${request.endpoint}, key ${request.key}, tenant ${request.tenant}`, el("a", { href: "#live" }, "All requests")),
    el(
      "section",
      { class: "panel" },
      el("h2", { class: "verdict" }, prompt ? verdict(counted(counts)).replace("would be", "were") : "This request was not planned."),
      request.cache_miss_reason ? el("p", {}, request.cache_miss_reason.message) : null,
      prompt ? [shares(counts, { tall: true }), legend(counts), el("p", { class: "small muted" }, "The bar shows shares, not places: no positions are kept of a request.")] : null,
    ),
    el(
      "div",
      { class: "columns" },
      panel("Times", null, facts(Object.entries(request.seconds).map(([stage, value]) => [words(stage), seconds(value)]))),
      panel("Facts", null, facts(about(request))),
    ),
    prompt ? panel("What decided", "in the order of a request's way", gates({ ...prompt, num_tokens: prompt.prompt_tokens }, status)) : null,
    request.diff ? panel("Edits", `from prompt ${request.diff.a}, its first donor, to this one`, editsOf(request.diff.edits)) : null,
    request.node ? panel("Where its KV lies now", null, piecesOf(request.node)) : null,
  ];
}

/** What a vLLM reported of a plan. */
function executed(report) {
  if (!report) return null;
  const why = report.reason ? `, because of ${words(report.reason)}` : "";
  return `${report.decision}${why}: ${count(report.computed)} tokens computed, ${count(report.prefix_cache)} from vLLM's own prefix cache`;
}

const counted = (counts) => ({ ...counts, recomputed: counts.computed });

function about(request) {
  const node = request.stored?.[0]?.node;
  const donors = request.prompts.flatMap((prompt) => prompt.donors);
  const link = (id, text) => (request.gone.includes(id) ? `${text}, evicted since` : el("a", { href: `#tree/${id}` }, text));
  return [
    ["request", el("code", {}, request.id)],
    ["status", request.status === null ? "under way" : String(request.status)],
    ["mode", request.mode],
    ["replica", request.replica],
    ["done there", executed(request.executed)],
    ["completion tokens", count(request.completion_tokens)],
    ["first difference", request.prompts[0] ? `token ${count(request.prompts[0].first_difference)}` : null],
    ["donors", donors.length ? donors.map((donor, place) => [place ? "; " : "", link(donor, String(donor))]) : "none"],
    ["stored as", node ? link(node, `prompt ${node}`) : "not stored"],
    ["expected deviation", request.prompts[0]?.prediction ? `${nats(request.prompts[0].prediction.expected)} nats` : null],
    ["measured deviation", typeof request.stored?.[0]?.deviation === "number" ? `${nats(request.stored[0].deviation)} nats` : null],
  ];
}
