// What moved in a step, over all its recorded groups.

import {el, formatNumber, formatPercent, link} from "page/dom.js";
import {WORDS, say} from "page/words.js";
import {getTokens} from "page/source.js";
import {getSequences, listGroups, listSampled, mergeEvents} from "page/tokens.js";
import {explainToken} from "page/sentence.js";
import {formatText} from "page/panel.js";
import {renderMissing} from "page/step.js";

const MAX_ROWS = 12;
const CLIP_RULES = ["clip_low", "clip_high", "dual_clip"];

export async function renderMovers({step}) {
  const data = await getTokens(step), title = el("h1", say("movers.title", {step}));
  if (!data) return [title, ...(await renderMissing("movers.none", step, "movers"))];
  const groups = listGroups(data).map(group =>
    listSampled(getSequences(data, group)).map(token => ({...token, group})),
  );
  const merge = isWanted => groups.flatMap(tokens => mergeEvents(tokens.filter(isWanted)));
  const all = merge(() => true), clipped = merge(token => CLIP_RULES.includes(token.rule));
  const total = all.reduce((sum, token) => sum + (token.gradient ?? 0), 0);
  const sizeOf = name => token => Math.abs(token[name] ?? 0);
  const has = name => all.some(token => token[name] !== null);
  const lists = [
    {
      name: "change",
      tokens: all,
      size: sizeOf("change"),
      least: data.rounding,
      column: "change",
      format: token => formatNumber(token.change),
      empty: has("change") ? "within" : "unknown",
    },
    {
      name: "gradient",
      tokens: all,
      size: sizeOf("gradient"),
      column: "share",
      format: token => formatPercent(total ? token.gradient / total : 0),
    },
    {
      name: "gap",
      tokens: all,
      size: sizeOf("gap"),
      column: "gap",
      format: token => formatNumber(token.gap),
      empty: has("gap") ? "below" : "unknown",
    },
    {
      name: "clipped",
      tokens: clipped,
      size: token => Math.abs(Math.log(token.ratio ?? 1)),
      column: "ratio",
      format: token => formatNumber(token.ratio),
    },
  ];
  const values = {
    ...data,
    floor: formatNumber(data.floor),
    rounding: formatNumber(data.rounding),
    n: clipped.reduce((sum, token) => sum + token.answers, 0),
    all: groups.flat().length,
  };
  return [
    el("p.eyebrow", link(say("step.title", {step}), `#/step/${step}`)),
    title,
    ...lists.map(each => buildList(each, step, data, values)),
  ];
}

// The tokens of a size above the least, largest first, each with a number and with what happened to it.
function buildList({name, tokens, size, least = 0, column, format, empty = "nothing"}, step, data, values) {
  const shown = tokens.filter(token => size(token) > 0 && size(token) >= least);
  shown.sort((a, b) => size(b) - size(a)).splice(MAX_ROWS);
  const heads = ["token", column, "said", "where"].map(key => el("th", say(`column.${key}`)));
  const rows = shown.map(token => {
    const {text, group, c, position, answers} = token;
    const where = say(answers > 1 ? "where.several" : "where", {group, t: position, n: answers});
    const target = `#/group/${step}/${group}?c=${c}&t=${position}`;
    return el(
      "tr",
      el("td", link(formatText(text), target, {class: "code"})),
      el("td", format(token)),
      el("td", explainToken(token, data)),
      el("td.soft", where),
    );
  });
  const about = `movers.${name}_about`;
  return el(
    "section.list",
    el("h2", say(`movers.${name}`)),
    WORDS[about] ? el("p.soft", say(about, values)) : null,
    rows.length
      ? el("div.wide", el("table", el("thead", el("tr", heads)), el("tbody", rows)))
      : el("p", say(`movers.${empty}`, values)),
  );
}
