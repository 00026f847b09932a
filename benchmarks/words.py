"""Words of the documentation per kind of page, as `wc -w` counts them; characters for Chinese.

python benchmarks/words.py                  of the files as they are
python benchmarks/words.py --at COMMIT      of a commit, to compare
python benchmarks/words.py --pages          each page
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from pathlib import Path

FOR_USERS = ("tutorials", "how-to", "explanation")
GENERATED = {"settings", "commands", "models", "metrics", "errors"}
LONGEST = 2000
"""The most words of a page for users that is not generated."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT")
    parser.add_argument("--pages", action="store_true", help="also print each page")
    options = parser.parse_args()
    pages = read_pages(options.at)
    kinds: dict[str, dict[str, int]] = defaultdict(dict)
    for name, text in pages.items():
        kinds[find_kind(name)][name] = count_words(name, text)
    print("| kind | pages | words | longest page |\n|---|---|---|---|")
    for kind, counts in sorted(kinds.items()):
        longest = max(counts, key=lambda name: counts[name])
        print(f"| {kind} | {len(counts)} | {sum(counts.values()):,} | {longest}: {counts[longest]:,} |")
    written = [counts for kind, counts in kinds.items() if kind in FOR_USERS or kind == "reference, written"]
    words = sum(sum(counts.values()) for counts in written)
    prose = sum(count_words(name, drop_code(pages[name])) for counts in written for name in counts)
    print(f"\nWords for users without generated pages: {words:,}, of which {prose:,} are outside of code blocks.")
    for name, words in ((name, words) for counts in written for name, words in counts.items() if words > LONGEST):
        print(f"above {LONGEST:,}: {name}, {words:,}")
    if options.pages:
        for kind, counts in sorted(kinds.items()):
            print(f"\n{kind}\n" + "\n".join(f"{words:7,}  {name}" for name, words in sorted(counts.items())))


def read_pages(commit: str | None) -> dict[str, str]:
    if not commit:
        paths = [*Path().glob("*.md"), *Path("docs").rglob("*.md")]
        return {str(path): path.read_text(encoding="utf-8") for path in paths if path.name != "CHANGELOG.md"}
    names = run_git("ls-tree", "-r", "--name-only", commit).splitlines()
    pages = (name for name in names if re.fullmatch(r"[A-Z.a-z]+\.md|docs/.*\.md", name) and name != "CHANGELOG.md")
    return {name: run_git("show", f"{commit}:{name}") for name in pages}


def run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, encoding="utf-8").stdout


def find_kind(name: str) -> str:
    folder, _, page = name.removeprefix("docs/").removesuffix(".md").rpartition("/")
    if page == "lab-book":
        return "lab book"
    if folder == "reference":
        return "reference, generated" if page in GENERATED else "reference, written"
    return folder or ("docs/, one flat folder" if name.startswith("docs/") else page)


def drop_code(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def count_words(name: str, text: str) -> int:
    """Count words; in a Chinese page each character of that script counts as one."""
    return len(re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+", text)) if ".zh." in name else len(text.split())


if __name__ == "__main__":
    main()
