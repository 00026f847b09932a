// A group: its answers side by side or aligned, coloured by a quantity; a token chosen shows all its numbers.

import {el, figure, link} from "page/dom.js";
import {ended, listing, say} from "page/words.js";
import {overview, summary, tokens} from "page/source.js";
import {QUANTITIES, colours, legend, paint, strongest} from "page/colours.js";
import {forks, groupOf, groupsOf, listed, partings} from "page/tokens.js";
import {panel} from "page/panel.js";
import {elsewhere, missing} from "page/step.js";

const MOST_TOKENS = 1500,
  MOST_CHARACTERS = 400,
  MOST_COLUMNS = 300;
const look = {by: "change", aligned: false};

export async function groupView({step, group, c, t}) {
  const data = await tokens(step),
    heading = el("h1", {}, say("group.title", {step, group}));
  const sequences = data ? groupOf(data, group) : [];
  if (!sequences.length) return [heading, await instead(step, data)];
  const found = (await summary(step))?.groups.find(each => each.group === group);
  const side = el("aside", {class: "panel", "aria-live": "polite"}, el("p", {class: "soft"}, say("group.choose")));
  const board = el("div", {class: "board"});
  const order = listed(sequences),
    all = [...sequences.filter(each => each.completion < 0), ...order].flatMap(each => each.tokens);
  const usable = Object.keys(QUANTITIES).filter(name => colours(all, name));
  const by = usable.includes(look.by) ? look.by : (usable[0] ?? look.by);
  const state = {data, sequences, step, group, side, board, order, all, usable, by, chosen: null};
  draw(state);
  if (t !== undefined) queueMicrotask(() => choose(state, Number(c), Number(t)));
  const drawn = [
    el("p", {class: "eyebrow"}, link(say("step.title", {step}), `#/step/${step}`)),
    heading,
    el(
      "p",
      {class: "soft"},
      found ? ended(say(`signal.${found.signal}`)) : "",
      found ? link(say("group.history"), `#/question/${found.question}`) : "",
    ),
    silent(data, group),
    controls(state),
    el("div", {class: "split"}, board, side),
  ];
  return Object.assign(drawn, {state}); // keys act on it once it is shown
}

// Answers without a token have nothing to show: they are said.
function silent({about}, group) {
  const without = about.silent?.[group] ?? [];
  return without.length ? el("p", {class: "warn"}, say("group.silent", {n: listing(without)})) : null;
}

async function instead(step, data) {
  if (!data) return el("div", {}, el("p", {class: "lede"}, say(missing("movers.none"), {step})), await elsewhere(step, "group"));
  const links = groupsOf(data).map(j =>
    el("li", {}, link(say("group.title", {step, group: j}), `#/group/${step}/${j}`)),
  );
  return el("div", {}, el("p", {class: "lede"}, say("group.unrecorded")), el("ul", {}, links));
}

function controls(state) {
  const by = el(
    "select",
    {
      id: "by",
      onchange: event => {
        look.by = state.by = event.target.value;
        repaint(state);
      },
    },
    Object.keys(QUANTITIES).map(name =>
      el("option", {value: name, selected: name === state.by, disabled: !state.usable.includes(name)}, say(`by.${name}`)),
    ),
  );
  const way = el(
    "button",
    {id: "aligned", "aria-pressed": String(look.aligned), onclick: () => realign(state)},
    say("group.rows"),
  );
  state.toggle = () => realign(state);
  return el(
    "p",
    {class: "controls"},
    el("label", {}, `${say("group.heat")} `, by),
    way,
    legend(state.all, state.by, state.most),
    el("span", {class: "soft"}, say("group.parts")),
  );
}

function realign(state) {
  look.aligned = !look.aligned;
  document.getElementById("aligned").setAttribute("aria-pressed", String(look.aligned));
  draw(state);
  if (state.chosen) choose(state, state.chosen.c, state.chosen.t);
}

function draw(state) {
  const prompts = state.sequences.filter(each => each.completion < 0);
  const answers = state.order.filter(each => each.branch === 0),
    branches = state.order.filter(each => each.branch > 0);
  state.nodes = new Map();
  state.most = strongest(state.all, state.by);
  const apart = partings(answers),
    marked = forks(answers);
  state.forks = marked;
  const boxes = answers.map((each, i) => answer(state, each, apart[i], marked[i]));
  boxes.push(...branches.map(each => answer(state, each, 0, new Set())));
  state.board.className = `board ${look.aligned ? "rows" : "cards"}${state.by === "rule" ? " by-rule" : ""}`;
  state.board.replaceChildren(
    ...prompts.map(each =>
      el("details", {class: "asked", open: true}, el("summary", {}, say("prompt")), flow(state, each, 0, new Set())),
    ),
    el("div", {class: "answers"}, boxes),
  );
}

function repaint(state) {
  state.most = strongest(state.all, state.by);
  for (const [token, node] of state.nodes) paint(node, token, state.by, state.most);
  state.board.classList.toggle("by-rule", state.by === "rule");
  document.querySelector(".legend")?.replaceWith(legend(state.all, state.by, state.most));
}

export function nextQuantity(state) {
  const names = state.usable;
  if (!names.length) return;
  look.by = state.by = names[(names.indexOf(state.by) + 1) % names.length];
  document.getElementById("by").value = state.by;
  repaint(state);
}

