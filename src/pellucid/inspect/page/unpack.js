// The tokens of a step out of the bytes that columns.py writes, as the server would answer them.

const NEW = 255,
  PER_THOUSAND = 1000;

// An answer deflated and in base64.
export async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

export function unpacked(buffer, vocabulary) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const parts = partsOf(header.parts, new Uint8Array(buffer, 4 + length));
  const {token, kind, rule} = parts;
  const rules = rule.values.filter(Boolean);
  const told = {
    vocabulary,
    token: token.codes,
    kind: kind.codes.map(place => kind.values[place][0] ?? "?"),
    rules,
    rule: rule.codes.map(place => rules.indexOf(rule.values[place])),
    sequences: sequencesOf(header.sequences),
  };
  for (const [name, part] of Object.entries(parts)) if (!told[name] && !name.startsWith("top_")) told[name] = numbers(part);
  return {...header, ...told, ...alternatives(parts, told, header.chosen)};
}

function partsOf(told, bytes) {
  let at = 0;
  const found = {};
  for (const {name, count, planes, ...about} of told) {
    const codes = Array(count).fill(0);
    for (let plane = 0; plane < planes; plane++) {
      for (let i = 0; i < count; i++) codes[i] += bytes[at++] * 256 ** plane;
    }
    found[name] = {codes, ...about};
  }
  return found;
}

function numbers({codes, values, unit, digits}) {
  if (values) return codes.map(place => values[place]);
  const size = code => rounded(unit * decoded(code >> 1, digits));
  return codes.map(code => (code ? (code & 1 ? 1 : -1) * size(code - 1) : null));
}

// The number, in units, of a code; see `codes` of columns.py.
function decoded(code, digits) {
  const power = Math.max(0, Math.floor((code - 10 ** (digits - 1)) / (9 * 10 ** (digits - 1))));
  return (code - power * 9 * 10 ** (digits - 1)) * 10 ** power;
}

function rounded(value) {
  return Number(value.toPrecision(7));
}

function sequencesOf(columns) {
  return columns.end.map((end, i) => ({
    ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])),
    start: i ? columns.end[i - 1] : 0,
  }));
}

// Of each row its likeliest tokens before and after the update: their words in turn with their log-probs.
function alternatives(parts, {token, before, change}, chosen) {
  if (!parts.top_before) return {top_before: null, top_after: null};
  const {digits} = parts.top_before_p,
    probability = code => Math.log(decoded(code, digits) / PER_THOUSAND);
  const next = Object.fromEntries(Object.entries(parts).map(([name, {codes}]) => [name, reader(codes)]));
  const known = row => (chosen && (change?.[row] ?? null) !== null ? before[row] : null);
  const rows = (name, one) => parts[`${name}_count`].codes.map((count, row) => (count ? repeat(count - 1, () => one(row)) : null));
  const first = rows("top_before", row => {
    const word = next.top_before();
    return {word, code: word || known(row) === null ? next.top_before_p() : 0};
  });
  const later = rows("top_after", row => {
    const place = next.top_after_place(),
      {word, code} = place === NEW ? {word: next.top_after(), code: 0} : first[row][place];
    return {word, code: word || known(row) === null ? code + unzigzag(next.top_after_p()) : 0};
  });
  const flat = (found, ofChosen) =>
    found.map(
      (list, row) =>
        list?.flatMap(({word, code}) =>
          word || known(row) === null
            ? [word ? word - 1 : token[row], probability(code)]
            : [token[row], ofChosen(row)],
        ) ?? null,
    );
  return {top_before: flat(first, known), top_after: flat(later, row => known(row) + change[row])};
}

function reader(codes) {
  let at = 0;
  return () => codes[at++];
}

function repeat(times, one) {
  return Array.from({length: times}, one);
}

function unzigzag(code) {
  return code % 2 ? -(code + 1) / 2 : code / 2;
}
