// All numbers of a token, its alternatives before and after, and a sentence on what happened to it.

import {el, figure, percent} from "page/dom.js";
import {listing, say} from "page/words.js";
import {topsAt} from "page/tokens.js";
import {sentence} from "page/sentence.js";

const ROWS = [
  "before",
  "after",
  "change",
  "sampler",
  "gap",
  "ref",
  "entropy",
  "entropy_change",
  "ratio",
  "bound",
  "advantage",
  "weight",
  "importance",
  "push",
  "gradient",
];

export function named(text) {
  return text === "" ? "∅" : text.slice(0, 200).replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

export function panel(step, token) {
  const rule = token.rule ? el("span", {class: "tag warn"}, say(`rule.${token.rule}`)) : null;
  const numbers = ROWS.map(name => [say(`token.${name}`), figure(token[name])]);
  const share = token.copies > 1 ? "token.share_several" : "token.share";
  numbers.push([say(share, {n: token.copies}), percent(token.share)]);
  return [
    el("h2", {}, el("code", {}, named(token.text))),
    el(
      "p",
      {class: "soft"},
      listing([say(`kind.${token.kind}`), say("token.id", {id: token.id, position: token.position})]),
      " ",
      rule,
    ),
    el("p", {class: "sentence"}, sentence(token, step)),
    el(
      "dl",
      {class: "numbers", "aria-label": say("token.numbers")},
      numbers
        .filter(([, value]) => value !== "-")
        .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
    el("h3", {}, say("tops.title")),
    el(
      "div",
      {class: "tops"},
      ["before", "after"].map(when => alternatives(step, token, when)),
    ),
  ];
}

function alternatives(step, token, when) {
  const tops = topsAt(step, token.row, when);
  if (!tops) return el("div", {}, el("h4", {}, say(`tops.${when}`)), el("p", {class: "soft"}, say("tops.none")));
  return el(
    "div",
    {},
    el("h4", {}, say(`tops.${when}`)),
    el(
      "ol",
      {},
      tops.map(top => {
        const bar = el("i", {class: "bar"});
        bar.style.width = `${(100 * Math.exp(top.logprob)).toFixed(1)}%`;
        const own = top.id === token.id;
        return el(
          "li",
          {class: own ? "own" : null},
          bar,
          el("code", {}, named(top.text)),
          el("span", {}, percent(Math.exp(top.logprob))),
        );
      }),
    ),
  );
}
