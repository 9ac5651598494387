// The vLLMs that KVShare is in front of.

import { ask } from "./api.js";
import { el } from "./dom.js";
import { bytes, count, counted } from "./format.js";
import { head, panel, table } from "./table.js";

export const replicas = {
  title: "Replicas",
  every: 3000,
  load: () => ask("status"),
  draw(status) {
    const { replicas: rows } = status;
    return [
      head("Replicas", rows.length ? `${status.detail}. KV stays in the replica that computed it.` : "Engines that answer requests."),
      panel("Engines", null, rows.length ? listed(status) : alone(status)),
    ];
  },
};

function alone(status) {
  return el("p", { class: "empty" }, `One engine in this process serves ${status.model}: ${counted(status.num_running, "request")} under way, ${count(status.num_waiting)} waiting. In front of vLLM each replica is listed here; docs/vllm.md says how to put KVShare in front of one.`);
}

function listed({ replicas: rows, replica_failures: failures }) {
  const state = (yes, good, bad) => (yes ? good : el("span", { class: "bad" }, bad));
  return table(
    "Replicas",
    [
      { title: "Replica", cell: (row) => row.name },
      { title: "Serves", cell: (row) => state(row.serves, "yes", "no") },
      { title: "Shares", cell: (row) => state(row.shares, "yes", "no") },
      { title: "Under way", right: true, cell: (row) => count(row.num_inflight) },
      { title: "KV", right: true, cell: (row) => bytes(row.kv_bytes) },
      { title: "Segments", right: true, cell: (row) => count(row.num_segments) },
      { title: "Failures", right: true, hint: "requests that it did not take, since the start", cell: (row) => count(failures[row.name] ?? 0) },
    ],
    rows,
  );
}
