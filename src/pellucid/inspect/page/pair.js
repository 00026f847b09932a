// The same step of two runs, side by side by its questions.

import {el, figure, link, mean} from "page/dom.js";
import {listing, say} from "page/words.js";
import {overview, runsThere, summary, tokens} from "page/source.js";
import {groupOf} from "page/tokens.js";
import {legend, paint, strongest} from "page/colours.js";

const BY = "change",
  MOST_ANSWERS = 4,
  MOST_TOKENS = 200;

export async function pairView({step}) {
  const title = el("h1", {}, say("pair.title", {step}));
  if ((await runsThere()).length < 2) return [title, el("p", {class: "lede"}, say("pair.one"))];
  const runs = [0, 1],
    names = await Promise.all(runs.map(async run => (await overview(run)).name));
  const sides = await Promise.all(
    runs.map(async run => ({summary: await summary(step, run), data: await tokens(step, run)})),
  );
  const asked = new Map();
  sides.forEach((side, run) =>
    (side.summary?.groups ?? []).forEach(group =>
      asked.set(group.question, {...asked.get(group.question), [run]: group}),
    ),
  );
  const both = [...asked.values()].filter(pair => pair[0] && pair[1]);
  const shown = pair => runs.flatMap(run => (pair[run] ? answersOf(sides[run].data, pair[run]) : []));
  const all = [...asked.values()].flatMap(shown).flatMap(each => each.tokens),
    most = strongest(all, BY);
  const rest = [...asked.values()].filter(pair => !(pair[0] && pair[1]));
  return [
    title,
    el("p", {class: "lede"}, say("pair.shared", {n: both.length})),
    all.length ? el("p", {class: "controls"}, say("group.heat"), " ", say(`by.${BY}`), legend(all, BY, most)) : null,
    ...[...both, ...rest].map(pair =>
      el(
        "section",
        {class: "pair"},
        el("h2", {class: "asked"}, (pair[0] ?? pair[1]).prompt.slice(0, 300)),
        el(
          "div",
          {class: "two"},
          runs.map(run => side(step, names[run], pair[run], sides[run].data, run, most)),
        ),
      ),
    ),
  ];
}

function answersOf(data, group) {
  if (!data || !group.recorded) return [];
  return groupOf(data, group.group).filter(each => each.completion >= 0 && each.branch === 0);
}

// One run's answers to a question; `most` is the value that has the strongest colour on both sides.
function side(step, name, group, data, run, most) {
  if (!group) return el("div", {}, el("h3", {}, name), el("p", {class: "soft"}, say("pair.missing")));
  const answers = answersOf(data, group),
    first = answers.slice(0, MOST_ANSWERS);
  const head = run === 0 ? link(name, `#/group/${step}/${group.group}`) : name;
  return el(
    "div",
    {},
    el("h3", {}, head),
    el(
      "p",
      {class: "soft"},
      listing([
        say(`signal.${group.signal}`),
        `${say("question.reward")} ${figure(mean(group.rewards))}`,
        `${say("question.length")} ${figure(mean(group.lengths))}`,
        answers.length ? say("pair.shown", {shown: first.length, all: answers.length}) : say("pair.unrecorded"),
      ]),
    ),
    first.map(each =>
      el(
        "p",
        {class: "flow"},
        el("span", {class: "soft"}, `${say("reward", {value: figure(each.reward)})} `),
        each.tokens.slice(0, MOST_TOKENS).map(token => {
          const node = el("span", {class: "tok"}, token.text.slice(0, 100));
          paint(node, token, BY, most);
          return node;
        }),
      ),
    ),
  );
}
