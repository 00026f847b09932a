// The view of the page, chosen by the fragment of the address; keys; and updates while a run trains.

import {el, link} from "page/dom.js";
import {applyLanguage, say, switchLanguage} from "page/words.js";
import {clearCache, get, getOverview, isLive, listRuns} from "page/source.js";
import * as groups from "page/group.js";
import {renderRun} from "page/run.js";
import {renderStep} from "page/step.js";
import {renderMovers} from "page/movers.js";
import {renderQuestion} from "page/question.js";
import {renderPair} from "page/pair.js";
import {renderWhy} from "page/why.js";

const VIEWS = {
  run: renderRun,
  step: renderStep,
  group: groups.renderGroup,
  movers: renderMovers,
  question: renderQuestion,
  pair: renderPair,
  why: renderWhy,
};
const VIEWS_OF_STEPS = ["step", "group", "movers", "pair"];
const HELP = ["arrows", "ends", "parting", "heat", "align", "groups", "steps", "views", "language", "help"];
const POLL_MS = 2000, LOADING_AFTER_MS = 400;
const content = document.getElementById("content");
let renderCount = 0, lastPulse = "", quiet = null, lastShown = {};

function parseNumber(text) {
  return /^\d+$/.test(text ?? "") ? Number(text) : null;
}

// The parts of an address such as #/group/12/3?c=0&t=5. A missing step or group is the last one shown, or the newest.
async function parseAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, first, second] = path.split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "run";
  const address = {...Object.fromEntries(new URLSearchParams(query ?? "")), view};
  if (view === "question") return {...address, question: first};
  if (!VIEWS_OF_STEPS.includes(view)) return address;
  const {recorded, last} = await getOverview();
  const step = parseNumber(first) ?? lastShown.step ?? recorded.at(-1) ?? last;
  if (view !== "group") return {...address, step};
  const found = await groups.listRecordedGroups(step);
  const group = parseNumber(second) ?? (found.includes(lastShown.group) ? lastShown.group : (found[0] ?? 0));
  return {...address, step, group};
}

async function render() {
  const number = ++renderCount;
  document.microscope = null;
  content.setAttribute("aria-busy", "true");
  const timer = setTimeout(() => {
    if (number === renderCount) content.replaceChildren(el("p.soft", say("loading")));
  }, LOADING_AFTER_MS);
  let nodes, address = {view: "run"};
  try {
    address = await parseAddress();
    nodes = await VIEWS[address.view](address);
  } catch (error) {
    nodes = [el("p.lede.warn", {role: "alert"}, error.message)];
  }
  clearTimeout(timer);
  if (number !== renderCount) return;
  document.microscope = nodes.state ?? null;
  content.replaceChildren(...nodes.filter(Boolean));
  content.dataset.view = address.view;
  await renderFrame(address).catch(() => null);
  content.setAttribute("aria-busy", "false");
}

async function renderFrame({view, step, group}) {
  const {name} = await getOverview();
  document.title = `${name} · ${say(`view.${view}`)}`;
  document.getElementById("skip").textContent = say("skip");
  if (step !== undefined) lastShown = {...lastShown, step, ...(view === "group" ? {group} : {})};
  const links = Object.keys(VIEWS).map(each =>
    link(say(`view.${each}`), getViewAddress(each), {"aria-current": each === view ? "page" : null}),
  );
  document.getElementById("top").replaceChildren(
    el("a.name", {href: "#/run"}, "pellucid ", el("span", say("title"))),
    el("nav", {"aria-label": say("title")}, links),
    VIEWS_OF_STEPS.includes(view) ? await buildStepper(view, step) : "",
    el(
      "span.tools",
      isLive ? el("span.tag", {id: "live", role: "status"}, await describeProgress()) : null,
      el("button", {id: "language", onclick: changeLanguage}, say("language")),
      el("button", {id: "keys", onclick: showHelp}, say("keys")),
    ),
  );
  document.getElementById("foot").replaceChildren(isLive ? "" : el("p", describeOmissions(await get("packed"))));
}

// A sentence on what a page on disk leaves out, as single_file.py writes it.
function describeOmissions({counts}) {
  const parts = Object.entries(counts)
    .filter(([, [n, all]]) => n < all)
    .map(([name, [n, all]]) => say(`packed.${name}`, {n: all - n, all}));
  return parts.length ? say("packed", {what: parts.join(say("packed.join"))}) : "";
}

