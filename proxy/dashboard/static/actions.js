// What changes something: shown first by a dry run, done only after a second click.

import { command } from "./api.js";
import { announce, el, fill } from "./dom.js";
import { bytes, count, counted } from "./format.js";

const DANGERS = ["Evict", "Stop sharing"];

/** Evict a prompt, a namespace or all, after showing what would go. `what`: the arguments; `name`: of it, in words. */
export async function evict(what, name, done) {
  const preview = await attempt(() => command("evict", { ...what, dry_run: true }));
  const text = preview.error ?? `${counted(preview.num_nodes, "prompt")} and ${counted(preview.num_segments, "segment")} of KV would go, which frees ${bytes(preview.freed_bytes)}. Pinned prompts would go, too. Later requests compute again what they would have copied.`;
  const single = what.node ? text.replace(" Pinned prompts would go, too.", "") : text;
  confirm(`Evict ${name}?`, single, preview.error ? null : "Evict", async () => {
    const gone = await command("evict", { ...what, dry_run: false });
    announce(`Evicted ${counted(gone.num_nodes, "prompt")}, ${bytes(gone.freed_bytes)} freed.`);
    done();
  });
}

/** Pin or unpin; `sizes`: what it concerns, if that is known. */
export function pin(verb, what, name, sizes, done) {
  const scope = sizes ? `${counted(sizes.num_nodes, "prompt")} with ${bytes(sizes.num_bytes)} of KV. ` : "";
  const effect = verb === "pin" ? "Pinned prompts are not evicted for room. At most half of the memory may be pinned." : "They may be evicted again when room is needed.";
  confirm(`${verb === "pin" ? "Pin" : "Unpin"} ${name}?`, scope + effect, verb === "pin" ? "Pin" : "Unpin", async () => {
    const result = await command(verb, what);
    announce(`${count(result.num_nodes)} prompts, ${bytes(result.num_bytes)} of KV.`);
    done();
  });
}

async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    return { error: error.message };
  }
}

/** A dialog with a question; without a `verb` it can only be closed. */
export function confirm(title, text, verb, act) {
  const dialog = el("dialog", { "aria-labelledby": "dialog-title", "aria-describedby": "dialog-text", on: { close: () => dialog.remove() } });
  const message = el("p", { id: "dialog-text" }, text);
  const cancel = el("button", { type: "button", on: { click: () => dialog.close() } }, verb ? "Cancel" : "Close");
  const go = verb && el("button", { type: "button", class: DANGERS.includes(verb) ? "danger" : "main", on: { click: run } }, verb);
  async function run() {
    go.disabled = true;
    try {
      await act();
      dialog.close();
    } catch (error) {
      fill(message, el("span", { class: "bad", role: "alert" }, error.message));
      go.remove();
      cancel.textContent = "Close";
    }
  }
  dialog.append(el("div", {}, el("h2", { id: "dialog-title", class: "verdict" }, title), message, el("div", { class: "row" }, cancel, go)));
  document.body.append(dialog);
  dialog.showModal();
  cancel.focus();
}
