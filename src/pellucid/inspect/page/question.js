// One question through the steps: its curves, drawn by reporting/charts.py, and its best answer token by token.

import {copySvg, el, formatNumber, link} from "page/dom.js";
import {joinList, say, translateSvg} from "page/words.js";
import {get, getTokens} from "page/source.js";
import {getSequences, isAnswer} from "page/tokens.js";
import {colorToken} from "page/colors.js";

const MAX_LISTED = 200, MAX_TOKENS = 120;

export async function renderQuestion({question}) {
  const questions = await get("0/questions");
  if (!questions.some(each => each.question === question)) return renderList(questions);
  const history = await get(`0/question/${question}`);
  if (!history) return [el("h1", say("question.title")), el("p.lede", say("question.unpacked"))];
  return [
    el("p.eyebrow", link(say("question.title"), "#/question")),
    el("h1.question", history.prompt),
    el("div.charts", history.charts.map(svg => translateSvg(copySvg(svg)))),
    el(
      "section",
      el("h2", say("question.best")),
      el("p.soft", say("question.best_about")),
      await Promise.all(history.best.map(([step, group]) => buildBestAnswer(step, group))),
    ),
  ];
}

function renderList(questions) {
  const items = questions.slice(0, MAX_LISTED).map(({question, prompt, times, last}) => {
    const about = say("question.times", {n: times, last: joinList(last.map(formatNumber))});
    return el("li", link(prompt.slice(0, 160), `#/question/${question}`), el("span.soft", ` ${about}`));
  });
  return [
    el("h1", say("question.title")),
    el("p.lede", say(questions.length ? "question.pick" : "question.none")),
    el("ol.questions", items),
  ];
}

async function buildBestAnswer(step, group) {
  const data = await getTokens(step);
  const answers = data ? getSequences(data, group).filter(isAnswer) : [];
  if (!answers.length) return null;
  const rewardOf = answer => answer.reward ?? -Infinity;
  const best = answers.reduce((first, other) => (rewardOf(other) > rewardOf(first) ? other : first));
  const tokens = best.tokens.slice(0, MAX_TOKENS).map(token => {
    const node = el("span.tok", token.text.slice(0, 100));
    colorToken(node, token, "probability", 1);
    return node;
  });
  return el(
    "p.history",
    link(say("step.title", {step}), `#/group/${step}/${group}`),
    el("span.soft", ` ${say("reward", {value: formatNumber(best.reward)})} `),
    el("span.flow", tokens),
  );
}
