// The answers of run_reader.py by their keys: from the server of this page, or from the blocks in the page itself.

import {say} from "page/words.js";

const cache = new Map();
const MAX_CACHED = 60;
const blocks = new Map([...document.querySelectorAll("script[data-key]")].map(each => [each.dataset.key, each]));
export const isLive = blocks.size === 0;

export function get(key) {
  if (!cache.has(key)) {
    const answer = isLive ? fetchAnswer(key) : unpackBlock(key);
    answer.catch(() => cache.delete(key));
    cache.set(key, answer);
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }
  return cache.get(key);
}

// Forget the answers that a running run may have changed; the tokens of a step never change.
export function clearCache() {
  for (const key of cache.keys()) if (!key.includes("/tokens/")) cache.delete(key);
}

async function fetchAnswer(key) {
  const response = await fetch(`data/${key}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function unpackBlock(key) {
  if (!blocks.has(key)) return null;
  if (typeof DecompressionStream === "undefined") throw new Error(say("packed.old"));
  const bytes = Uint8Array.from(atob(blocks.get(key).textContent), char => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

export async function listRuns() {
  return isLive ? get("runs") : [...blocks.keys()].filter(key => key.endsWith("/overview"));
}

export async function getOverview(run = 0) {
  return get(`${run}/overview`);
}

// The steps that can be shown: those whose tokens are recorded, or all if there are none.
export async function listSteps() {
  const {recorded, steps} = await getOverview();
  return recorded.length ? recorded : steps;
}

export function findNearest(steps, step) {
  return steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best), steps[0]);
}

export async function getSummary(step, run = 0) {
  const {per_page: size} = await getOverview(run);
  const page = await get(`${run}/summaries/${Math.floor(step / size)}`);
  return (page ?? []).find(each => each.step === step) ?? null;
}

// The recorded tokens of a step; null if there are none.
export async function getTokens(step, run = 0) {
  const {recorded} = await getOverview(run);
  return recorded.includes(step) ? get(`${run}/tokens/${step}`) : null;
}
