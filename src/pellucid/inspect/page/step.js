// A step: its groups as a list, those first that taught most.

import {el, formatNumber, formatPercent, link} from "page/dom.js";
import {joinList, say} from "page/words.js";
import {findNearest, getOverview, getSummary, isLive, listSteps} from "page/source.js";

export async function renderStep({step}) {
  const summary = await getSummary(step);
  if (!summary) return [el("h1", say("step.title", {step})), ...(await renderMissing("step.none", step, "step"))];
  const groups = [...summary.groups].sort(
    (a, b) => (b.gradient ?? -1) - (a.gradient ?? -1) || (b.signal === "signal") - (a.signal === "signal"),
  );
  const total = groups.reduce((sum, group) => sum + (group.gradient ?? 0), 0);
  const signal = groups.filter(group => group.signal === "signal").length;
  const shareKey = groups.every(group => group.recorded) ? "step.share" : "step.share_recorded";
  const marks = say(groups.some(hasVerdicts) ? "step.marks" : "step.marks_degree");
  return [
    el("h1", say("step.title", {step})),
    summary.damaged ? el("p.warn", {role: "alert"}, summary.damaged) : null,
    el("p.lede", `${say("step.counts", {signal, all: groups.length})} `, await describeReward(step)),
    el("p.soft", `${say("step.taught")} ${marks} `, link(`${say("step.movers")} →`, `#/movers/${step}`)),
    el("ol.groups", groups.map(group => buildGroup(step, group, total, shareKey))),
  ];
}

// That a step is not there, which there are in its place, and the way to the nearest. A page on disk does not know
// whether what it lacks was recorded.
export async function renderMissing(key, step, view) {
  const steps = await listSteps();
  const about = el("p.lede", say(isLive ? key : `${key}_here`, {step}));
  if (!steps.length) return [about];
  const nearest = findNearest(steps, step);
  const range = say("elsewhere", {first: steps[0], last: steps.at(-1)});
  return [about, el("p", `${range} `, link(say("step.title", {step: nearest}), `#/${view}/${nearest}`))];
}

async function describeReward(step) {
  const {steps, reward} = await getOverview();
  const known = reward.filter(value => value !== null).map(formatNumber);
  const own = reward[steps.indexOf(step)] ?? null;
  return own === null ? "" : say("step.reward", {reward: formatNumber(own), first: known[0], last: known.at(-1)});
}

// Where rewards are a matter of degree, nothing says which answers are right.
function hasVerdicts(group) {
  return group.correct.some(right => right !== null);
}

function buildMark(reward, right) {
  const title = say("reward", {value: formatNumber(reward)});
  if (reward === null) return el("i.failed", {title}, "!");
  if (right === null) return el("i.degree", {title}, formatNumber(reward));
  return right ? el("i.right", {title}, "✓") : el("i.wrong", {title}, reward > 0 ? "◐" : "✗");
}

function describeGroup(group, total, shareKey) {
  const {correct, gradient, recorded, signal} = group, all = correct.length;
  const gradientText = gradient ? say("step.gradient", {value: formatNumber(gradient)}) : say("step.no_gradient");
  return joinList([
    say(`signal.${signal}`),
    hasVerdicts(group) ? say("step.answers", {right: correct.filter(Boolean).length, all}) : say("step.all", {all}),
    recorded ? gradientText : say("step.unrecorded"),
    recorded && gradient && total ? say(shareKey, {share: formatPercent(gradient / total)}) : null,
  ]);
}

function buildGroup(step, group, total, shareKey) {
  const bar = el("i.bar");
  bar.style.width = total ? `${(100 * (group.gradient ?? 0)) / total}%` : "0";
  const marks = group.rewards.map((reward, i) => buildMark(reward, group.correct[i]));
  return el(
    "li",
    el(
      `a.group.${group.signal}`,
      {href: `#/group/${step}/${group.group}`},
      el("span.question", group.prompt.slice(0, 160) || group.id),
      el("span.marks", {"aria-hidden": "true"}, marks),
      el("span.soft", describeGroup(group, total, shareKey)),
      el("span.track", {"aria-hidden": "true"}, bar),
    ),
  );
}
