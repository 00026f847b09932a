"""The page as one HTML text: modules, words and styles joined in place, under a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from string import Template

from pellucid.inspect.sentences import PAGE_DIR
from pellucid.reporting.charts import PAGE_CSS

JS_MODULES = (
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
CSS_FILES = ("look.css", "tokens.css")
JS_IMPORT_PATTERN = re.compile(r"^import\b.*?;\n", re.MULTILINE | re.DOTALL)
JS_EXPORT_PATTERN = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def build_inspect_page(blocks: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The page, and its Content-Security-Policy. blocks: packed data by key; none for a page that asks its server."""
    script, style = bundle_modules(), PAGE_CSS + "".join(read_page_file(name) for name in CSS_FILES)
    data = "".join(
        f'<script type="text/plain" data-key="{key}">{text}</script>\n' for key, text in (blocks or {}).items()
    )
    rules = build_content_security_policy(script, style, live=blocks is None)
    html = Template(read_page_file("index.html")).substitute(policy=rules, style=style, script=script, data=data)
    return html, rules


def bundle_modules() -> str:
    """All modules as one script that gives nothing away: each has its scope, and what it exports is known below."""
    words = read_page_file("words.json").replace("<", "\\u003c")
    return f'"use strict";\n(() => {{\nconst WORDS = {words};\n{"".join(map(wrap_module, JS_MODULES))}}})();\n'


def wrap_module(name: str) -> str:
    """A module as a function that is called at once: what it imports is known around it."""
    code = JS_IMPORT_PATTERN.sub("", read_page_file(name))
    body = JS_EXPORT_PATTERN.sub(r"\1", code)
    given = ", ".join(export[1] for export in JS_EXPORT_PATTERN.findall(code))
    return f"const {{{given}}} = (() => {{\n{body}return {{{given}}};\n}})();\n"


def build_content_security_policy(script: str, style: str, live: bool) -> str:
    own = f"script-src '{compute_csp_hash(script)}'; style-src '{compute_csp_hash(style)}'"
    asking = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; {own}; {asking}img-src data:; base-uri 'none'; form-action 'none'"


def compute_csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read_page_file(name: str) -> str:
    return (PAGE_DIR / name).read_text(encoding="utf-8")
