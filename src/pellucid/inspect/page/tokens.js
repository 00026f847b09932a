// A step's columns as tokens, each with all its numbers; log-probs are computed again from the differences.

const KINDS = {p: "prompt", s: "sampled", g: "given"};
const NUMBERS = [
  "entropy", "entropy_change", "ratio", "advantage", "weight", "importance", "push", "gradient", "bound",
  "before", "change", "gap", "drift",
];

function buildToken(step, row, position) {
  const getNumber = name => (step[name] ? step[name][row] : null);
  const token = {row, position, kind: KINDS[step.kind[row]] ?? "", rule: step.rules[step.rule[row]] ?? ""};
  for (const name of NUMBERS) token[name] = getNumber(name);
  const {before, change, gap, drift} = token;
  token.after = before === null || change === null ? getNumber("after") : before + change;
  token.sampler = before === null || gap === null ? getNumber("sampler") : before - gap;
  token.ref = before === null || drift === null ? getNumber("ref") : before - drift;
  const [id, text] = step.vocabulary[step.token[row]];
  return {...token, id, text: text ?? ""};
}

// The likeliest tokens of a row, [{id, text, logprob}], or null where they were not recorded.
export function getAlternatives(step, row, when) {
  const flat = step[`top_${when}`]?.[row];
  if (!flat) return null;
  return Array.from({length: flat.length / 2}, (_, i) => {
    const [id, text] = step.vocabulary[flat[2 * i]];
    return {id, text: text ?? "", logprob: flat[2 * i + 1]};
  });
}

export function listGroups(step) {
  return [...new Set(step.sequences.map(each => each.group))];
}

// The sequences of a group, the prompt first, each with its tokens and their shares of the group's gradient.
export function getSequences(step, group) {
  const sequences = step.sequences.filter(each => each.group === group).map(each => ({
    ...each,
    tokens: Array.from({length: each.end - each.start}, (_, i) => buildToken(step, each.start + i, i)),
  }));
  const tokens = sequences.flatMap(each => each.tokens);
  const total = sumKnown(tokens.map(token => token.gradient));
  for (const token of tokens) token.share = token.gradient === null || !total ? null : token.gradient / total;
  return sequences;
}

export function isAnswer(sequence) {
  return sequence.completion >= 0 && sequence.branch === 0;
}

// For each answer, the lengths of the beginnings that it shares with its siblings.
export function compareAnswers(answers) {
  return answers.map(one => answers.filter(other => other !== one).map(other => countShared(one, other)));
}

function countShared(one, other) {
  const length = Math.min(one.tokens.length, other.tokens.length);
  let n = 0;
  while (n < length && one.tokens[n].id === other.tokens[n].id) n++;
  return n;
}

function areEqual(one, other) {
  const length = one.tokens.length;
  return length === other.tokens.length && countShared(one, other) === length && one.reward === other.reward;
}

// The answers of a group in the order of their tokens, so that those which share a beginning are neighbors, and then
// the branches. Answers that have the same tokens and the same reward are one, with all of them as its `copies`.
export function orderAnswers(sequences) {
  const merged = [];
  const answers = sequences.filter(isAnswer).sort((one, other) => {
    const n = countShared(one, other);
    return (one.tokens[n]?.id ?? -1) - (other.tokens[n]?.id ?? -1) || one.completion - other.completion;
  });
  for (const answer of answers) {
    const last = merged.at(-1);
    if (last && areEqual(last, answer)) last.copies.push(answer);
    else merged.push({...answer, copies: [answer]});
  }
  const branches = sequences.filter(each => each.branch > 0).map(each => ({...each, copies: [each]}));
  return [...merged, ...branches].map(answer => ({...answer, tokens: mergeCopies(answer)}));
}

// The tokens of an answer with the shares of all its copies.
function mergeCopies({tokens, copies}) {
  return tokens.map((token, t) => ({
    ...token,
    copies: copies.length,
    share: sumKnown(copies.map(copy => copy.tokens[t].share)),
  }));
}

function sumKnown(values) {
  const known = values.filter(value => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

// The sampled tokens of a group, each with the index `c` of its answer. Those that follow on the same beginning in
// several answers have the same `event`.
export function listSampled(sequences) {
  const indices = new Map(orderAnswers(sequences).flatMap(({copies}, c) => copies.map(copy => [copy.start, c])));
  const events = new Map();
  const numberTokens = ({tokens, completion, branch, start}) => {
    let event = branch ? `${completion}.${branch}` : "";
    return tokens.map(token => {
      const key = `${event}/${token.id}`;
      if (!events.has(key)) events.set(key, events.size);
      event = events.get(key);
      return {...token, event, c: indices.get(start)};
    });
  };
  const tokens = sequences.filter(each => each.completion >= 0).flatMap(numberTokens);
  return tokens.filter(token => token.kind === "sampled");
}

// Merge the tokens of each event: what was done to them is summed up, and what was measured is that of the first.
export function mergeEvents(tokens) {
  const events = new Map();
  for (const token of tokens) events.set(token.event, [...(events.get(token.event) ?? []), token]);
  return [...events.values()].map(same => {
    const [first] = same;
    const isShared = name => same.every(token => token[name] === first[name]);
    return {
      ...first,
      answers: same.length,
      advantage: isShared("advantage") ? first.advantage : null,
      rule: isShared("rule") ? first.rule : "",
      push: sumKnown(same.map(token => token.push)),
      gradient: sumKnown(same.map(token => token.gradient)),
      change: same.find(token => token.change !== null)?.change ?? null,
      gap: same.reduce((max, {gap}) => (Math.abs(gap ?? 0) > Math.abs(max ?? 0) ? gap : (max ?? gap)), null),
    };
  });
}
