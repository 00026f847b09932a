"""Build the page as one HTML text. Its Content-Security-Policy runs only the page's own modules."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from string import Template

from pellucid.inspect.sentences import PAGE_DIR, load_sentences
from pellucid.reporting.charts import PAGE_CSS


def build_inspect_page(blocks: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the HTML of the page, and its Content-Security-Policy.

    `blocks` are packed data by key, for a page that needs no server.
    """
    nonce = secrets.token_urlsafe(16)
    modules = {"page/": "./page/"} if blocks is None else _encode_modules()
    connect = "connect-src 'self'; " if blocks is None else ""
    # The nonce also covers the modules that the script imports.
    own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
    policy = f"default-src 'none'; {own}; {connect}img-src data:; base-uri 'none'; form-action 'none'"
    html = Template(_read_page_file("index.html")).substitute(
        policy=policy,
        nonce=nonce,
        style=PAGE_CSS + _read_page_file("look.css") + _read_page_file("tokens.css"),
        imports=json.dumps({"imports": modules}),
        # The text of a script element must not contain its end tag.
        words=json.dumps(load_sentences(), ensure_ascii=False).replace("<", "\\u003c"),
        data="".join(
            f'<script type="text/plain" data-key="{key}">{text}</script>\n' for key, text in (blocks or {}).items()
        ),
    )
    return html, policy


def load_modules() -> dict[str, str]:
    """Return the JavaScript modules of the page by their names, such as "page/app.js"."""
    return {f"page/{path.name}": _read_page_file(path.name) for path in sorted(PAGE_DIR.glob("*.js"))}


def _encode_modules() -> dict[str, str]:
    """Return the data: URL of each module, for the import map."""
    encoded = {name: base64.b64encode(code.encode()).decode() for name, code in load_modules().items()}
    return {name: f"data:text/javascript;base64,{text}" for name, text in encoded.items()}


def _read_page_file(name: str) -> str:
    return (PAGE_DIR / name).read_text(encoding="utf-8")