function answer(state, sequence, apart, marked) {
  const verdict = sequence.correct === null ? "" : say(sequence.correct ? "right" : "wrong");
  const reward = sequence.reward === null ? say("reward.failed") : say("reward", {value: figure(sequence.reward)});
  const advantage = sequence.tokens.find(token => token.advantage !== null)?.advantage;
  const told = listing([
    reward,
    verdict || null,
    sequence.finished ? null : say("cut"),
    say("tokens", {n: sequence.tokens.length}),
    advantage === undefined ? null : say("advantage", {value: figure(advantage)}),
  ]);
  const {same} = sequence,
    several = same.length > 1;
  const name = listing([
    say(several ? "answers" : "answer", {n: listing(same), times: same.length}),
    sequence.branch ? say("branch", {n: sequence.branch}) : null,
  ]);
  return el(
    "article",
    {class: `answer ${sequence.correct === null ? "" : sequence.correct ? "right" : "wrong"}`},
    el("p", {}, el("b", {}, name), ` ${told}`),
    sequence.error ? el("p", {class: "warn"}, sequence.error.slice(0, 500)) : null,
    flow(state, sequence, apart, marked, listing([name, told])),
  );
}

// The tokens of a sequence, the first ones; the others when they are asked for.
function flow(state, sequence, apart, marked, label = say("prompt")) {
  const most = look.aligned ? MOST_COLUMNS : MOST_TOKENS;
  const box = el("div", {class: "flow", role: "listbox", "aria-label": label, dir: "auto"});
  const talks = sequence.tokens.some(each => each.kind === "given");
  const names = [...(state.data.about.turns?.[turnsOf(sequence)] ?? [])];
  let shown = 0,
    turn = null;
  const more = upto => {
    box.querySelector("button")?.remove();
    for (; shown < Math.min(upto, sequence.tokens.length); shown++) {
      const token = sequence.tokens[shown];
      if (talks && token.kind !== turn && token.kind !== "prompt") {
        turn = token.kind;
        box.append(el("span", {class: `turn ${turn}`}, titleOf(turn, names.shift() ?? [])));
      }
      box.append(cell(state, sequence, token, shown < apart, marked.has(shown)));
    }
    const rest = sequence.tokens.length - shown;
    if (rest)
      box.append(
        el("button", {class: "more", onclick: () => more(shown + most)}, say("group.more", {n: Math.min(rest, most)})),
      );
  };
  more(most);
  return box;
}

function turnsOf({group, completion, branch}) {
  return `${group}/${completion}/${branch}`;
}

// Who spoke: the policy, with the tools that it called, or others, each by name.
function titleOf(turn, names) {
  if (!names.length) return say(`turn.${turn}`);
  return turn === "sampled" ? say("turn.calls", {names: listing(names)}) : say("turn.from", {names: listing(names)});
}

function cell(state, sequence, token, shared, fork) {
  const classes = ["tok", token.kind, shared ? "shared" : "", fork ? "fork" : "", token.rule ? "taken" : ""].filter(
    Boolean,
  );
  const node = el(
    "span",
    {
      class: classes.join(" "),
      role: "option",
      tabindex: "-1",
      "aria-selected": "false",
      onclick: () => choose(state, state.order.indexOf(sequence), token.position, true),
    },
    token.text.slice(0, MOST_CHARACTERS) || "∅",
  );
  if (token.text.includes("\n")) node.classList.add("line");
  if (token.text.length > MOST_CHARACTERS) {
    node.append(
      el(
        "button",
        {
          class: "more",
          onclick: event => {
            event.stopPropagation();
            node.textContent = "";
            node.append(el("span", {}, token.text));
          },
        },
        say("group.all", {n: token.text.length}),
      ),
    );
  }
  paint(node, token, state.by, state.most);
  state.nodes.set(token, node);
  return node;
}

// Choose a token of an answer, both by number, as far as there are some.
export function choose(state, c, t, scroll = false) {
  const row = Math.max(0, Math.min(state.order.length - 1, c)),
    sequence = state.order[row];
  if (!sequence?.tokens.length) return;
  const place = Math.max(0, Math.min(sequence.tokens.length - 1, t)),
    token = sequence.tokens[place];
  const before = state.chosen && state.nodes.get(state.chosen.token);
  before?.setAttribute("aria-selected", "false");
  before?.setAttribute("tabindex", "-1");
  state.chosen = {c: row, t: place, token};
  const node = state.nodes.get(token);
  node?.setAttribute("aria-selected", "true");
  node?.setAttribute("tabindex", "0");
  node?.focus({preventScroll: scroll});
  state.side.replaceChildren(...panel(state.data, token));
  history.replaceState(null, "", `#/group/${state.step}/${state.group}?c=${row}&t=${place}`);
}

export function nextFork(state) {
  const {c, t} = state.chosen ?? {c: 0, t: -1};
  const later = [...(state.forks[c] ?? [])].sort((a, b) => a - b).find(place => place > t);
  if (later !== undefined) return choose(state, c, later);
  const next = state.forks.findIndex((forks, other) => other > c && forks.size);
  if (next >= 0) choose(state, next, Math.min(...state.forks[next]));
}

// The recorded groups of a step, most taught first; keys go from one to the next.
export async function neighbours(step) {
  const {groups} = (await summary(step)) ?? {groups: []};
  return groups
    .filter(group => group.recorded)
    .sort((a, b) => (b.gradient ?? 0) - (a.gradient ?? 0))
    .map(group => group.group);
}

export async function nearestStep(step, way) {
  const {recorded, steps} = await overview();
  const there = recorded.length ? recorded : steps;
  return way > 0 ? there.find(other => other > step) : there.findLast(other => other < step);
}
