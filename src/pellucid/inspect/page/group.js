// A group: its answers side by side or aligned, colored by a quantity; a selected token shows all its numbers.

import {el, formatNumber, link} from "page/dom.js";
import {endSentence, joinList, say} from "page/words.js";
import {getSummary, getTokens, listSteps} from "page/source.js";
import {QUANTITIES, buildLegend, colorToken, computeMax} from "page/colors.js";
import {compareAnswers, getSequences, isAnswer, listGroups, orderAnswers} from "page/tokens.js";
import {buildPanel} from "page/panel.js";
import {renderMissing} from "page/step.js";

const MAX_TOKENS = 1500, MAX_CHARACTERS = 400, MAX_COLUMNS = 300;
const choices = {by: "change", isAligned: false};

export async function renderGroup({step, group, c, t}) {
  const data = await getTokens(step), heading = el("h1", say("group.title", {step, group}));
  if (!data) return [heading, ...(await renderMissing("movers.none", step, "group"))];
  const sequences = getSequences(data, group);
  if (!sequences.length) return [heading, ...renderRecordedGroups(step, data)];
  const summary = (await getSummary(step))?.groups.find(each => each.group === group);
  const prompts = sequences.filter(each => each.completion < 0), answers = orderAnswers(sequences);
  const tokens = [...prompts, ...answers].flatMap(each => each.tokens);
  const usable = Object.keys(QUANTITIES).filter(name => tokens.some(token => QUANTITIES[name].get(token)));
  const state = {
    data,
    step,
    group,
    prompts,
    answers,
    tokens,
    usable,
    selected: null,
    by: usable.includes(choices.by) ? choices.by : (usable[0] ?? choices.by),
    panel: el("aside.panel", {"aria-live": "polite"}, el("p.soft", say("group.choose"))),
    board: el("div.board"),
  };
  drawBoard(state);
  if (t !== undefined) queueMicrotask(() => selectToken(state, Number(c), Number(t)));
  const silent = data.about.silent?.[group] ?? []; // answers without a token have nothing to show
  const view = [
    el("p.eyebrow", link(say("step.title", {step}), `#/step/${step}`)),
    heading,
    el(
      "p.soft",
      summary ? endSentence(say(`signal.${summary.signal}`)) : null,
      summary ? link(say("group.history"), `#/question/${summary.question}`) : null,
    ),
    silent.length ? el("p.warn", say("group.silent", {n: joinList(silent)})) : null,
    buildControls(state),
    el("div.split", state.board, state.panel),
  ];
  return Object.assign(view, {state}); // keys act on it once it is shown
}

function renderRecordedGroups(step, data) {
  const links = listGroups(data).map(group => link(say("group.title", {step, group}), `#/group/${step}/${group}`));
  return [el("p.lede", say("group.unrecorded")), el("ul", links.map(each => el("li", each)))];
}

function buildControls(state) {
  const options = Object.keys(QUANTITIES).map(value =>
    el("option", {value, selected: value === state.by, disabled: !state.usable.includes(value)}, say(`by.${value}`)),
  );
  const select = el("select", {id: "by", onchange: event => setQuantity(state, event.target.value)}, options);
  const pressed = String(choices.isAligned);
  return el(
    "p.controls",
    el("label", `${say("group.heat")} `, select),
    el("button", {id: "aligned", "aria-pressed": pressed, onclick: () => toggleAligned(state)}, say("group.rows")),
    buildLegend(state.tokens, state.by, state.max),
    el("span.soft", say("group.parts")),
  );
}

export function toggleAligned(state) {
  choices.isAligned = !choices.isAligned;
  document.getElementById("aligned").setAttribute("aria-pressed", String(choices.isAligned));
  drawBoard(state);
  const {c, t, token} = state.selected ?? {};
  if (token) showToken(state, c, t, token);
}

function drawBoard(state) {
  state.nodes = new Map();
  state.max = computeMax(state.tokens, state.by);
  const lengths = compareAnswers(state.answers.filter(isAnswer));
  // The positions at which an answer parts from a sibling.
  state.forks = lengths.map((shared, i) => new Set(shared.filter(n => n < state.answers[i].tokens.length)));
  const boxes = state.answers.map((answer, i) =>
    buildAnswer(state, answer, Math.max(0, ...(lengths[i] ?? [])), state.forks[i] ?? new Set()),
  );
  const prompts = state.prompts.map(prompt =>
    el("details", {open: true}, el("summary", say("prompt")), buildFlow(state, prompt, say("prompt"))),
  );
  const layout = choices.isAligned ? "rows" : "cards";
  state.board.className = `board ${layout}${state.by === "rule" ? " by-rule" : ""}`;
  state.board.replaceChildren(...prompts, el("div.answers", boxes));
}

function setQuantity(state, name) {
  choices.by = state.by = document.getElementById("by").value = name;
  state.max = computeMax(state.tokens, name);
  for (const [token, node] of state.nodes) colorToken(node, token, name, state.max);
  state.board.classList.toggle("by-rule", name === "rule");
  document.querySelector(".legend")?.replaceWith(buildLegend(state.tokens, name, state.max));
}

export function selectNextQuantity(state) {
  const {usable, by} = state;
  if (usable.length) setQuantity(state, usable[(usable.indexOf(by) + 1) % usable.length]);
}

