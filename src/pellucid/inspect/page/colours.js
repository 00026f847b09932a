// How a quantity becomes the colour of a token: blue and orange around 0, or from dark to light as viridis goes.

import {el, figure} from "page/dom.js";
import {say} from "page/words.js";

const DARK_TO_LIGHT = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
];
const STRONGEST = 0.62;

export const QUANTITIES = {
  change: {of: token => token.change, diverging: true},
  push: {of: token => token.push, diverging: true},
  share: {of: token => token.share, diverging: false},
  advantage: {of: token => token.advantage, diverging: true},
  ratio: {of: token => (token.ratio > 0 ? Math.log(token.ratio) : null), diverging: true},
  gap: {of: token => token.gap, diverging: true},
  drift: {of: token => token.drift, diverging: true},
  entropy: {of: token => token.entropy, diverging: false},
  probability: {
    of: token => (token.before === null ? probability(token.sampler) : probability(token.before)),
    diverging: false,
    most: 1,
  },
  rule: {of: token => (token.rule ? 1 : 0), diverging: false, flat: true},
};

function probability(logprob) {
  return logprob === null ? null : Math.exp(logprob);
}

// The value that has the strongest colour: that of the 98th of a hundred tokens, so that one does not pale the others.
export function strongest(list, by) {
  const {of, most} = QUANTITIES[by];
  if (most) return most;
  const sizes = list
    .map(of)
    .filter(value => value)
    .map(Math.abs)
    .sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] : 0;
}

// Whether there is anything that a quantity could colour.
export function colours(list, by) {
  return list.some(token => QUANTITIES[by].of(token));
}

// What the colours say, with the value that has the strongest one, and whether others lie beyond it.
export function legend(list, by, most) {
  const {of, diverging, flat} = QUANTITIES[by];
  if (flat) return el("span", {class: "legend"}, say("legend.rule"));
  const bound = sign => (list.some(token => sign * (of(token) ?? 0) > most) ? (sign > 0 ? "≥ " : "≤ ") : "");
  const low = most ? `${bound(-1)}-${figure(most)}` : "0",
    high = `${bound(1)}${figure(most)}`;
  return el(
    "span",
    {class: "legend"},
    el("i", {class: diverging ? "diverging" : "sequential", "aria-hidden": "true"}),
    say(diverging ? "legend.diverging" : "legend.sequential", {low, high}),
  );
}

export function paint(node, token, by, most) {
  const {of, diverging, flat} = QUANTITIES[by];
  const value = of(token);
  const part = value === null || !most ? 0 : Math.max(-1, Math.min(1, value / most));
  node.classList.toggle("dark", false);
  node.classList.toggle("lit", false);
  if (value === null || flat || (diverging && part === 0)) node.style.background = "";
  else if (diverging) {
    node.style.background = `rgb(var(${part > 0 ? "--up" : "--down"}) / ${(Math.abs(part) * STRONGEST).toFixed(3)})`;
  } else lit(node, part);
}

export function lit(node, part) {
  node.style.background = sequential(part);
  node.classList.add(part > 0.55 ? "lit" : "dark");
}

function sequential(part) {
  const place = Math.max(0, Math.min(1, part)) * (DARK_TO_LIGHT.length - 1),
    low = Math.min(3, Math.floor(place));
  const mixed = DARK_TO_LIGHT[low].map((x, i) => Math.round(x + (DARK_TO_LIGHT[low + 1][i] - x) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}
