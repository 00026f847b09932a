// The view of the page, chosen by the fragment of the address; keys; and updates while a run trains.

import {el, link} from "page/dom.js";
import {keep, say, speak, spoken} from "page/words.js";
import {forget, get, isLive, overview, runsThere} from "page/source.js";
import {choose, groupView, nearestStep, neighbours, nextFork, nextQuantity} from "page/group.js";
import {runView} from "page/run.js";
import {stepView} from "page/step.js";
import {moversView} from "page/movers.js";
import {questionView} from "page/question.js";
import {pairView} from "page/pair.js";
import {whyView} from "page/why.js";

const VIEWS = {
  run: runView,
  step: stepView,
  group: groupView,
  movers: moversView,
  question: questionView,
  pair: pairView,
  why: whyView,
};
const STEPPED = new Set(["step", "group", "movers", "pair"]);
const KEYS = ["arrows", "ends", "parting", "heat", "align", "groups", "steps", "views", "language", "help"];
const EVERY = 2000,
  PATIENCE = 400;
const content = document.getElementById("content");
let shown = 0,
  pulse = "",
  quiet = null,
  was = {};

// The parts of an address such as #/group/12/3?c=0&t=5. A missing step or group is the last one shown, or the newest.
async function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, first, second] = path.split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "run",
    asked = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (view === "question") return {...asked, view, question: first};
  if (!STEPPED.has(view)) return {...asked, view};
  const {recorded, last} = await overview();
  const step = /^\d+$/.test(first ?? "") ? Number(first) : (was.step ?? recorded[recorded.length - 1] ?? last);
  if (view !== "group") return {...asked, view, step};
  const there = await neighbours(step);
  const group = /^\d+$/.test(second ?? "")
    ? Number(second)
    : there.includes(was.group)
      ? was.group
      : (there[0] ?? 0);
  return {...asked, view, step, group};
}

async function show() {
  const turn = ++shown;
  document.microscope = null;
  content.setAttribute("aria-busy", "true");
  const slow = setTimeout(() => {
    if (turn === shown) content.replaceChildren(el("p", {class: "soft"}, say("loading")));
  }, PATIENCE);
  let drawn,
    at = {view: "run"};
  try {
    at = await route();
    drawn = await VIEWS[at.view](at);
  } catch (error) {
    drawn = [el("p", {class: "lede warn", role: "alert"}, error.message)];
  }
  clearTimeout(slow);
  if (turn !== shown) return;
  document.microscope = drawn.state ?? null;
  content.replaceChildren(...drawn.filter(Boolean));
  content.dataset.view = at.view;
  await frame(at).catch(() => null);
  content.setAttribute("aria-busy", "false");
}

async function frame(at) {
  const {name} = await overview();
  document.title = `${name} · ${say(`view.${at.view}`)}`;
  document.getElementById("skip").textContent = say("skip");
  if (at.step !== undefined) was = {...was, step: at.step, ...(at.view === "group" ? {group: at.group} : {})};
  document.getElementById("top").replaceChildren(
    el("a", {href: "#/run", class: "name"}, "pellucid ", el("span", {}, say("title"))),
    el(
      "nav",
      {"aria-label": say("title")},
      Object.keys(VIEWS).map(view =>
        link(say(`view.${view}`), target(view), {"aria-current": view === at.view ? "page" : null}),
      ),
    ),
    STEPPED.has(at.view) ? await stepper(at) : "",
    el(
      "span",
      {class: "tools"},
      isLive ? el("span", {id: "live", class: "tag", role: "status"}, await news()) : "",
      el("button", {id: "language", onclick: other}, say("language")),
      el("button", {id: "keys", onclick: help}, say("keys")),
    ),
  );
  document.getElementById("foot").replaceChildren(isLive ? "" : el("p", {}, leftOut(await get("packed"))));
}

// A sentence on what a page on disk leaves out, as single_file.py writes it.
function leftOut({counts}) {
  const parts = Object.entries(counts)
    .filter(([, [n, all]]) => n < all)
    .map(([name, [n, all]]) => say(`packed.${name}`, {n: all - n, all}));
  return parts.length ? say("packed", {what: parts.join(say("packed.join"))}) : "";
}

