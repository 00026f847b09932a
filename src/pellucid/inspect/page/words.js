// The sentences of the page, and its language: the one that was chosen last, or at first that of the browser.

export const WORDS = JSON.parse(document.getElementById("words").textContent);
const STORAGE_KEY = "pellucid.language";
let language = (loadLanguage() ?? navigator.language).toLowerCase().startsWith("zh") ? 1 : 0;

// A browser may refuse to store anything for a page, above all for one from disk.
function loadLanguage() {
  try {
    return localStorage.getItem(STORAGE_KEY);
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

// The texts that are not null, with commas between.
export function joinList(texts) {
  return texts.filter(text => text !== null).join(language ? "，" : ", ");
}

export function endSentence(text) {
  return language ? `${text}。` : `${text}. `;
}

// Translate the fixed words in a picture of charts.py: titles, labels and tooltips.
export function translateSvg(svg) {
  const texts = document.createTreeWalker(svg, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const [, label, point] = node.data.match(/^([^,]+), step (.*)$/s) ?? [];
    const [, word, rest] = node.data.match(/^(\D*?)(\s\d.*|\s*)$/s) ?? [];
    if (WORDS[`chart.${label}`]) node.data = joinList([say(`chart.${label}`), `${say("chart.step")} ${point}`]);
    else if (WORDS[`chart.${word}`]) node.data = say(`chart.${word}`) + rest;
  }
  return svg;
}

export function applyLanguage() {
  document.documentElement.lang = language ? "zh" : "en";
}

export function switchLanguage() {
  language = 1 - language;
  applyLanguage();
  try {
    localStorage.setItem(STORAGE_KEY, document.documentElement.lang);
  } catch {
    return;
  }
}
