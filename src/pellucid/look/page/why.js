// Why nothing happens: a plain sentence for each cause that the run's numbers show.

import {el, link} from "./dom.js";
import {say} from "./words.js";
import {get} from "./source.js";

export async function whyView() {
  const found = await get("0/why"),
    title = el("h1", {}, say("view.why"));
  const trouble = found.some(each => each.level === "trouble");
  return [
    title,
    found.length ? el("p", {class: "soft"}, say("why.about", found[0].values)) : null,
    trouble ? null : el("p", {class: "lede"}, say("why.nothing")),
    ...found.map(({key, level, step, values}) =>
      el(
        "article",
        {class: `finding ${level}`},
        el("p", {class: "eyebrow"}, say(`why.${level}`)),
        el("p", {class: "sentence"}, say(`why.${key}`, values)),
        step ? el("p", {}, link(say("why.see", {step}), `#/step/${step}`)) : null,
      ),
    ),
  ];
}
