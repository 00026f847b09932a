// All numbers of a token, its alternatives before and after, and a sentence on what happened to it.

import {el, formatNumber, formatPercent} from "page/dom.js";
import {joinList, say} from "page/words.js";
import {getAlternatives} from "page/tokens.js";
import {explainToken} from "page/sentence.js";

const ROWS = [
  "before", "after", "change", "sampler", "gap", "ref", "entropy", "entropy_change", "ratio", "bound",
  "advantage", "weight", "importance", "push", "gradient",
];

export function formatText(text) {
  return text === "" ? "∅" : text.slice(0, 200).replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

export function buildPanel(step, token) {
  const share = say(token.copies > 1 ? "token.share_several" : "token.share", {n: token.copies});
  const numbers = [
    ...ROWS.map(name => [say(`token.${name}`), formatNumber(token[name])]),
    [share, formatPercent(token.share)],
  ].filter(([, value]) => value !== "-");
  const kind = joinList([say(`kind.${token.kind}`), say("token.id", {id: token.id, position: token.position})]);
  return [
    el("h2", el("code", formatText(token.text))),
    el("p.soft", `${kind} `, token.rule ? el("span.tag.warn", say(`rule.${token.rule}`)) : null),
    el("p.sentence", explainToken(token, step)),
    el(
      "dl.numbers",
      {"aria-label": say("token.numbers")},
      numbers.map(([name, value]) => el("div", el("dt", name), el("dd", value))),
    ),
    el("h3", say("tops.title")),
    el("div.tops", buildAlternatives(step, token, "before"), buildAlternatives(step, token, "after")),
  ];
}

function buildAlternatives(step, token, when) {
  const heading = el("h4", say(`tops.${when}`));
  const alternatives = getAlternatives(step, token.row, when);
  if (!alternatives) return el("div", heading, el("p.soft", say("tops.none")));
  const items = alternatives.map(({id, text, logprob}) => {
    const bar = el("i.bar"), percent = formatPercent(Math.exp(logprob));
    bar.style.width = percent;
    return el("li", {class: id === token.id ? "own" : null}, bar, el("code", formatText(text)), el("span", percent));
  });
  return el("div", heading, el("ol", items));
}
