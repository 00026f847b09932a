"""Parse a page as a browser does, and give text that a hostile run could write into it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

HOSTILE = (
    "</pre></script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)> \"'&lt; $name ${lede}"
    "\u202egnp.exe\u2066 \x00\x1b[31m \ud800 <!-- ]]> </svg></title></style>"
)
PAGE = "html head meta title style body header main footer section article div p h1 h2 h3 b small pre dl dt dd ol li"
TABLE = "table caption thead tbody tr th td details summary"
ALLOWED = {*PAGE.split(), *TABLE.split(), "svg", "g", "path", "circle", "rect", "text", "tspan"}
VOID = {"meta"}


class Page(HTMLParser):
    """The elements, attributes and text that a browser finds in a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, "unclosed elements"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def __contains__(self, text: str) -> bool:
        return text in re.sub(r"\s+", " ", "".join(self.text))
