// How much requests may share now, and the switches for it: each asks first, and acts on the second click.

import { command } from "./api.js";
import { confirm } from "./actions.js";
import { announce, el } from "./dom.js";
import { panel } from "./table.js";

const ORDER = ["off", "exact", "approx"];
const NOW = {
  approx: "Requests share equal prefixes and similar prompts.",
  exact: "Requests share equal prefixes only: answers are those of a full prefill.",
  off: "Sharing is off: every prompt is computed in full, and none is looked up.",
};
const SWITCHES = {
  off: ["Stop sharing", "Stop all sharing?", "From the next request on every prompt is computed in full. Requests that run go on as planned. What is stored stays."],
  exact: ["Exact only", "Share equal prefixes only?", "From the next request on nothing is copied from prompts that are merely similar. What is stored stays."],
  approx: ["Share again", "Allow all sharing?", "From the next request on prompts may be built from similar ones again, within the limits of the settings and of each tenant."],
};

/** A panel with what is shared now and what else it can be. `limits`: of the server's status. */
export function switches(limits, again) {
  const configured = limits.mode === limits.default_mode ? null : `Requests that name no mode ask for ${limits.default_mode}.`;
  return panel(
    "Sharing",
    "until the server stops; the settings file decides again then",
    el("p", {}, [NOW[limits.mode], configured].filter(Boolean).join(" ")),
    el(
      "div",
      { class: "row" },
      offered(limits).map((mode) =>
        el("button", { type: "button", class: mode === "off" ? "danger" : null, "data-key": `mode-${mode}`, on: { click: () => change(mode, again) } }, `${SWITCHES[mode][0]} …`),
      ),
    ),
  );
}

/** The values of `sharing.max_mode` that would change something. */
export function offered({ max_mode }) {
  return ORDER.filter((mode) => mode !== max_mode);
}

function change(mode, again) {
  const [verb, title, effect] = SWITCHES[mode];
  confirm(title, effect, verb, async () => {
    await command("settings", { "sharing.max_mode": mode });
    announce(NOW[mode]);
    again();
  });
}
