// One sentence on a token, chosen as sentences.py chooses it.

import {figure} from "./dom.js";
import {say} from "./words.js";

const LEAST = 5e-4;

export function sentence(token) {
  const named = ["advantage", "ratio", "bound", "change"];
  return say(keyOf(token), Object.fromEntries(named.map(name => [name, figure(token[name])])));
}

function keyOf({kind, rule, push, change}) {
  if (kind === "prompt") return "said.prompt";
  if (rule && WORDS[`said.${rule}`]) return `said.${rule}`;
  if (!push) return push === null ? "said.unknown" : "said.still";
  const way = push > 0 ? "up" : "down";
  if (change === null) return `said.${way}`;
  if (Math.abs(change) < LEAST) return `said.${way}_stayed`;
  return change > 0 === push > 0 ? `said.${way}_went` : `said.${way}_against`;
}
