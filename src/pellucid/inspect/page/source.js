// The answers of `reading.py` by their keys: from the server that served this page, or out of the page itself.

import {say} from "page/words.js";

const kept = new Map();
const MOST_KEPT = 60;
const blocks = new Map([...document.querySelectorAll("script[data-key]")].map(each => [each.dataset.key, each]));
export const isLive = blocks.size === 0;

export function get(key) {
  if (!kept.has(key)) {
    const answer = isLive ? asked(key) : held(key);
    answer.catch(() => kept.delete(key));
    kept.set(key, answer);
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  return kept.get(key);
}

// What a running run may have changed; the tokens of a step are whole from the first.
export function forget() {
  for (const key of kept.keys()) if (!key.includes("/tokens/")) kept.delete(key);
}

async function asked(key) {
  const response = await fetch(`data/${key}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function held(key) {
  if (!blocks.has(key)) return null;
  if (typeof DecompressionStream === "undefined") throw new Error(say("packed.old"));
  const bytes = Uint8Array.from(atob(blocks.get(key).textContent), char => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

export function runsThere() {
  if (isLive) return get("runs");
  return Promise.resolve([...blocks.keys()].filter(key => key.endsWith("/overview")));
}

export async function overview(run = 0) {
  return get(`${run}/overview`);
}

export async function summary(step, run = 0) {
  const {per_page: size} = await overview(run);
  const page = await get(`${run}/summaries/${Math.floor(step / size)}`);
  return (page ?? []).find(each => each.step === step) ?? null;
}

// A step's recorded tokens; null where there are none.
export async function tokens(step, run = 0) {
  const {recorded} = await overview(run);
  return recorded.includes(step) ? get(`${run}/tokens/${step}`) : null;
}
