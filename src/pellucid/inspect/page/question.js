// One question through the steps: its curves, drawn by reporting/charts.py, and its best answer token by token.

import {el, figure, link, picture} from "page/dom.js";
import {listing, say, translated} from "page/words.js";
import {get, tokens} from "page/source.js";
import {groupOf} from "page/tokens.js";
import {lit} from "page/colours.js";

const MOST_LISTED = 200,
  MOST_SHOWN = 120;

export async function questionView({question}) {
  const all = await get("0/questions");
  if (!all.some(each => each.question === question)) return [el("h1", {}, say("question.title")), ...choice(all)];
  const found = await get(`0/question/${question}`);
  if (!found) return [el("h1", {}, say("question.title")), el("p", {class: "lede"}, say("question.unpacked"))];
  return [
    el("p", {class: "eyebrow"}, link(say("question.title"), "#/question")),
    el("h1", {class: "asked"}, found.prompt),
    el(
      "div",
      {class: "charts"},
      found.charts.map(svg => translated(picture(svg))),
    ),
    el(
      "section",
      {},
      el("h2", {}, say("question.best")),
      el("p", {class: "soft"}, say("question.best_about")),
      await Promise.all(found.best.map(([step, group]) => best(step, group))),
    ),
  ];
}

function choice(all) {
  const said = each => say("question.times", {n: each.times, last: listing(each.last.map(figure))});
  const line = each =>
    el("li", {}, link(each.prompt.slice(0, 160), `#/question/${each.question}`), el("span", {class: "soft"}, " ", said(each)));
  return [
    el("p", {class: "lede"}, say(all.length ? "question.pick" : "question.none")),
    el("ol", {class: "questions"}, all.slice(0, MOST_LISTED).map(line)),
  ];
}

async function best(step, group) {
  const data = await tokens(step);
  if (!data) return el("div");
  const answers = groupOf(data, group).filter(each => each.completion >= 0 && each.branch === 0);
  if (!answers.length) return el("div");
  const one = answers.reduce((first, other) =>
    (other.reward ?? -Infinity) > (first.reward ?? -Infinity) ? other : first,
  );
  return el(
    "p",
    {class: "history"},
    link(say("step.title", {step}), `#/group/${step}/${group}`),
    el("span", {class: "soft"}, ` ${say("reward", {value: figure(one.reward)})} `),
    el(
      "span",
      {class: "flow"},
      one.tokens.slice(0, MOST_SHOWN).map(token => {
        const node = el("span", {class: "tok"}, token.text.slice(0, 100)),
          logprob = token.before ?? token.sampler;
        if (logprob !== null) lit(node, Math.exp(logprob));
        return node;
      }),
    ),
  );
}
