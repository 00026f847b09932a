// The run: its curves as a way in, and every step as a cell.

import {copySvg, el, formatNumber, link} from "page/dom.js";
import {joinList, say, translateSvg} from "page/words.js";
import {findNearest, getOverview, listSteps} from "page/source.js";
import {colorSequentially} from "page/colors.js";

const STEPS_PER_PAGE = 200;

export async function renderRun({first}) {
  const run = await getOverview(), steps = await listSteps();
  const pages = Math.ceil(run.steps.length / STEPS_PER_PAGE);
  const page = first === undefined ? pages - 1 : Math.floor(Number(first) / STEPS_PER_PAGE);
  const {key, values, phrases} = run.lede;
  const texts = Object.entries(phrases).map(([name, phrase]) => [name, say(phrase, values)]);
  return [
    el("p.eyebrow", say("run.about", run)),
    el("h1", run.name),
    el("p.lede", say(key, {...values, ...Object.fromEntries(texts)})),
    el("p.soft", say("run.pick")),
    el("div.charts", run.charts.map(svg => makeClickable(translateSvg(copySvg(svg)), run, steps))),
    el(
      "section",
      el("h2", say("run.steps")),
      el("p.soft", say("run.steps_about")),
      buildCells(run, page * STEPS_PER_PAGE),
      pages > 1 ? buildPager(run, page, pages) : null,
    ),
  ];
}

// A click opens the nearest step that has something to show.
function makeClickable(svg, run, steps) {
  svg.addEventListener("click", event => {
    const box = svg.getBoundingClientRect();
    const part = ((event.clientX - box.left) / box.width - run.axis.left) / (run.axis.right - run.axis.left);
    const step = findNearest(steps, part * Math.max(1, run.last));
    if (part > -0.05 && part < 1.05) location.hash = `#/step/${step}`;
  });
  return svg;
}

function buildCells(run, start) {
  const known = run.reward.filter(value => value !== null), recorded = new Set(run.recorded);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const cells = run.steps.slice(start, start + STEPS_PER_PAGE).map((step, i) => {
    const reward = run.reward[start + i], isDead = run.dead[start + i] > 0.999, isRecorded = recorded.has(step);
    const title = joinList([
      say("run.cell", {step, reward: formatNumber(reward)}),
      isDead ? say("run.cell_dead") : null,
      isRecorded ? say("run.cell_recorded") : null,
    ]);
    const name = `cell${isDead ? " dead" : ""}${isRecorded ? " recorded" : ""}`;
    const cell = link("", `#/step/${step}`, {class: name, "aria-label": title, title});
    if (reward !== null) colorSequentially(cell, high > low ? (reward - low) / (high - low) : 0.5);
    return cell;
  });
  return el("div.cells", cells);
}

function buildPager(run, page, pages) {
  const steps = run.steps.slice(page * STEPS_PER_PAGE, (page + 1) * STEPS_PER_PAGE);
  const target = number => `#/run?first=${number * STEPS_PER_PAGE}`;
  return el(
    "p.pager",
    page > 0 ? link(`← ${say("earlier")}`, target(page - 1)) : null,
    el("span", ` ${say("run.page", {first: steps[0], last: steps.at(-1)})} `),
    page < pages - 1 ? link(`${say("later")} →`, target(page + 1)) : null,
  );
}
