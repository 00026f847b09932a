"""Test that the site builds without a warning, works from local files, and loads nothing from other servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from doc_blocks import ROOT, USER_FOLDERS

pytest.importorskip("furo")
LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "srcset",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADING_RELATIONS = {
    "stylesheet",
    "preload",
    "prefetch",
    "modulepreload",
    "icon",
    "shortcut icon",
    "preconnect",
    "manifest",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", str(folder)]
    done = subprocess.run(
        [*command, "-d", str(tmp_path_factory.mktemp("doctrees"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Links(HTMLParser):
    """The files that a page loads, and the targets of its links."""

    def __init__(self, html):
        super().__init__()
        self.loaded, self.targets, self.names = [], [], set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.names |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if attributes.get(LOADING.get(tag, "")):
            self.loaded.append(attributes[LOADING[tag]])
        if tag == "link" and attributes.get("rel") in LOADING_RELATIONS:
            self.loaded.append(attributes["href"])
        if tag == "a" and attributes.get("href"):
            self.targets.append(attributes["href"])


@pytest.mark.slow
def test_no_page_loads_anything_from_other_servers(site):
    for page in site.rglob("*.html"):
        loaded = Links(page.read_text(encoding="utf-8")).loaded
        assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:\w+:)?//[^)]*", style.read_text(encoding="utf-8")) == [], style


@pytest.mark.slow
def test_links_of_the_site_lead_to_existing_files_and_headings(site):
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for page, links in pages.items():
        for target in links.targets:
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:", path):
                continue
            file = (page.parent / path).resolve() if path else page
            assert file.is_file(), f"{page.relative_to(site)}: {target}"
            if anchor and file in pages:
                assert anchor in pages[file].names, f"{page.relative_to(site)}: {target}"


@pytest.mark.slow
def test_search_finds_pages_except_the_lab_book(site):
    index = json.loads(re.search(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(encoding="utf-8"))[1])
    lab_book = index["docnames"].index("contributing/lab-book")
    found = index["terms"].values()
    assert not any(lab_book in (pages if isinstance(pages, list) else [pages]) for pages in found)
    assert "temperatur" in index["terms"]


@pytest.mark.slow
def test_llms_txt_lists_every_user_page(site):
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for folder in USER_FOLDERS:
        for page in (ROOT / "docs" / folder).glob("*.md"):
            if page.stem != "index":
                assert f"]({folder}/{page.name})" in listed
                assert page.read_text(encoding="utf-8") in whole
    for link in re.findall(r"\]\(([^)]+)\)", listed):
        assert (site / link).is_file(), link
