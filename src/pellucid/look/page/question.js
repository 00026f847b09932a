// One question through the steps: how it was rewarded, how long its answers were, and its best answer token by token.

import {el, figure, link, mean, shape} from "./dom.js";
import {listing, say} from "./words.js";
import {get, summary, tokens} from "./source.js";
import {groupOf} from "./tokens.js";
import {lit} from "./colours.js";

const MOST_STEPS = 60,
  MOST_ANSWERS = 10,
  MOST_LISTED = 200,
  MOST_SHOWN = 120,
  WIDTH = 320,
  HEIGHT = 120;

export async function questionView({question}) {
  const all = await get("0/questions"),
    title = el("h1", {}, say("question.title"));
  const found = all.find(each => each.question === question);
  if (!found) {
    return [
      title,
      el("p", {class: "lede"}, say(all.length ? "question.pick" : "question.none")),
      el(
        "ol",
        {class: "questions"},
        all.slice(0, MOST_LISTED).map(each =>
          el(
            "li",
            {},
            link(each.prompt.slice(0, 160), `#/question/${each.question}`),
            el(
              "span",
              {class: "soft"},
              " ",
              listing([
                say("question.times", {n: each.at.length}),
                each.at
                  .slice(-6)
                  .map(([, , r]) => figure(r))
                  .join(" "),
              ]),
            ),
          ),
        ),
      ),
    ];
  }
  const steps = spread(found.at, MOST_STEPS);
  const groups = await Promise.all(
    steps.map(async ([step, group]) => ({step, ...(await summary(step))?.groups.find(each => each.group === group)})),
  );
  const lines = {
    reward: group => mean(group.rewards ?? []),
    length: group => mean(group.lengths ?? []),
    entropy: group => group.entropy ?? null,
  };
  return [
    el("p", {class: "eyebrow"}, link(say("question.title"), "#/question")),
    el("h1", {class: "asked"}, found.prompt.slice(0, 300)),
    el(
      "div",
      {class: "charts"},
      Object.entries(lines).map(([name, of]) =>
        curve(
          say(`question.${name}`),
          groups.map(group => [group.step, of(group)]),
        ),
      ),
    ),
    el(
      "section",
      {},
      el("h2", {}, say("question.best")),
      el("p", {class: "soft"}, say("question.best_about")),
      await Promise.all(
        spread(
          groups.filter(group => group.recorded),
          MOST_ANSWERS,
        ).map(best),
      ),
    ),
  ];
}

function spread(list, most) {
  if (list.length <= most) return list;
  return Array.from({length: most}, (_, i) => list[Math.round((i * (list.length - 1)) / (most - 1))]);
}

async function best({step, group}) {
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

// A small line of [step, value]; charts.py draws those of the run, which knows them when it is asked for the page.
function curve(name, points) {
  const known = points.filter(([, value]) => value !== null);
  if (!known.length) return null;
  const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
  const scale = (values, low, high) => value => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return most > least ? low + ((value - least) / (most - least)) * (high - low) : (low + high) / 2;
  };
  const [x, y] = [scale(xs, 8, WIDTH - 8), scale(ys, HEIGHT - 10, 34)];
  const told = `${name}: ${figure(ys[0])} → ${figure(ys[ys.length - 1])}`;
  return shape(
    "svg",
    {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": told},
    shape("text", {class: "label", x: 0, y: 16}, told),
    shape(
      "g",
      {class: "first"},
      shape("path", {class: "line", d: `M${known.map(([a, b]) => `${x(a)} ${y(b)}`).join("L")}`}),
      ...known.map(([a, b]) =>
        shape("circle", {cx: x(a), cy: y(b), r: 2.4}, shape("title", {}, `${say("axis.step")} ${a}: ${figure(b)}`)),
      ),
    ),
  );
}
