// Elements out of text that is never read as markup, and numbers as they are written.

// The characters that utils/text.py escapes: controls, marks of direction, separators, halves of characters.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "path", "circle", "rect", "text", "tspan", "title"]);
const GEOMETRY = new Set([
  "class",
  "viewBox",
  "role",
  "aria-label",
  "d",
  "x",
  "y",
  "cx",
  "cy",
  "r",
  "width",
  "height",
  "text-anchor",
]);

function visible(text) {
  return String(text).replace(UNSEEN, char => {
    const code = char.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`;
  });
}

// An element with attributes and children: strings become text, and nothing else.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(key, value === true ? "" : value);
  }
  made.append(
    ...children
      .flat()
      .filter(child => child !== null && child !== undefined)
      .map(child => (child instanceof Node ? child : visible(child))),
  );
  return made;
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A picture of reporting/charts.py: shapes and their geometry are copied, and nothing else.
export function picture(svg) {
  const parsed = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
  return parsed ? copied(parsed) : el("span");
}

function copied(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(visible(node.data));
  if (!SHAPES.has(node.localName)) return document.createTextNode("");
  const kept = [...node.attributes].filter(each => GEOMETRY.has(each.name));
  return shape(
    node.localName,
    Object.fromEntries(kept.map(each => [each.name, each.value])),
    ...[...node.childNodes].map(copied),
  );
}

export function link(text, target, attributes = {}) {
  return el("a", {href: target, ...attributes}, text);
}

// Three significant digits, as `format_significant` of sentences.py writes them.
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  return size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

export function percent(value) {
  return value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)}%`;
}

export function mean(values) {
  const known = values.filter(value => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
