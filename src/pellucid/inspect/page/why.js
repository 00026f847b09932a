// Why nothing happens: a plain sentence for each cause that the run's numbers show.

import {el, link} from "page/dom.js";
import {say} from "page/words.js";
import {get} from "page/source.js";

export async function whyView() {
  const found = await get("0/why"),
    title = el("h1", {}, say("view.why"));
  const none = found.every(each => each.level === "fine");
  return [
    title,
    found.length ? el("p", {class: "soft"}, say("why.about", found[0].values)) : null,
    none ? el("p", {class: "lede"}, say("why.nothing")) : null,
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
