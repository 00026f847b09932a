// The sentences of the page, and its language: the one that was chosen last, or at first that of the browser.

export const WORDS = JSON.parse(document.getElementById("words").textContent);
const KEPT = "pellucid.language";
let language = (kept() ?? navigator.language).toLowerCase().startsWith("zh") ? 1 : 0;

// A browser may refuse to store anything for a page, above all for one from disk.
function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

export function say(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll("{" + name + "}", () => value),
    (WORDS[key] ?? [key, key])[language],
  );
}

// What there is of these, with commas between.
export function listing(parts) {
  return parts.filter(part => part !== null).join(language ? "，" : ", ");
}

export function ended(sentence) {
  return language ? `${sentence}。` : `${sentence}. `;
}

// Translate the fixed words in a picture of charts.py: titles, labels and tooltips.
export function translated(svg) {
  const texts = document.createTreeWalker(svg, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode,
      [, label, point] = node.data.match(/^([^,]+), step (.*)$/s) ?? [],
      [, word, rest] = node.data.match(/^(\D*?)(\s\d.*|\s*)$/s) ?? [];
    if (WORDS[`chart.${label}`]) node.data = listing([say(`chart.${label}`), `${say("chart.step")} ${point}`]);
    else if (WORDS[`chart.${word}`]) node.data = say(`chart.${word}`) + rest;
  }
  return svg;
}

export function spoken() {
  return language ? "zh" : "en";
}

export function speak(name) {
  language = name === "zh" ? 1 : 0;
  document.documentElement.lang = spoken();
}

export function keep(name) {
  speak(name);
  try {
    localStorage.setItem(KEPT, name);
  } catch {
    return;
  }
}