function buildAnswer(state, answer, sharedLength, forks) {
  const {tokens, copies, branch, correct, reward, finished, error} = answer;
  const advantage = tokens.find(token => token.advantage !== null)?.advantage;
  const verdict = correct === null ? null : correct ? "right" : "wrong";
  const about = joinList([
    reward === null ? say("reward.failed") : say("reward", {value: formatNumber(reward)}),
    verdict && say(verdict),
    finished ? null : say("cut"),
    say("tokens", {n: tokens.length}),
    advantage === undefined ? null : say("advantage", {value: formatNumber(advantage)}),
  ]);
  const numbers = {n: joinList(copies.map(copy => copy.completion)), times: copies.length};
  const name = joinList([
    say(copies.length > 1 ? "answers" : "answer", numbers),
    branch ? say("branch", {n: branch}) : null,
  ]);
  return el(
    "article",
    {class: `answer ${verdict ?? ""}`},
    el("p", el("b", name), ` ${about}`),
    error ? el("p.warn", error.slice(0, 500)) : null,
    buildFlow(state, answer, joinList([name, about]), sharedLength, forks),
  );
}

// The tokens of a sequence, the first ones; the others when they are asked for.
function buildFlow(state, sequence, label, sharedLength = 0, forks = new Set()) {
  const {tokens, group, completion, branch} = sequence;
  const flow = el("div.flow", {role: "listbox", "aria-label": label, dir: "auto"});
  const hasTurns = tokens.some(each => each.kind === "given"), page = choices.isAligned ? MAX_COLUMNS : MAX_TOKENS;
  const names = [...(state.data.about.turns?.[`${group}/${completion}/${branch}`] ?? [])];
  let shown = 0, turn = null;
  const showMore = () => {
    flow.querySelector(":scope > button")?.remove();
    for (const end = Math.min(shown + page, tokens.length); shown < end; shown++) {
      const token = tokens[shown];
      if (hasTurns && token.kind !== turn && token.kind !== "prompt") {
        turn = token.kind;
        flow.append(el(`span.turn.${turn}`, describeTurn(turn, names.shift() ?? [])));
      }
      flow.append(buildToken(state, sequence, token, shown < sharedLength, forks.has(shown)));
    }
    const n = Math.min(tokens.length - shown, page);
    if (n) flow.append(el("button.more", {onclick: showMore}, say("group.more", {n})));
  };
  showMore();
  return flow;
}

// Who spoke: the policy, with the tools that it called, or others, each by name.
function describeTurn(turn, names) {
  if (!names.length) return say(`turn.${turn}`);
  return turn === "sampled" ? say("turn.calls", {names: joinList(names)}) : say("turn.from", {names: joinList(names)});
}

function buildToken(state, sequence, token, isShared, isFork) {
  const {text, kind, rule, position} = token;
  const classes = {shared: isShared, fork: isFork, untrained: rule, line: text.includes("\n")};
  const names = ["tok", kind, ...Object.keys(classes).filter(name => classes[name])].join(" ");
  const c = state.answers.indexOf(sequence);
  const onclick = () => (c < 0 ? showToken(state, 0, -1, token, true) : selectToken(state, c, position, true));
  const attributes = {class: names, role: "option", tabindex: "-1", "aria-selected": "false", onclick};
  const node = el("span", attributes, text.slice(0, MAX_CHARACTERS) || "∅");
  if (text.length > MAX_CHARACTERS) {
    const showAll = event => {
      event.stopPropagation();
      node.replaceChildren(el("span", text));
    };
    node.append(el("button.more", {onclick: showAll}, say("group.all", {n: text.length})));
  }
  colorToken(node, token, state.by, state.max);
  state.nodes.set(token, node);
  return node;
}

// Select a token of an answer, both by number, or the nearest that there is.
export function selectToken(state, answer, position, preventScroll = false) {
  const c = Math.max(0, Math.min(state.answers.length - 1, answer)), tokens = state.answers[c]?.tokens;
  if (!tokens?.length) return;
  const t = Math.max(0, Math.min(tokens.length - 1, position));
  showToken(state, c, t, tokens[t], preventScroll);
  history.replaceState(null, "", `#/group/${state.step}/${state.group}?c=${c}&t=${t}`);
}

// Show the numbers of a token; keys go on from token `t` of answer `c`.
function showToken(state, c, t, token, preventScroll) {
  markSelected(state.nodes.get(state.selected?.token), false);
  state.selected = {c, t, token};
  const node = state.nodes.get(token);
  markSelected(node, true);
  node?.focus({preventScroll});
  state.panel.replaceChildren(...buildPanel(state.data, token));
}

function markSelected(node, isSelected) {
  node?.setAttribute("aria-selected", String(isSelected));
  node?.setAttribute("tabindex", isSelected ? "0" : "-1");
}

export function selectNextFork(state) {
  const {c, t} = state.selected ?? {c: 0, t: -1};
  const later = [...(state.forks[c] ?? [])].filter(position => position > t);
  if (later.length) return selectToken(state, c, Math.min(...later));
  const next = state.forks.findIndex((forks, i) => i > c && forks.size);
  if (next >= 0) selectToken(state, next, Math.min(...state.forks[next]));
}

// The recorded groups of a step, most taught first; keys go from one to the next.
export async function listRecordedGroups(step) {
  const recorded = ((await getSummary(step))?.groups ?? []).filter(group => group.recorded);
  return recorded.sort((a, b) => (b.gradient ?? 0) - (a.gradient ?? 0)).map(group => group.group);
}

export async function findNextStep(step, direction) {
  const steps = await listSteps();
  return direction > 0 ? steps.find(other => other > step) : steps.findLast(other => other < step);
}
