// Numbers and times as people read them. null and undefined are "–".

const NONE = "–";
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

/** 3 requests, 1 request */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** 12,345 as 12.3 k: for axes and narrow columns */
export function brief(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
  }
  return digits(value);
}

export function bytes(value) {
  if (!known(value)) return NONE;
  let rest = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(rest) < 1000) return `${digits(rest)} ${unit}`;
    rest /= 1000;
  }
  return `${digits(rest)} TB`;
}

/** A time that something took */
export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1) return `${digits(value * 1000)} ms`;
  if (size < 120) return `${digits(value)} s`;
  if (size < 7200) return `${digits(value / 60)} min`;
  return `${digits(value / 3600)} h`;
}

/** How long ago */
export function ago(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= size) return `${Math.floor(value / size)} ${unit} ago`;
  }
  return value < 1 ? "now" : `${Math.floor(value)} s ago`;
}

export function percent(part, whole) {
  if (!known(part) || !whole) return NONE;
  const share = (100 * part) / whole;
  return `${share !== 0 && Math.abs(share) < 10 ? share.toFixed(1) : share.toFixed(0)} %`;
}

/** Of a deviation */
export function nats(value) {
  return known(value) ? `${Number(value.toPrecision(2))}` : NONE;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

export function clockWithSeconds(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

/** does_not_pay as does not pay */
export function words(name) {
  return name.replaceAll("_", " ");
}

function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}
