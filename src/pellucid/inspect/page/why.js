// Why nothing happens: a plain sentence for each cause that the run's numbers show.

import {el, link} from "page/dom.js";
import {say} from "page/words.js";
import {get} from "page/source.js";

export async function renderWhy() {
  const findings = await get("0/why");
  return [
    el("h1", say("view.why")),
    findings.length ? el("p.soft", say("why.about", findings[0].values)) : null,
    findings.every(each => each.level === "fine") ? el("p.lede", say("why.nothing")) : null,
    ...findings.map(({key, level, step, values}) =>
      el(
        `article.finding.${level}`,
        el("p.eyebrow", say(`why.${level}`)),
        el("p.sentence", say(`why.${key}`, values)),
        step ? el("p", link(say("why.see", {step}), `#/step/${step}`)) : null,
      ),
    ),
  ];
}
