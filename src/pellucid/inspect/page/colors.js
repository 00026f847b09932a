// How a quantity becomes the color of a token: blue and orange around 0, or from dark to light as viridis goes.

import {el, formatNumber} from "page/dom.js";
import {say} from "page/words.js";

const DARK_TO_LIGHT = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const MAX_OPACITY = 0.62;
const exp = logprob => (logprob === null ? null : Math.exp(logprob));

export const QUANTITIES = {
  change: {get: token => token.change, diverging: true},
  push: {get: token => token.push, diverging: true},
  share: {get: token => token.share},
  advantage: {get: token => token.advantage, diverging: true},
  ratio: {get: token => (token.ratio > 0 ? Math.log(token.ratio) : null), diverging: true},
  gap: {get: token => token.gap, diverging: true},
  drift: {get: token => token.drift, diverging: true},
  entropy: {get: token => token.entropy},
  probability: {get: token => exp(token.before ?? token.sampler), max: 1},
  rule: {get: token => (token.rule ? 1 : 0), flat: true},
};

// The size that has the strongest color: that of the 98th of a hundred tokens, so that one does not pale the others.
export function computeMax(tokens, by) {
  const {get, max} = QUANTITIES[by];
  if (max) return max;
  const sizes = tokens.map(get).filter(Boolean).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] : 0;
}

// What the colors mean, with the value that has the strongest one, and whether others lie beyond it.
export function buildLegend(tokens, by, max) {
  const {get, diverging, flat} = QUANTITIES[by];
  if (flat) return el("span.legend", say("legend.rule"));
  const low = tokens.some(token => -(get(token) ?? 0) > max) ? "≤ " : "";
  const high = tokens.some(token => (get(token) ?? 0) > max) ? "≥ " : "";
  const range = {low: max ? `${low}-${formatNumber(max)}` : "0", high: `${high}${formatNumber(max)}`};
  const kind = diverging ? "diverging" : "sequential";
  return el("span.legend", el(`i.${kind}`, {"aria-hidden": "true"}), say(`legend.${kind}`, range));
}

export function colorToken(node, token, by, max) {
  const {get, diverging, flat} = QUANTITIES[by];
  const value = get(token);
  const part = value === null || !max ? 0 : Math.max(-1, Math.min(1, value / max));
  node.classList.remove("on-dark", "on-light");
  if (value === null || flat || (diverging && part === 0)) node.style.background = "";
  else if (diverging) {
    node.style.background = `rgb(var(${part > 0 ? "--up" : "--down"}) / ${(Math.abs(part) * MAX_OPACITY).toFixed(3)})`;
  } else colorSequentially(node, part);
}

// Give an element the color of a part between 0 and 1, and its text one that can be read on it.
export function colorSequentially(node, part) {
  const position = Math.max(0, Math.min(1, part)) * (DARK_TO_LIGHT.length - 1);
  const i = Math.min(DARK_TO_LIGHT.length - 2, Math.floor(position)), next = DARK_TO_LIGHT[i + 1];
  const mixed = DARK_TO_LIGHT[i].map((x, channel) => Math.round(x + (next[channel] - x) * (position - i)));
  node.style.background = `rgb(${mixed.join(" ")})`;
  node.classList.add(part > 0.55 ? "on-light" : "on-dark");
}
