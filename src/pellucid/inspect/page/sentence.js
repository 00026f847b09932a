// One sentence on a token, or on `answers` that share it, chosen as sentences.py chooses it.

import {figure} from "page/dom.js";
import {WORDS, say} from "page/words.js";

export function sentence(token, {rounding, dtype, floor}) {
  const told = Object.fromEntries(["advantage", "ratio", "bound"].map(name => [name, figure(token[name])]));
  const {change, push, rule, answers = 1} = token,
    size = change === null ? null : Math.abs(change);
  told.size = size !== null && size < floor ? say("below", {least: figure(floor)}) : figure(size);
  told.dtype = dtype;
  told.moved = size !== null && size >= rounding ? say(change > 0 ? "moved.rose" : "moved.fell", told) : "";
  told.lead = say(answers > 1 ? "said.lead_several" : "said.lead", {...told, n: answers});
  return say(answers > 1 && push === 0 && !rule ? "said.cancel" : keyOf(token, rounding), {...told, n: answers});
}

function keyOf({kind, rule, push, change}, rounding) {
  if (kind === "prompt") return "said.prompt";
  if (rule && WORDS[`said.${rule}`]) return `said.${rule}`;
  if (!push) return push === null ? "said.unknown" : "said.still";
  const way = push > 0 ? "up" : "down";
  if (change === null) return `said.${way}`;
  if (Math.abs(change) < rounding) return `said.${way}_stayed`;
  return change > 0 === push > 0 ? `said.${way}_went` : `said.${way}_against`;
}
