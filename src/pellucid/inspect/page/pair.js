// The same step of two runs, side by side by its questions.

import {el, formatNumber, link} from "page/dom.js";
import {joinList, say} from "page/words.js";
import {getOverview, getSummary, getTokens, listRuns} from "page/source.js";
import {getSequences, isAnswer} from "page/tokens.js";
import {buildLegend, colorToken, computeMax} from "page/colors.js";

const BY = "change", MAX_ANSWERS = 4, MAX_TOKENS = 200;

export async function renderPair({step}) {
  const title = el("h1", say("pair.title", {step}));
  if ((await listRuns()).length < 2) return [title, el("p.lede", say("pair.one"))];
  const runs = await Promise.all([0, 1].map(run => loadRun(step, run)));
  const questions = [...new Set(runs.flatMap(run => [...run.groups.keys()]))];
  const isShared = question => runs.every(run => run.groups.has(question));
  const shared = questions.filter(isShared), others = questions.filter(question => !isShared(question));
  const tokens = runs.flatMap(run => [...run.answers.values()].flat()).flatMap(answer => answer.tokens);
  const max = computeMax(tokens, BY), legend = buildLegend(tokens, BY, max);
  return [
    title,
    el("p.lede", say("pair.shared", {n: shared.length})),
    tokens.length ? el("p.controls", `${say("group.heat")} ${say(`by.${BY}`)}`, legend) : null,
    ...[...shared, ...others].map(question =>
      el(
        "section.pair",
        el("h2.question", runs.find(run => run.groups.has(question)).groups.get(question).prompt),
        el("div.two", runs.map(run => buildSide(step, run, question, max))),
      ),
    ),
  ];
}

// The name of a run, and by question the groups of the step and their answers.
async function loadRun(step, run) {
  const {name} = await getOverview(run), data = await getTokens(step, run);
  const groups = new Map(((await getSummary(step, run))?.groups ?? []).map(group => [group.question, group]));
  const answers = new Map();
  for (const [question, {group, recorded}] of groups) {
    answers.set(question, data && recorded ? getSequences(data, group).filter(isAnswer) : []);
  }
  return {run, name, groups, answers};
}

function computeMean(values) {
  const known = values.filter(value => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// One run's answers to a question; `max` is the value that has the strongest color on both sides.
function buildSide(step, {run, name, groups, answers}, question, max) {
  const group = groups.get(question);
  if (!group) return el("div", el("h3", name), el("p.soft", say("pair.missing")));
  const all = answers.get(question), shown = all.slice(0, MAX_ANSWERS);
  const about = joinList([
    say(`signal.${group.signal}`),
    `${say("question.reward")} ${formatNumber(computeMean(group.rewards))}`,
    `${say("question.length")} ${formatNumber(computeMean(group.lengths))}`,
    all.length ? say("pair.shown", {shown: shown.length, all: all.length}) : say("pair.unrecorded"),
  ]);
  const flows = shown.map(answer => {
    const tokens = answer.tokens.slice(0, MAX_TOKENS).map(token => {
      const node = el("span.tok", token.text.slice(0, 100));
      colorToken(node, token, BY, max);
      return node;
    });
    return el("p.flow", el("span.soft", `${say("reward", {value: formatNumber(answer.reward)})} `), tokens);
  });
  const heading = run === 0 ? link(name, `#/group/${step}/${group.group}`) : name;
  return el("div", el("h3", heading), el("p.soft", about), flows);
}
