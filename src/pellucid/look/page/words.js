// The language of the page: that of the browser, until another is chosen.

let language = navigator.language.toLowerCase().startsWith("zh") ? 1 : 0;

export function say(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll("{" + name + "}", () => value),
    (WORDS[key] ?? [key, key])[language],
  );
}

export function spoken() {
  return language ? "zh" : "en";
}

export function speak(name) {
  language = name === "zh" ? 1 : 0;
  document.documentElement.lang = spoken();
}
