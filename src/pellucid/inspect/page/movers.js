// What moved in a step, over all its recorded groups.

import {el, figure, link, percent, shape} from "page/dom.js";
import {WORDS, listing, say} from "page/words.js";
import {overview, tokens} from "page/source.js";
import {events, groupOf, groupsOf, merged} from "page/tokens.js";
import {sentence} from "page/sentence.js";
import {named} from "page/panel.js";
import {elsewhere, missing} from "page/step.js";

const MOST = 12,
  MOST_STEPS = 3,
  SIZE = 320,
  MARGIN = 46;

export async function moversView({step}) {
  const data = await tokens(step),
    title = el("h1", {}, say("movers.title", {step}));
  if (!data) return [title, el("p", {class: "lede"}, say(missing("movers.none"), {step})), await elsewhere(step, "movers")];
  const groups = groupsOf(data).map(group => events(groupOf(data, group)).map(token => ({...token, group})));
  const gathered = keep => groups.flatMap(each => merged(each.filter(keep)));
  const all = gathered(() => true),
    count = groups.flat().length;
  const whole = all.reduce((sum, token) => sum + (token.gradient ?? 0), 0);
  const isClipped = token => ["clip_low", "clip_high", "dual_clip"].includes(token.rule),
    clipped = gathered(isClipped);
  const predicted = all.filter(token => token.predicted !== null && token.change !== null);
  const size = name => token => Math.abs(token[name] ?? 0);
  const values = {...data, floor: figure(data.floor), rounding: figure(data.rounding)};
  const moved = {least: data.rounding, none: all.some(token => token.change !== null) ? "within" : "unknown"};
  const apart = {least: 0, none: all.some(token => token.gap !== null) ? "below" : "unknown"};
  const plain = {least: 0, none: "nothing"};
  const said = token => [
    el("td", {}, sentence(token, data)),
    el("td", {class: "soft"}, where(token)),
  ];
  const section = (name, from, of, shown, rule, about = values) =>
    list({name, from, of, step, said, rule, about, shown});
  const changes = {change: token => figure(token.change)};
  if (predicted.length) changes.predicted = token => figure(token.predicted);
  return [
    el("p", {class: "eyebrow"}, link(say("step.title", {step}), `#/step/${step}`)),
    title,
    section("change", all, size("change"), changes, moved),
    predicted.length ? el("p", {class: "soft"}, say("movers.predicted")) : await unpredicted(step),
    predicted.length ? plot(predicted) : null,
    section("gradient", all, size("gradient"), {share: token => percent(whole ? token.gradient / whole : 0)}, plain),
    section("gap", all, size("gap"), {gap: token => figure(token.gap)}, apart),
    section(
      "clipped",
      clipped,
      token => Math.abs(Math.log(token.ratio ?? 1)),
      {ratio: token => figure(token.ratio)},
      plain,
      {n: clipped.reduce((sum, token) => sum + token.answers, 0), all: count},
    ),
  ];
}

function where({group, position, answers}) {
  return say(answers > 1 ? "where.several" : "where", {group, t: position, n: answers});
}

// At which steps there is a prediction, where this one has none.
async function unpredicted(step) {
  const {predicted} = await overview();
  const near = [...predicted].sort((a, b) => Math.abs(a - step) - Math.abs(b - step)).slice(0, MOST_STEPS);
  if (!near.length) return el("p", {class: "soft"}, say("movers.never_predicted", {step}));
  const links = near.sort((a, b) => a - b).flatMap((other, i) => [i ? listing(["", ""]) : " ", link(other, `#/movers/${other}`)]);
  return el("p", {class: "soft"}, say("movers.unpredicted", {step}), links, say("movers.unpredicted_end"));
}

// The tokens of a size above the least, largest first, each with what is shown of it and what is said.
function list({name, from, of, step, shown, said, rule, about}) {
  const first = from
    .filter(token => of(token) > 0 && of(token) >= rule.least)
    .sort((a, b) => of(b) - of(a))
    .slice(0, MOST);
  const heads = ["token", ...Object.keys(shown), "said", "where"].map(key => el("th", {}, say(`column.${key}`)));
  const told = WORDS[`movers.${name}_about`] ? el("p", {class: "soft"}, say(`movers.${name}_about`, about)) : null;
  const line = token =>
    el(
      "tr",
      {},
      el("td", {}, link(named(token.text), `#/group/${step}/${token.group}?c=${token.c}&t=${token.position}`, {class: "code"})),
      Object.values(shown).map(value => el("td", {}, value(token))),
      said(token),
    );
  const table = () => el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, first.map(line)));
  return el(
    "section",
    {class: "list"},
    el("h2", {}, say(`movers.${name}`)),
    told,
    first.length ? el("div", {class: "wide"}, table()) : el("p", {}, say(`movers.${rule.none}`, about)),
  );
}

function plot(tokens) {
  const most = tokens.reduce((so, each) => Math.max(so, Math.abs(each.change), Math.abs(each.predicted)), 0) || 1;
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
