// What moved in a step, over all its recorded groups.

import {el, figure, link, percent} from "page/dom.js";
import {WORDS, say} from "page/words.js";
import {tokens} from "page/source.js";
import {events, groupOf, groupsOf, merged} from "page/tokens.js";
import {sentence} from "page/sentence.js";
import {named} from "page/panel.js";
import {elsewhere, missing} from "page/step.js";

const MOST = 12;

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
  return [
    el("p", {class: "eyebrow"}, link(say("step.title", {step}), `#/step/${step}`)),
    title,
    section("change", all, size("change"), {change: token => figure(token.change)}, moved),
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
