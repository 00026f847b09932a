// The run: its curves as a way in, and every step as a cell.

import {el, figure, link, picture} from "page/dom.js";
import {listing, say, translated} from "page/words.js";
import {overview} from "page/source.js";
import {lit} from "page/colours.js";

const PAGE = 200;

export async function runView({first}) {
  const run = await overview();
  const last = Math.max(1, run.last),
    pages = Math.ceil(run.steps.length / PAGE);
  const page = first === undefined ? pages - 1 : Math.floor(Number(first) / PAGE);
  return [
    el("p", {class: "eyebrow"}, say("run.about", run)),
    el("h1", {}, run.name),
    el("p", {class: "lede"}, told(run.lede)),
    el("p", {class: "soft"}, say("run.pick")),
    el(
      "div",
      {class: "charts"},
      run.charts.map(svg => clickable(translated(picture(svg)), run, last)),
    ),
    el(
      "section",
      {},
      el("h2", {}, say("run.steps")),
      el("p", {class: "soft"}, say("run.steps_about")),
      cells(run, page * PAGE),
      pager(run, page, pages),
    ),
  ];
}

// What happened, as the report says it first.
function told({key, values, phrases}) {
  const said = Object.entries(phrases).map(([name, phrase]) => [name, say(phrase, values)]);
  return say(key, {...values, ...Object.fromEntries(said)});
}

function clickable(svg, run, last) {
  svg.addEventListener("click", event => {
    const box = svg.getBoundingClientRect();
    const part = ((event.clientX - box.left) / box.width - run.axis.left) / (run.axis.right - run.axis.left);
    if (part > -0.05 && part < 1.05) location.hash = `#/step/${closest(run, part * last)}`;
  });
  return svg;
}

// A click finds a step that has something to show.
function closest(run, step) {
  const steps = run.recorded.length ? run.recorded : run.steps;
  return steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best), steps[0]);
}

function cells(run, from) {
  const known = run.reward.filter(value => value !== null),
    recorded = new Set(run.recorded);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity),
    high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  return el(
    "div",
    {class: "cells"},
    run.steps.slice(from, from + PAGE).map((step, i) => {
      const reward = run.reward[from + i],
        dead = (run.dead[from + i] ?? 0) > 0.999;
      const told = listing([
        say("run.cell", {step, reward: figure(reward)}),
        ...(dead ? [say("run.cell_dead")] : []),
        ...(recorded.has(step) ? [say("run.cell_recorded")] : []),
      ]);
      const cell = link("", `#/step/${step}`, {
        class: `cell${dead ? " dead" : ""}${recorded.has(step) ? " recorded" : ""}`,
        "aria-label": told,
        title: told,
      });
      if (reward !== null) lit(cell, high > low ? (reward - low) / (high - low) : 0.5);
      return cell;
    }),
  );
}

function pager(run, page, pages) {
  if (pages < 2) return null;
  const at = run.steps.slice(page * PAGE, (page + 1) * PAGE);
  return el(
    "p",
    {class: "pager"},
    page > 0 ? link(`← ${say("earlier")}`, `#/run?first=${(page - 1) * PAGE}`) : "",
    el("span", {}, ` ${say("run.page", {first: at[0], last: at[at.length - 1]})} `),
    page < pages - 1 ? link(`${say("later")} →`, `#/run?first=${(page + 1) * PAGE}`) : "",
  );
}
