"""The site: `make docs` builds it into site/, which works from file://, offline, and asks nobody for anything.

Pages are plain Markdown. This file adds the parts that GitHub has no need of:

* The menu: every list item of an index.md that starts with a link is an entry, in that order.
* Links out of docs/, as to src/ or recipes/: the site has a highlighted copy of every file that is linked.
* llms.txt, llms-full.txt and the Markdown of each page beside its HTML.
* name-dark.svg instead of name.svg in the dark theme, where there is one.
* A label above a code block after `<!-- file: rewards.py -->` or `<!-- needs: a GPU -->`.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import JsonLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "Pellucid"
author = "the authors of Pellucid"
html_title = "Pellucid"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["studies", "systems", "site"]
myst_enable_extensions = ["alert"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "clone": None}
suppress_warnings = ["myst.header"]  # an excerpt may start with a lower heading
html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_show_sphinx = False
html_show_search_summary = True
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_selector = "div.highlight-sh pre, div.highlight-python pre, div.highlight-toml pre"
smartquotes = False

NOT_SEARCHED = {"contributing/lab-book"}
FOR_USERS = ("tutorials", "how-to", "explanation", "reference")
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```+).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- (file|needs): (.+) -->")
_ENTRY = re.compile(r"^- \[[^\]]+\]\(([^)\s#:]+)\.md\)", re.MULTILINE)


def setup(app: Sphinx) -> None:
    app.add_lexer("jsonl", JsonLexer)
    app.connect("source-read", _read)
    app.connect("doctree-read", _leave_out_of_search)
    app.connect("doctree-resolved", _link_copies)
    app.connect("doctree-resolved", _show_both_pictures)
    app.connect("doctree-resolved", _label_blocks)
    app.connect("doctree-resolved", _mark_tables_of_keys)
    app.connect("html-collect-pages", _make_copies)
    app.connect("build-finished", _write_for_models)


# ---------------------------------------------------------------- pages


def _read(_: Sphinx, name: str, source: list[str]) -> None:
    """Mark links that leave docs/, and give an index its menu."""
    text = source[0]
    folder = posixpath.dirname(f"docs/{name}")

    def mark(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        is_page = target.endswith(".md") and not target.startswith(("docs/studies", "docs/systems"))
        if target.startswith("docs/") and (is_page or target.endswith((".svg", ".png"))):
            return match[0]
        if target.startswith("..") or not (ROOT / target).exists():
            logging.getLogger(__name__).warning(f"docs/{name}.md: {match[1]} is not in the clone")
            return match[0]
        return f"](clone:{target})"

    code = [match.span() for match in _FENCE.finditer(text)]
    source[0] = _LINK.sub(
        lambda match: match[0] if any(start <= match.start() < end for start, end in code) else mark(match), text
    )
    if name.rpartition("/")[2] == "index":
        pages = "\n".join(_ENTRY.findall(text))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n{pages}\n```\n"


def _leave_out_of_search(app: Sphinx, _: nodes.document) -> None:
    if app.env.docname in NOT_SEARCHED:
        app.env.metadata[app.env.docname]["nosearch"] = True


def _show_both_pictures(app: Sphinx, doctree: nodes.document, _: str) -> None:
    """Show a picture that has a dark twin in the light theme only, and the twin in the dark one."""
    for image in list(doctree.findall(nodes.image)):
        light = str(image["uri"])
        dark = f"{light.removesuffix('.svg')}-dark.svg"
        if light.endswith(".svg") and (DOCS / dark).is_file():
            app.env.images.add_file(app.env.docname or "index", dark)
            app.builder.images[dark] = app.env.images[dark][1]
            twin = image.deepcopy()
            twin["uri"] = dark
            image["classes"].append("only-light")
            twin["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, twin)


def _label_blocks(_: Sphinx, doctree: nodes.document, __: str) -> None:
    for raw in list(doctree.findall(nodes.raw)):
        if found := _MARKER.fullmatch(raw.astext().strip()):
            text = found[2] if found[1] == "file" else f"needs {found[2]}"
            raw.replace_self(nodes.paragraph("", text, classes=["block-label"]))


def _mark_tables_of_keys(_: Sphinx, doctree: nodes.document, __: str) -> None:
    """Let narrow screens show a table of settings or metrics as a list."""
    for table in doctree.findall(nodes.table):
        if next(iter(table.findall(nodes.entry))).astext() == "key":
            table["classes"].append("keys")


# ---------------------------------------------------------------- files of the clone that pages link


def _link_copies(app: Sphinx, doctree: nodes.document, name: str) -> None:
    copies: set[str] = app.env.__dict__.setdefault("copies_of_the_clone", set())
    for reference in doctree.findall(nodes.reference):
        uri = str(reference.get("refuri", ""))
        if uri.startswith("clone:"):
            path = uri.removeprefix("clone:")
            copies.add(path)
            reference["refuri"] = relative_uri(app.builder.get_target_uri(name), _copy_name(path) + ".html")


def _copy_name(path: str) -> str:
    return f"clone/{path}" if (ROOT / path).is_file() else f"clone/{path}/index"


def _make_copies(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    copies: set[str] = app.env.__dict__.get("copies_of_the_clone", set())
    for folder in [path for path in copies if (ROOT / path).is_dir()]:
        copies |= {f"{folder}/{path.name}" for path in _files(folder)}
    for path in sorted(copies):
        body = _render(app, path, copies) if path.endswith(".md") else f"<h1>{path}</h1>{_show(path)}"
        yield _copy_name(path), {"title": path, "body": body, "parents": []}, "page.html"


def _files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).iterdir() if path.is_file() and path.stat().st_size < 200_000)


def _show(path: str) -> str:
    if (ROOT / path).is_dir():
        items = [f'<li><a href="{file.name}.html">{file.name}</a></li>' for file in _files(path)]
        return f"<ul>{''.join(items)}</ul>"
    try:
        text = (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "<p>Not a text.</p>"
    return _highlight(text, path, linenos="inline", lineanchors="L")


def _highlight(text: str, file: str, **options: Any) -> str:
    try:
        lexer = get_lexer_for_filename(file)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(text, lexer, HtmlFormatter(wrapcode=True, **options))


def _highlight_block(_: Any, tokens: Any, index: int, *__: Any) -> str:
    suffix = {"python": "py", "": "txt"}.get(tokens[index].info, tokens[index].info)
    return _highlight(tokens[index].content, f"block.{suffix}")


def _render(app: Sphinx, path: str, copies: set[str]) -> str:
    """The HTML of a Markdown file of the clone. A link to what the site does not have leads to the page itself."""
    parser = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=4)
    parser.add_render_rule("fence", _highlight_block)
    tokens = parser.parse((ROOT / path).read_text(encoding="utf-8"))
    for token in [child for each in tokens for child in each.children or []]:
        key = {"link_open": "href", "image": "src"}.get(token.type)
        link, _, anchor = str(token.attrGet(key) or "").partition("#") if key else ("", "", "")
        if not key or not link or ":" in link:
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        page = target.removeprefix("docs/").removesuffix(".md")
        if key == "src":
            (Path(app.outdir) / "clone" / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / target, Path(app.outdir) / "clone" / target)
            url = f"clone/{target}"
        elif target.startswith("docs/") and page in app.env.found_docs:
            url = f"{page}.html" + (f"#{anchor}" if anchor else "")
        else:
            url = f"{_copy_name(target if target in copies else path)}.html"
        token.attrSet(key, posixpath.relpath(url, posixpath.dirname(f"clone/{path}")))
    return parser.renderer.render(tokens, parser.options, {})


# ---------------------------------------------------------------- for language models


def _write_for_models(app: Sphinx, failed: Exception | None) -> None:
    if failed or app.builder.name != "html":
        return
    out, index = Path(app.outdir), ["# Pellucid", "", f"> {_summary()}", ""]
    full = []
    for section in (*FOR_USERS, "contributing"):
        if not (DOCS / section / "index.md").exists():
            continue  # the links to it have failed
        index += [f"## {_title(section)}", ""]
        for line in (DOCS / section / "index.md").read_text(encoding="utf-8").splitlines():
            entry = re.match(r"- \[([^\]]+)\]\(([^)\s#:]+\.md)\)(.*)", line)
            if entry and (DOCS / section / entry[2]).exists():
                page = f"{section}/{entry[2]}"
                text = (DOCS / page).read_text(encoding="utf-8")
                (out / page).write_text(text, encoding="utf-8")
                index.append(f"- [{entry[1]}]({page}){entry[3]}")
                full += [f"<!-- {page} -->\n\n{text}"] if section in FOR_USERS else []
        index.append("")
    (out / "llms.txt").write_text("\n".join(index), encoding="utf-8")
    (out / "llms-full.txt").write_text(f"# Pellucid\n\n> {_summary()}\n\n" + "\n".join(full), encoding="utf-8")


def _title(section: str) -> str:
    return (DOCS / section / "index.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _summary() -> str:
    """The first paragraph of the landing page."""
    _, paragraph, *_ = (DOCS / "index.md").read_text(encoding="utf-8").split("\n\n")
    return " ".join(paragraph.split())
