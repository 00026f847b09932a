"""The page as one HTML text: modules, words and styles joined in place, under a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from string import Template

from pellucid.look.words import PAGE
from pellucid.reporting.charts import PAGE_CSS

MODULES = (
    "dom.js",
    "words.js",
    "unpack.js",
    "source.js",
    "colours.js",
    "tokens.js",
    "sentence.js",
    "panel.js",
    "run.js",
    "step.js",
    "group.js",
    "movers.js",
    "question.js",
    "pair.js",
    "why.js",
    "app.js",
)
"""Each imports from those before it."""
STYLES = ("look.css", "tokens.css")
IMPORT = re.compile(r"^import\b.*?;\n", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def page(blocks: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The page, and its Content-Security-Policy. blocks: packed data by key; none for a page that asks its server."""
    script, style = joined(), PAGE_CSS + "".join(beside(name) for name in STYLES)
    data = "".join(
        f'<script type="text/plain" data-key="{key}">{text}</script>\n' for key, text in (blocks or {}).items()
    )
    rules = policy(script, style, live=blocks is None)
    html = Template(beside("index.html")).substitute(policy=rules, style=style, script=script, data=data)
    return html, rules


def joined() -> str:
    """All modules as one script that gives nothing away: each has its scope, and what it exports is known below."""
    words = beside("words.json").replace("<", "\\u003c")
    return f'"use strict";\n(() => {{\nconst WORDS = {words};\n{"".join(map(scoped, MODULES))}}})();\n'


def scoped(name: str) -> str:
    """A module as a function that is called at once: what it imports is known around it."""
    code = IMPORT.sub("", beside(name))
    body = EXPORT.sub(r"\1", code)
    given = ", ".join(export[1] for export in EXPORT.findall(code))
    return f"const {{{given}}} = (() => {{\n{body}return {{{given}}};\n}})();\n"


def policy(script: str, style: str, live: bool) -> str:
    own = f"script-src '{digest(script)}'; style-src '{digest(style)}'"
    asking = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; {own}; {asking}img-src data:; base-uri 'none'; form-action 'none'"


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def beside(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
