// Builds elements. Texts become text nodes: nothing that comes from the server is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `attributes` may have `on: {click: ...}`, and `vars`: custom properties of its style. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "vars") {
      for (const [variable, setting] of Object.entries(value)) element.style.setProperty(variable, setting);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replace what an element holds; focus and cursor stay with what has the same `data-key`, and places stay scrolled. */
export function fill(parent, ...children) {
  const active = parent.contains(document.activeElement) ? document.activeElement : null;
  const [start, end] = [active?.selectionStart, active?.selectionEnd];
  const scrolled = new Map([...parent.querySelectorAll("[role=region]")].map((each) => [each.ariaLabel, each.scrollLeft]));
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  for (const each of parent.querySelectorAll("[role=region]")) each.scrollLeft = scrolled.get(each.ariaLabel) ?? 0;
  if (active?.dataset.key === undefined) return;
  const same = [...parent.querySelectorAll("[data-key]")].find((each) => each.dataset.key === active.dataset.key);
  same?.focus({ preventScroll: true });
  if (typeof start === "number") same?.setSelectionRange(start, end);
}

/** Read out by screen readers. */
export function announce(text) {
  document.getElementById("news").textContent = text;
}