// The address of a view, at the step and the group that were shown last.
function getViewAddress(view) {
  const {step, group} = lastShown;
  if (step === undefined || !VIEWS_OF_STEPS.includes(view)) return `#/${view}`;
  return view === "group" && group !== undefined ? `#/group/${step}/${group}` : `#/${view}/${step}`;
}

// Whether the run still trains. It has ended with the last planned step.
async function describeProgress() {
  const {last, planned} = await getOverview();
  if (planned && last >= planned) return say("ended");
  return quiet ? say("quiet", quiet) : say("live");
}

async function buildStepper(view, step) {
  const [earlier, later] = await Promise.all([-1, 1].map(direction => groups.findNextStep(step, direction)));
  const onchange = event => (location.hash = `#/${view}/${event.target.value}`);
  return el(
    "span.stepper",
    earlier ? link("‹", `#/${view}/${earlier}`, {"aria-label": say("earlier")}) : "‹",
    el("input", {id: "step", type: "number", min: "1", value: step, "aria-label": say("step.go"), onchange}),
    later ? link("›", `#/${view}/${later}`, {"aria-label": say("later")}) : "›",
  );
}

function changeLanguage() {
  switchLanguage();
  render();
}

function showHelp() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(
    el("h2", say("keys")),
    el("ul", HELP.map(key => el("li", say(`keys.${key}`)))),
    el("button", {onclick: () => dialog.close()}, say("close")),
  );
  if (!dialog.open) dialog.showModal();
}

async function goToStep(direction) {
  const {view, step} = await parseAddress();
  const next = step === undefined ? undefined : await groups.findNextStep(step, direction);
  if (next !== undefined) location.hash = `#/${view}/${next}`;
}

async function goToGroup(direction) {
  const {step, group} = await parseAddress();
  const found = step === undefined ? [] : await groups.listRecordedGroups(step);
  const next = found[group === undefined ? 0 : found.indexOf(group) + direction];
  if (next !== undefined) location.hash = `#/group/${step}/${next}`;
}

const {selectToken} = groups;
const GROUP_KEYS = {
  ArrowRight: (state, c, t) => selectToken(state, c, t + 1),
  ArrowLeft: (state, c, t) => selectToken(state, c, t - 1),
  ArrowDown: (state, c, t) => selectToken(state, state.selected ? c + 1 : c, Math.max(0, t)),
  ArrowUp: (state, c, t) => selectToken(state, c - 1, Math.max(0, t)),
  Home: (state, c) => selectToken(state, c, 0),
  End: (state, c) => selectToken(state, c, Infinity),
  h: groups.selectNextQuantity,
  a: groups.toggleAligned,
  p: groups.selectNextFork,
};
const PAGE_KEYS = {
  "[": () => goToStep(-1),
  "]": () => goToStep(1),
  j: () => goToGroup(1),
  k: () => goToGroup(-1),
  l: changeLanguage,
  "?": showHelp,
};
Object.keys(VIEWS).forEach((view, i) => (PAGE_KEYS[i + 1] = () => (location.hash = getViewAddress(view))));

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const state = document.microscope, {key} = event;
  if (state && GROUP_KEYS[key]) GROUP_KEYS[key](state, state.selected?.c ?? 0, state.selected?.t ?? -1);
  else if (PAGE_KEYS[key]) PAGE_KEYS[key]();
  else return;
  event.preventDefault();
});

// Look for new steps. Only views of the whole run are drawn anew, so that what the user reads stays.
async function poll() {
  const live = document.getElementById("live");
  try {
    const runs = await listRuns();
    const pulses = await Promise.all(runs.map(async (_, i) => (await fetch(`data/${i}/pulse`)).text()));
    const pulse = pulses.join(), first = JSON.parse(pulses[0]);
    quiet = first.quiet ? {minutes: first.minutes} : null;
    if (live) live.textContent = await describeProgress();
    if (lastPulse && pulse !== lastPulse) {
      clearCache();
      const address = await parseAddress();
      if (["run", "why"].includes(address.view) && !address.first) await render();
      else await renderFrame(address);
    }
    lastPulse = pulse;
  } catch {
    if (live) live.textContent = say("offline");
  }
  setTimeout(poll, POLL_MS);
}

applyLanguage();
window.addEventListener("hashchange", render);
render();
if (isLive) poll();
