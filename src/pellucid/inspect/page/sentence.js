// The sentence on a token, or on several `answers` that share it. sentences.py chooses it in the same way.

import {formatNumber} from "page/dom.js";
import {WORDS, say} from "page/words.js";

export function explainToken(token, {rounding, dtype, floor}) {
  const {change, push, rule, answers = 1} = token;
  const size = change === null ? null : Math.abs(change);
  const values = {dtype, n: answers};
  for (const name of ["advantage", "ratio", "bound"]) values[name] = formatNumber(token[name]);
  values.size = size !== null && size < floor ? say("below", {least: formatNumber(floor)}) : formatNumber(size);
  values.moved = size !== null && size >= rounding ? say(change > 0 ? "moved.rose" : "moved.fell", values) : "";
  values.lead = say(answers > 1 ? "said.lead_several" : "said.lead", values);
  return say(answers > 1 && push === 0 && !rule ? "said.cancel" : chooseKey(token, rounding), values);
}

function chooseKey({kind, rule, push, change}, rounding) {
  if (kind === "prompt") return "said.prompt";
  if (rule && WORDS[`said.${rule}`]) return `said.${rule}`;
  if (!push) return push === null ? "said.unknown" : "said.still";
  const direction = push > 0 ? "up" : "down";
  if (change === null) return `said.${direction}`;
  if (Math.abs(change) < rounding) return `said.${direction}_stayed`;
  return change > 0 === push > 0 ? `said.${direction}_went` : `said.${direction}_against`;
}
