// A step: its groups as a strip, those first that taught most.

import {el, figure, link, percent} from "page/dom.js";
import {listing, say} from "page/words.js";
import {isLive, overview, summary} from "page/source.js";

export async function stepView({step}) {
  const found = await summary(step);
  const title = el("h1", {}, say("step.title", {step}));
  if (!found) return [title, el("p", {class: "lede"}, say(missing("step.none"), {step})), await elsewhere(step, "step")];
  const groups = byTaught(found.groups),
    whole = groups.reduce((sum, group) => sum + (group.gradient ?? 0), 0);
  const signal = groups.filter(group => group.signal === "signal").length;
  const all = groups.every(group => group.recorded);
  return [
    title,
    found.damaged ? el("p", {class: "warn", role: "alert"}, found.damaged) : null,
    el("p", {class: "lede"}, say("step.counts", {signal, all: groups.length}), " ", await rewardOf(step)),
    el("p", {class: "soft"}, say("step.taught"), " ", say(groups.some(isJudged) ? "step.marks" : "step.marks_degree"), " ", link(`${say("step.movers")} →`, `#/movers/${step}`)),
    el(
      "ol",
      {class: "strip-of-groups"},
      groups.map(group => row(step, group, whole, all)),
    ),
  ];
}

// A page on disk does not know whether what it has not was recorded.
export function missing(key) {
  return isLive ? key : `${key}_here`;
}

// Which steps there are in place of one that is not, and the way to the nearest.
export async function elsewhere(step, view) {
  const {recorded, steps} = await overview(),
    there = recorded.length ? recorded : steps;
  if (!there.length) return null;
  const nearest = there.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
  const range = say("elsewhere", {first: there[0], last: there[there.length - 1]});
  return el("p", {}, range, " ", link(say("step.title", {step: nearest}), `#/${view}/${nearest}`));
}

async function rewardOf(step) {
  const {steps, reward} = await overview(),
    known = reward.filter(value => value !== null),
    here = reward[steps.indexOf(step)] ?? null;
  if (here === null) return "";
  return say("step.reward", {reward: figure(here), first: figure(known[0]), last: figure(known[known.length - 1])});
}

function gradientOf(group) {
  if (!group.recorded) return say("step.unrecorded");
  return group.gradient ? say("step.gradient", {value: figure(group.gradient)}) : say("step.no_gradient");
}

function byTaught(groups) {
  return [...groups].sort(
    (a, b) => (b.gradient ?? -1) - (a.gradient ?? -1) || (b.signal === "signal") - (a.signal === "signal"),
  );
}

// Where rewards are a matter of degree, nothing says which answers are right.
function isJudged(group) {
  return group.correct.some(right => right !== null);
}

function mark(group, i) {
  const reward = group.rewards[i],
    title = say("reward", {value: figure(reward)});
  if (reward === null) return el("i", {class: "failed", title}, "!");
  if (group.correct[i] === null) return el("i", {class: "degree", title}, figure(reward));
  return el("i", {class: group.correct[i] ? "right" : "wrong", title}, group.correct[i] ? "✓" : reward > 0 ? "◐" : "✗");
}

function answersOf(group) {
  const all = group.rewards.length;
  return isJudged(group) ? say("step.answers", {right: group.correct.filter(Boolean).length, all}) : say("step.all", {all});
}

function row(step, group, whole, all) {
  const bar = el("i", {class: "bar"});
  bar.style.width = whole ? `${(100 * (group.gradient ?? 0)) / whole}%` : "0";
  return el(
    "li",
    {},
    el(
      "a",
      {href: `#/group/${step}/${group.group}`, class: `group ${group.signal}`},
      el("span", {class: "asked"}, group.prompt.slice(0, 160) || group.id),
      el(
        "span",
        {class: "marks", "aria-hidden": "true"},
        group.rewards.map((_, i) => mark(group, i)),
      ),
      el(
        "span",
        {class: "soft"},
        listing([
          say(`signal.${group.signal}`),
          answersOf(group),
          gradientOf(group),
          group.recorded && group.gradient && whole
            ? say(all ? "step.share" : "step.share_recorded", {share: percent(group.gradient / whole)})
            : null,
        ]),
      ),
      el("span", {class: "track", "aria-hidden": "true"}, bar),
    ),
  );
}