// The address of a view, at the step and the group that were shown last.
function target(view) {
  const step = STEPPED.has(view) ? was.step : undefined;
  return `#/${[view, step, view === "group" && step !== undefined ? was.group : undefined].filter(part => part !== undefined).join("/")}`;
}

// A word on whether the run still trains. It has ended with the last planned step.
async function news() {
  const {last, planned} = await overview();
  if (planned && last >= planned) return say("ended");
  return quiet ? say("quiet", quiet) : say("live");
}

async function stepper(at) {
  const sides = await Promise.all([-1, 1].map(way => nearestStep(at.step, way)));
  const rest = at.view === "group" ? "group" : at.view;
  const box = el("input", {
    id: "step",
    type: "number",
    min: "1",
    value: at.step,
    "aria-label": say("step.go"),
    onchange: event => {
      location.hash = `#/${rest}/${event.target.value}`;
    },
  });
  return el(
    "span",
    {class: "stepper"},
    sides[0] ? link("‹", `#/${rest}/${sides[0]}`, {"aria-label": say("earlier")}) : "‹",
    box,
    sides[1] ? link("›", `#/${rest}/${sides[1]}`, {"aria-label": say("later")}) : "›",
  );
}

function other() {
  keep(spoken() === "en" ? "zh" : "en");
  show();
}

function help() {
  const box = document.getElementById("help");
  box.replaceChildren(
    el("h2", {}, say("keys")),
    el(
      "ul",
      {},
      KEYS.map(key => el("li", {}, say(`keys.${key}`))),
    ),
    el("button", {onclick: () => box.close()}, say("close")),
  );
  if (!box.open) box.showModal();
}

async function step(way) {
  const at = await route(),
    next = STEPPED.has(at.view) ? await nearestStep(at.step, way) : undefined;
  if (next !== undefined) location.hash = `#/${at.view}/${next}`;
}

async function group(way) {
  const at = await route(),
    there = at.step === undefined ? [] : await neighbours(at.step);
  const next = there[at.group === undefined ? 0 : there.indexOf(at.group) + way];
  if (next !== undefined) location.hash = `#/group/${at.step}/${next}`;
}

const INSIDE = {
  ArrowRight: (state, c, t) => choose(state, c, t + 1),
  ArrowLeft: (state, c, t) => choose(state, c, t - 1),
  ArrowDown: (state, c, t) => choose(state, state.chosen ? c + 1 : c, Math.max(0, t)),
  ArrowUp: (state, c, t) => choose(state, c - 1, Math.max(0, t)),
  Home: (state, c) => choose(state, c, 0),
  End: (state, c) => choose(state, c, Infinity),
  h: state => nextQuantity(state),
  a: state => state.toggle(),
  p: state => nextFork(state),
};
const ANYWHERE = {"[": () => step(-1), "]": () => step(1), j: () => group(1), k: () => group(-1), l: other, "?": help};

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const state = document.microscope,
    views = Object.keys(VIEWS);
  if (state && INSIDE[event.key]) {
    const {c, t} = state.chosen ?? {c: 0, t: -1};
    INSIDE[event.key](state, c, t);
  } else if (ANYWHERE[event.key]) ANYWHERE[event.key]();
  else if (/^[1-7]$/.test(event.key)) {
    location.hash = target(views[event.key - 1]);
  } else return;
  event.preventDefault();
});

// Look for new steps. Only views of the whole run are drawn anew, so that what the user reads stays.
async function beat() {
  const live = document.getElementById("live");
  try {
    const pulses = await Promise.all(
      (await runsThere()).map(async (_, i) => (await fetch(`data/${i}/pulse`)).text()),
    );
    const now = pulses.join(),
      told = JSON.parse(pulses[0]);
    quiet = told.quiet ? {minutes: told.minutes} : null;
    if (live) live.textContent = await news();
    if (pulse && now !== pulse) {
      forget();
      const at = await route();
      if (["run", "why"].includes(at.view) && !at.first) await show();
      else await frame(at);
    }
    pulse = now;
  } catch {
    if (live) live.textContent = say("offline");
  }
  setTimeout(beat, EVERY);
}

speak(spoken());
window.addEventListener("hashchange", show);
show();
if (isLive) beat();
