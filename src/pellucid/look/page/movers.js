// What moved in a step, over all its recorded groups.

import {el, figure, link, percent, shape} from "./dom.js";
import {say} from "./words.js";
import {tokens} from "./source.js";
import {groupOf, groupsOf, listed} from "./tokens.js";
import {sentence} from "./sentence.js";
import {named} from "./panel.js";

const MOST = 12,
  SIZE = 320,
  MARGIN = 46;

export async function moversView({step}) {
  const data = await tokens(step),
    title = el("h1", {}, say("movers.title", {step}));
  if (!data) return [title, el("p", {class: "lede"}, say("movers.none", {step}))];
  const all = groupsOf(data)
    .flatMap(group => placed(data, step, group))
    .filter(token => token.kind === "sampled");
  const whole = all.reduce((sum, token) => sum + token.times * (token.gradient ?? 0), 0);
  const count = tokens => tokens.reduce((sum, token) => sum + token.times, 0);
  const clipped = all.filter(token => ["clip_low", "clip_high", "dual_clip"].includes(token.rule));
  const predicted = all.filter(token => token.predicted !== null && token.change !== null);
  const size = name => token => Math.abs(token[name] ?? 0);
  return [
    el("p", {class: "eyebrow"}, link(say("step.title", {step}), `#/step/${step}`)),
    title,
    list(
      "change",
      all,
      size("change"),
      token =>
        figure(token.change) +
        (token.predicted === null ? "" : ` (${say("token.predicted")} ${figure(token.predicted)})`),
    ),
    predicted.length ? plot(predicted) : null,
    list("gradient", all, size("gradient"), token => percent(whole ? token.gradient / whole : 0)),
    list("gap", all, size("gap"), token => figure(token.gap)),
    list(
      "clipped",
      clipped,
      token => Math.abs(Math.log(token.ratio ?? 1)),
      token => `${say("token.ratio")} ${figure(token.ratio)}`,
      {n: count(clipped), all: count(all)},
    ),
  ];
}

function placed(data, step, group) {
  return listed(groupOf(data, group)).flatMap((each, c) =>
    each.tokens.map(token =>
      Object.assign(token, {
        times: each.same.length,
        place: `#/group/${step}/${group}?c=${c}&t=${token.position}`,
        where:
          `${say("view.group")} ${group}, ${say("answer", {n: each.same[0]})}, ${token.position}` +
          (each.same.length > 1 ? `, × ${each.same.length}` : ""),
      }),
    ),
  );
}

function list(name, all, size, value, counts = {}) {
  const first = all
    .filter(token => size(token) > 0)
    .sort((a, b) => size(b) - size(a))
    .slice(0, MOST);
  const heads = ["token", "value", "said", "where"].map(key => el("th", {}, say(`column.${key}`)));
  const about = WORDS[`movers.${name}_about`] ? el("p", {class: "soft"}, say(`movers.${name}_about`, counts)) : null;
  return el(
    "section",
    {class: "list"},
    el("h2", {}, say(`movers.${name}`)),
    about,
    first.length
      ? el(
          "div",
          {class: "wide"},
          el(
            "table",
            {},
            el("thead", {}, el("tr", {}, heads)),
            el(
              "tbody",
              {},
              first.map(token =>
                el(
                  "tr",
                  {},
                  el("td", {}, link(named(token.text), token.place, {class: "code"})),
                  el("td", {}, value(token)),
                  el("td", {}, sentence(token)),
                  el("td", {class: "soft"}, token.where),
                ),
              ),
            ),
          ),
        )
      : el("p", {}, say("movers.nothing")),
  );
}

function plot(tokens) {
  const most = Math.max(...tokens.map(token => Math.max(Math.abs(token.change), Math.abs(token.predicted)))) || 1;
  const at = value => MARGIN + ((value / most + 1) / 2) * (SIZE - 2 * MARGIN);
  const line = (x1, y1, x2, y2, name) =>
    shape("path", {class: name, d: `M${at(x1)} ${SIZE - at(y1)}L${at(x2)} ${SIZE - at(y2)}`});
  const note = (text, x, y, anchor) => shape("text", {class: "tick", x, y, "text-anchor": anchor}, text);
  return el(
    "figure",
    {},
    shape(
      "svg",
      {class: "chart scatter", viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": say("movers.plot")},
      line(-most, 0, most, 0, "grid"),
      line(0, -most, 0, most, "grid"),
      line(-most, -most, most, most, "mark"),
      ...tokens
        .slice(0, 2000)
        .map(token => shape("circle", {class: "first", cx: at(token.predicted), cy: SIZE - at(token.change), r: 2.2})),
      note(`${say("axis.predicted")} ${figure(most)}`, SIZE - MARGIN, SIZE - 14, "end"),
      note(`${say("axis.measured")} ${figure(most)}`, MARGIN, 24, "start"),
    ),
    el("figcaption", {class: "soft"}, say("movers.plot")),
  );
}
