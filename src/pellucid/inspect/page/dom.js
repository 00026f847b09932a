// Elements out of text that is never read as markup, and numbers as they are written.

// The characters that utils/text.py escapes: controls, marks of direction, separators, halves of characters.
const CONTROLS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const SVG = "http://www.w3.org/2000/svg";
const SVG_ELEMENTS = ["svg", "g", "path", "circle", "rect", "text", "tspan", "title"];
const SVG_ATTRIBUTES = [
  "class", "viewBox", "role", "aria-label", "d", "x", "y", "cx", "cy", "r", "width", "height", "text-anchor",
];

function escapeControls(text) {
  return String(text).replace(CONTROLS, char => {
    const code = char.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`;
  });
}

// An element such as el("p.soft", {title}, ...children), in which the attributes may be left out. Strings among the
// children become text, and nothing else.
export function el(name, ...children) {
  const [tag, ...classes] = name.split(".");
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if ((value ?? false) !== false) node.setAttribute(key, value === true ? "" : value);
  }
  const shown = children.flat().filter(child => child !== null && child !== undefined);
  node.append(...shown.map(child => (child instanceof Node ? child : escapeControls(child))));
  return node;
}

// Copy a picture of reporting/charts.py: shapes and their geometry, and nothing else.
export function copySvg(html) {
  const svg = new DOMParser().parseFromString(html, "text/html").querySelector("svg");
  return svg ? copyNode(svg) : el("span");
}

function copyNode(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(escapeControls(node.data));
  if (!SVG_ELEMENTS.includes(node.localName)) return document.createTextNode("");
  const copy = document.createElementNS(SVG, node.localName);
  for (const {name, value} of node.attributes) if (SVG_ATTRIBUTES.includes(name)) copy.setAttribute(name, value);
  copy.append(...[...node.childNodes].map(copyNode));
  return copy;
}

export function link(text, target, attributes = {}) {
  return el("a", {href: target, ...attributes}, text);
}

// Three significant digits, as `format_significant` of sentences.py writes them.
export function formatNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  return size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

export function formatPercent(value) {
  return value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)}%`;
}
