"""The page as one HTML text, whose Content-Security-Policy lets nothing run but the page's own modules."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from string import Template

from pellucid.inspect.sentences import PAGE_DIR, load_sentences
from pellucid.reporting.charts import PAGE_CSS

_CSS_FILES = ("look.css", "tokens.css")


def build_inspect_page(blocks: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Build the page.

    Args:
        blocks: Packed data by key, for a page that needs no server. None for a page that asks its server.

    Returns:
        The HTML, and its Content-Security-Policy.
    """
    nonce = secrets.token_urlsafe(16)
    policy = _build_content_security_policy(nonce, is_live=blocks is None)
    html = Template(_read_page_file("index.html")).substitute(
        policy=policy,
        nonce=nonce,
        style=PAGE_CSS + "".join(map(_read_page_file, _CSS_FILES)),
        imports=json.dumps({"imports": {"page/": "./page/"} if blocks is None else _encode_modules()}),
        # An end of the script element must not stand in its text.
        words=json.dumps(load_sentences(), ensure_ascii=False).replace("<", "\\u003c"),
        data="".join(
            f'<script type="text/plain" data-key="{key}">{text}</script>\n' for key, text in (blocks or {}).items()
        ),
    )
    return html, policy


def load_modules() -> dict[str, str]:
    """Return the JavaScript modules of the page by their names, such as "page/app.js"."""
    return {f"page/{path.name}": path.read_text(encoding="utf-8") for path in sorted(PAGE_DIR.glob("*.js"))}


def _encode_modules() -> dict[str, str]:
    """Return an import map in which each module is its own data: URL."""
    encoded = {name: base64.b64encode(code.encode()).decode() for name, code in load_modules().items()}
    return {name: f"data:text/javascript;base64,{text}" for name, text in encoded.items()}


def _build_content_security_policy(nonce: str, is_live: bool) -> str:
    """Allow the script and the style that have the nonce, and the modules that the script imports."""
    connect = "connect-src 'self'; " if is_live else ""
    own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
    return f"default-src 'none'; {own}; {connect}img-src data:; base-uri 'none'; form-action 'none'"


def _read_page_file(name: str) -> str:
    return (PAGE_DIR / name).read_text(encoding="utf-8")
