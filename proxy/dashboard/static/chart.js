// Bars over time, as drawings whose shapes have titles. The figures stand in a table next to them.

import { svg } from "./dom.js";
import { clock } from "./format.js";

const LEFT = 52;
const BOTTOM = 22;
const TOP = 8;

/**
 * Stacked bars. `bins`: {start, title, above: {kind: value}, below: {kind: value}}; `axis(value)`: a number of the
 * vertical axis as text. What is below hangs from the line of zero.
 */
export function bars(label, bins, { height = 190, axis }) {
  const width = Math.max(260, Math.min(532, window.innerWidth - 66)); // drawn as wide as it is shown, so that texts keep their size
  const most = niceTop(Math.max(...bins.map((bin) => sum(bin.above)), 0));
  const least = niceTop(Math.max(...bins.map((bin) => sum(bin.below ?? {})), 0));
  const span = most + least || 1;
  const inner = height - BOTTOM - TOP;
  const y = (value) => TOP + ((most - value) / span) * inner;
  const step = (width - LEFT) / bins.length;
  const drawn = [
    ...ticks(most, least).map((value) => [
      svg("line", { class: value === 0 ? "zero" : "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, axis(value)),
    ]),
    ...bins.map((bin, place) => column(bin, { x: LEFT + place * step, width: step, y })),
    ...hours(bins, Math.floor(width / 90)).map(([place, text]) => svg("text", { x: LEFT + (place + 0.5) * step, y: height - 4, "text-anchor": "middle" }, text)),
  ];
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, drawn);
}

function column(bin, { x, width, y }) {
  const gap = Math.min(3, width / 4);
  const shape = (kind, from, to) =>
    svg("rect", { class: kind, x: x + gap / 2, width: width - gap, y: y(to), height: Math.max(0, y(from) - y(to)) });
  const shapes = [svg("rect", { x, width, y: TOP, height: y(0) - TOP, fill: "transparent" })];
  let up = 0;
  for (const [kind, value] of Object.entries(bin.above)) {
    if (value > 0) shapes.push(shape(kind, up, up + value));
    up += Math.max(0, value);
  }
  let down = 0;
  for (const [kind, value] of Object.entries(bin.below ?? {})) {
    if (value > 0) shapes.push(shape(kind, down - value, down));
    down -= Math.max(0, value);
  }
  return svg("g", {}, svg("title", {}, bin.title), shapes);
}

/** The next of 1, 2, 2.5 and 5 times a power of ten. */
export function niceTop(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.999);
}

function ticks(most, least) {
  const above = most ? [most, most / 2] : [];
  return [...above, 0, ...(least > most / 8 ? [-least] : [])];
}

/** Some times of day, evenly spaced. */
function hours(bins, most) {
  const every = Math.max(1, Math.round(bins.length / most));
  return bins.flatMap((bin, place) => (place % every === Math.floor(every / 2) ? [[place, clock(bin.start)]] : []));
}

const sum = (parts) => Object.values(parts).reduce((total, value) => total + Math.max(0, value), 0);
