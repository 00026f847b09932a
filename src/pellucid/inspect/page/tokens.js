// A step's columns as tokens, each with all its numbers; log-probs are computed again from the differences.

const KINDS = {p: "prompt", s: "sampled", g: "given"};
const NUMBERS = [
  "entropy",
  "entropy_change",
  "ratio",
  "advantage",
  "weight",
  "importance",
  "push",
  "gradient",
  "bound",
  "change",
  "gap",
  "drift",
];

// The token of a row.
function tokenAt(step, row) {
  const number = name => (step[name] ? step[name][row] : null);
  const token = {row, kind: KINDS[step.kind[row]] ?? "", rule: step.rule[row] < 0 ? "" : step.rules[step.rule[row]]};
  for (const name of NUMBERS) token[name] = number(name);
  const before = (token.before = number("before"));
  token.after = less(before, token.change, 1) ?? number("after");
  token.sampler = less(before, token.gap, -1) ?? number("sampler");
  token.ref = less(before, token.drift, -1) ?? number("ref");
  [token.id, token.text] = step.vocabulary[step.token[row]];
  token.text ??= "";
  return token;
}

function less(value, difference, sign) {
  return value === null || difference === null ? null : value + sign * difference;
}

// The likeliest tokens of a row, [{id, text, logprob}], or null where they were not recorded.
export function topsAt(step, row, when) {
  const flat = step[`top_${when}`]?.[row];
  if (!flat) return null;
  return Array.from({length: flat.length / 2}, (_, i) => {
    const [id, text] = step.vocabulary[flat[2 * i]];
    return {id, text: text ?? "", logprob: flat[2 * i + 1]};
  });
}

// The sequences of a group, the prompt first, each with its tokens and their shares of the group's gradient.
export function groupOf(step, group) {
  const found = step.sequences.filter(each => each.group === group).map(each => ({...each, tokens: []}));
  let whole = 0;
  for (const sequence of found) {
    for (let row = sequence.start; row < sequence.end; row++) {
      const token = tokenAt(step, row);
      token.position = row - sequence.start;
      sequence.tokens.push(token);
      whole += token.gradient ?? 0;
    }
  }
  for (const {tokens} of found) {
    for (const token of tokens) token.share = token.gradient === null || !whole ? null : token.gradient / whole;
  }
  return found;
}

export function groupsOf(step) {
  return [...new Set(step.sequences.map(each => each.group))];
}

// How many tokens each answer shares with the sibling that it shares most with: there it parts from the others.
export function partings(answers) {
  return answers.map(one => Math.max(0, ...answers.filter(other => other !== one).map(other => shared(one, other))));
}

// Every place at which an answer parts from some sibling.
export function forks(answers) {
  return answers.map(
    one =>
      new Set(
        answers
          .filter(other => other !== one)
          .map(other => shared(one, other))
          .filter(n => n < one.tokens.length),
      ),
  );
}

function shared(one, other) {
  const most = Math.min(one.tokens.length, other.tokens.length);
  let n = 0;
  while (n < most && one.tokens[n].id === other.tokens[n].id) n++;
  return n;
}

// The answers of a group in the order of their tokens, so that those which share a beginning are neighbours; those that
// are the same token for token, with the same reward, are one, whose `same` are the numbers of all of them. Branches last.
export function listed(sequences) {
  const whole = sequences
    .filter(each => each.completion >= 0 && each.branch === 0)
    .sort((one, other) => {
      const n = shared(one, other);
      return (one.tokens[n]?.id ?? -1) - (other.tokens[n]?.id ?? -1) || one.completion - other.completion;
    });
  const found = [];
  for (const each of whole) {
    const last = found[found.length - 1];
    if (last && alike(last, each)) last.copies.push(each);
    else found.push({...each, copies: [each]});
  }
  return [...found, ...sequences.filter(each => each.branch > 0).map(each => ({...each, copies: [each]}))].map(folded);
}

// One answer for all that are alike; the share of its tokens is that of all copies.
function folded(answer) {
  const {copies} = answer;
  const tokens = answer.tokens.map((token, t) => ({
    ...token,
    copies: copies.length,
    share: total(copies.map(copy => copy.tokens[t].share)),
  }));
  return {...answer, tokens, same: copies.map(copy => copy.completion)};
}

function total(values) {
  const known = values.filter(value => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

// The sampled tokens of a group, those as one that follow on the same beginning in several `answers`: what was done to
// them is summed up, and what was measured is that of the first. `event` tells those which are one.
export function events(sequences) {
  const rows = new Map(listed(sequences).flatMap((each, c) => each.copies.map(copy => [copy.start, c])));
  const nodes = new Map();
  return sequences
    .filter(each => each.completion >= 0)
    .flatMap(each => {
      let event = each.branch ? `${each.completion}.${each.branch}` : "";
      return each.tokens.map(token => {
        const step = `${event}/${token.id}`;
        if (!nodes.has(step)) nodes.set(step, nodes.size);
        event = nodes.get(step);
        return {...token, event, c: rows.get(each.start)};
      });
    })
    .filter(token => token.kind === "sampled");
}

export function merged(tokens) {
  const found = new Map();
  for (const token of tokens) found.set(token.event, [...(found.get(token.event) ?? []), token]);
  return [...found.values()].map(same => {
    const [first] = same,
      one = name => (same.every(token => token[name] === first[name]) ? first[name] : null),
      known = name => same.find(token => token[name] !== null)?.[name] ?? null;
    return {
      ...first,
      answers: same.length,
      advantage: one("advantage"),
      rule: one("rule") ?? "",
      push: total(same.map(token => token.push)),
      gradient: total(same.map(token => token.gradient)),
      change: known("change"),
      gap: same.reduce((most, {gap}) => (Math.abs(gap ?? 0) > Math.abs(most ?? 0) ? gap : (most ?? gap)), null),
    };
  });
}

function alike(one, other) {
  const length = one.tokens.length;
  return length === other.tokens.length && shared(one, other) === length && one.reward === other.reward;
}
