"""Draws the pictures of the documentation as SVG files that can be read on light and on dark pages.

    python benchmarks/pictures.py                    all of them, into docs/pictures (make pictures)
    python benchmarks/pictures.py memory servers     some of them
    python benchmarks/pictures.py --run runs/mine    from a run that recorded tokens; by default, trains four steps

benchmarks/seeds.py and benchmarks/growth.py draw learning curves with --picture FILE. `microscope` needs chromium,
chromedriver, selenium, and Pillow.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

CSS = Path("src/pellucid/reporting/charts.css").read_text(encoding="utf-8")
STYLE = """
.t { font-size: 15px; font-weight: 600; } .s { fill: var(--soft); } .b { font-weight: 600; }
.m { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12.5px; }
.n { font-variant-numeric: tabular-nums; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.axis { stroke: var(--soft); } .rule { stroke: var(--rule); } .dash { stroke-dasharray: 3 4; }
.up { fill: var(--accent); } .down { fill: var(--warn); } .plain { fill: var(--soft); fill-opacity: 0.45; }
.box { fill: var(--paper); stroke: var(--soft); } .main { stroke: var(--accent); stroke-width: 2; }
.arrow { fill: none; stroke: var(--ink); stroke-width: 1.4; } .tip { fill: var(--ink); }
.chart .pin { fill: var(--accent); } .pin-text { fill: var(--paper); font-weight: 700; text-anchor: middle; }
"""
MINUS = "\N{MINUS SIGN}"
RUN = Path("runs/pictures")
TRAINING = (
    *("recipes/arithmetic.toml", "--algorithm.steps", "4", "--algorithm.group-size", "8", "--log.tokens", "4"),
    *("--log.token-steps", "1", "--evaluate.every", "0", "--algorithm.micro-batch", "8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", help=", ".join(PICTURES))
    parser.add_argument("--run", type=Path, help=f"a run that recorded tokens; by default, one is trained in {RUN}")
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    names = options.pictures or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; the pictures are {', '.join(PICTURES)}")
    run = options.run or RUN
    if not options.run and {"group", "microscope"} & set(names) and not (run / "model").is_dir():
        subprocess.run([sys.executable, "-m", "pellucid", "train", *TRAINING, "--run", str(run)], check=True)
    for name in names:
        path = options.into / f"{name}.svg"
        path.write_text(PICTURES[name](run), encoding="utf-8")
        print(path)


def make_document(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """Return an SVG document with its own background, so that it can be read on any page."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'{start} role="img" aria-label="{escape(label)}" class="chart">',
            f"<style>{CSS}{STYLE}</style>",
            '<rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{height:g}" rx="2" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{kind}"/>'


# ---------------------------------------------------------------- one group


@dataclass(frozen=True)
class RecordedGroup:
    """A group of rollouts.jsonl with different rewards."""

    step: int
    number: int
    """The index of the group in its step."""
    question: str
    answers: Sequence[dict]


def find_group(run: Path) -> RecordedGroup:
    """Return the group whose share of rewards above the mean is nearest to 40%, so that both signs can be seen."""
    records = [json.loads(row) for row in (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[int, str], list[dict]] = {}
    for record in records:
        groups.setdefault((record["step"], record["id"]), []).append(record)

    def compute_distance(key: tuple[int, str]) -> float:
        rewards = [record["reward"] for record in groups[key]]
        mean = sum(rewards) / len(rewards)
        return abs(sum(reward > mean for reward in rewards) / len(rewards) - 0.4)

    key = min(groups, key=compute_distance)
    number = [other for other in groups if other[0] == key[0]].index(key)
    prompt = groups[key][0]["prompt"]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return RecordedGroup(key[0], number, question, groups[key])


def draw_group(run: Path) -> str:
    group = find_group(run)
    rewards = [answer["reward"] for answer in group.answers]
    mean = sum(rewards) / len(rewards)
    top, row, zero, unit = 118, 28, 690, 40
    height = top + row * len(group.answers) + 62
    parts = [
        text(24, 34, f"One group: {len(rewards)} answers to one prompt", "t"),
        text(24, 56, f"“{group.question}”", "m"),
        text(24, 92, "answer", "s"),
        text(520, 92, "reward", "s end"),
        text(zero, 92, "advantage", "s mid"),
        line(zero, top - 14, zero, top + row * len(rewards) - 8, "axis"),
    ]
    for i, answer in enumerate(sorted(group.answers, key=lambda answer: -answer["reward"])):
        y, advantage = top + row * i, answer["advantage"]
        completion = " ".join(answer["completion"].split())
        parts += [
            text(24, y + 5, completion if len(completion) < 54 else f"{completion[:52]}…", "m"),
            text(520, y + 5, f"{answer['reward']:g}", "n end"),
            bar(*(zero, y - 7) if advantage > 0 else (zero + unit * advantage, y - 7), unit * abs(advantage), 15,
                "up" if advantage > 0 else "down"),
            text(*(zero - 8, y + 5) if advantage > 0 else (zero + 8, y + 5), f"{advantage:+.2f}".replace("-", MINUS),
                 "n end" if advantage > 0 else "n"),
        ]  # fmt: skip
    parts += [
        text(
            24,
            height - 40,
            f"advantage = (reward {MINUS} mean) / standard deviation; the mean of this group is {mean:g}.",
            "s",
        ),
        text(
            24,
            height - 20,
            "The update makes answers with a positive advantage more likely, and the others less likely.",
            "s",
        ),
    ]
    label = f"A group of {len(rewards)} answers with rewards and advantages"
    return make_document(860, height, label, parts)


# ---------------------------------------------------------------- the microscope

CALLOUTS = (
    "An answer of the group, with its reward and its advantage.",
    "A token. The color shows how far the step moved its log-prob: blue is up, orange is down.",
    "The numbers of that token, and a sentence that says why it moved.",
)
THEME_CSS = """
.dark { display: none }
@media (prefers-color-scheme: dark) { .dark { display: inline } .light { display: none } }
"""


def draw_microscope(run: Path) -> str:
    from pellucid.inspect.run_reader import RunReader  # noqa: PLC0415 - the other pictures need no reader
    from pellucid.inspect.single_file import write_page  # noqa: PLC0415

    group, width, height = find_group(run), 1240, 640
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page([RunReader(run)], page)
        screenshots, places = take_screenshots(f"{page.as_uri()}#/group/{group.step}/{group.number}", width, height)
    image_width = 900
    scale, image_height = image_width / width, round(image_width * height / width)
    parts = [f"<style>{THEME_CSS}</style>"]
    for theme, png in screenshots.items():
        data = base64.b64encode(png).decode()
        size = f'width="{image_width}" height="{image_height}"'
        parts.append(f'<image class="{theme}" {size} href="data:image/png;base64,{data}"/>')
    parts.append(line(0, image_height, image_width, image_height, "rule"))
    for i, ((x, y), words) in enumerate(zip(places, CALLOUTS, strict=True), 1):
        for cx, cy in ((x * scale, y * scale), (36, image_height + 4 + 27 * i)):
            parts += [f'<circle cx="{cx:g}" cy="{cy:g}" r="11" class="pin"/>', text(cx, cy + 4.5, str(i), "pin-text")]
        parts.append(text(58, image_height + 9 + 27 * i, words))
    return make_document(image_width, image_height + 108, "A group in the token microscope, with three callouts", parts)


def take_screenshots(url: str, width: int, height: int) -> tuple[dict[str, bytes], list[tuple[float, float]]]:
    """Return the page of a group as PNG in both themes, and the points of its callouts as (x, y)."""
    from PIL import Image  # noqa: PLC0415 - only this picture needs it
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.support.ui import WebDriverWait  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    screenshots, places = {}, []
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
            size = {"width": width, "height": height + 120, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wait = WebDriverWait(browser, 60)
            for theme in ("light", "dark"):
                emulated = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
                browser.get("about:blank")
                browser.get(url)
                wait.until(lambda page: page.execute_script(f"return {TOKENS}.length > 8"))
                top, places = browser.execute_script(CHOOSE_TOKEN)
                clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1.25}
                data = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"]
                image, file = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), io.BytesIO()
                image.quantize(96, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
                screenshots[theme] = file.getvalue()
    return screenshots, places


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--lang=en", "--hide-scrollbars")
TOKENS = "document.querySelectorAll('.answer .tok')"
CHOOSE_TOKEN = """
document.querySelector('#aligned').click();
document.querySelector('details').open = false;
const tone = tok => Number(getComputedStyle(tok).backgroundColor.match(/[0-9.]+/g)[3] ?? 1);
const seen = [...document.querySelectorAll('.answer .tok')].filter(tok => {
  const box = tok.getBoundingClientRect();
  return box.bottom < innerHeight - 40 && box.right < innerWidth * 0.6;
});
seen.sort((a, b) => tone(b) - tone(a))[0].click();
const token = document.querySelector('.tok[aria-selected=true]'), chosen = token.getBoundingClientRect();
const range = document.createRange();
range.selectNodeContents(document.querySelector('.answer p'));
const head = range.getBoundingClientRect(), panel = document.querySelector('.panel').getBoundingClientRect();
const top = document.querySelector('h1').getBoundingClientRect().top - 4;
const places = [
  [head.right + 20, head.top + head.height / 2],
  [chosen.right + 2, chosen.bottom + 4],
  [panel.right - 20, panel.top + 24],
];
return [top, places.map(([x, y]) => [x, y - top])];
"""
"""Opens the panel of the token that the step moved most. Returns the top of the picture and the points of callouts."""


# ---------------------------------------------------------------- memory by engine

PLAN = ("recipes/continuity.toml", "--policy.model", "recipes/shapes/qwen2.5-3b", "--policy.device", "cuda")
CARDS = (24, 48, 80)


def read_plan() -> list[tuple[str, int, float, float]]:
    """Return (engine, devices, peak, peak with offload) of `pellucid doctor --plan`, in GB on each device."""
    command = [sys.executable, "-m", "pellucid", "doctor", "--plan", *PLAN]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in output.splitlines() if row.startswith("|")]
    return [(r[1], int(r[0]), float(r[-2]), float(r[-1])) for r in rows if len(r) == 11 and r[0].isdigit()]


def draw_memory(_run: Path) -> str:
    rows = read_plan()
    left, unit, top, row = 150, 7.4, 108, 21
    parts = [
        text(24, 34, "Memory on each GPU, by engine and number of GPUs", "t"),
        text(24, 56, "Qwen2.5-3B, 4 completions of 512 tokens, a frozen reference; planned, GB at the peak", "s"),
        bar(left, 68, 12, 11, "plain"), text(left + 18, 78, "without"),
        bar(left + 92, 68, 12, 11, "up"), text(left + 110, 78, "with optimizer.offload"),
    ]  # fmt: skip
    y, last_engine = top, rows[0][0]
    bars = []
    for engine, devices, peak, offload in rows:
        if engine != last_engine:
            y, last_engine = y + 12, engine
        if devices == 1:
            bars.append(text(24, y + 14, engine, "b"))
        bars += [
            text(left - 12, y + 14, f"{devices} GPU{'s' if devices > 1 else ''}", "s end"),
            bar(left, y + 3, peak * unit, 15, "plain"),
            bar(left, y + 3, offload * unit, 15, "up"),
            text(left + peak * unit + 6, y + 15, f"{peak:.1f}", "n tick"),
        ]
        y += row
    for card in CARDS:
        x = left + card * unit
        parts += [line(x, top - 6, x, y + 4, "axis dash"), text(x, y + 20, f"{card} GB", "tick mid")]
    parts += bars
    parts.append(text(24, y + 46, f"pellucid doctor --plan {PLAN[0]} {PLAN[1]} {PLAN[2]} {PLAN[3]} {PLAN[4]}", "m s"))
    return make_document(860, y + 64, "Planned memory on each GPU by engine and number of GPUs", parts)


# ---------------------------------------------------------------- processes and servers


def box(x: float, y: float, width: float, lines: Sequence[str], height: float = 56, kind: str = "") -> Iterator[str]:
    """Yield the parts of a box, whose first line is its name."""
    yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="box {kind}"/>'
    for i, words in enumerate(lines):
        yield text(x + 12, y + 22 + 18 * i, words, "b m" if i == 0 else "s")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a horizontal or vertical arrow."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    tip = f"M{x2:g} {y2:g}l{-9 * dx - 4 * dy:g} {-9 * dy - 4 * dx:g}l{8 * dy:g} {8 * dx:g}z"
    return f'{line(x1, y1, x2 - 7 * dx, y2 - 7 * dy, "arrow")}<path d="{tip}" class="tip"/>'


def draw_servers(_run: Path) -> str:
    trainer = [
        *("pellucid train", "holds the policy.", "", "1. Generate: by itself,", "    or by sampler servers", ""),
        *("2. Reward: in workers,", "    or by a judge", "", "3. Advantage", "", "4. Update"),
    ]
    parts = [
        text(24, 34, "Processes and servers of a run", "t"),
        text(24, 56, "A run on one machine needs only pellucid train, reward workers, and the run folder.", "s"),
        *box(330, 84, 230, trainer, 288, "main"),
        *box(24, 84, 180, ["pellucid sampler", "vLLM on gpu2"]),
        arrow(330, 100, 204, 100), text(267, 92, "weights, prompts", "s mid"),
        arrow(204, 124, 330, 124), text(267, 142, "completions", "s mid"), text(267, 158, "with log-probs", "s mid"),
        *box(24, 200, 180, ["pellucid sampler", "vLLM on gpu3"]),
        arrow(330, 216, 204, 216), arrow(204, 240, 330, 240), text(267, 208, "the same", "s mid"),
        *box(24, 316, 180, ["reward workers", "on the same machine"]),
        arrow(330, 332, 204, 332), text(267, 324, "completions", "s mid"),
        arrow(204, 356, 330, 356), text(267, 374, "rewards", "s mid"),
        *box(690, 84, 180, ["pellucid train", "other ranks (torchrun)"]),
        arrow(560, 100, 690, 100), arrow(690, 124, 560, 124), text(625, 92, "gradients", "s mid"),
        *box(690, 200, 180, ["your agent", "a process per rollout"]),
        arrow(690, 216, 560, 216), text(625, 208, "OpenAI API", "s mid"),
        arrow(560, 240, 690, 240), text(625, 258, "answers", "s mid"),
        *box(690, 316, 180, ["a judge", "any OpenAI endpoint"]),
        arrow(560, 332, 690, 332), text(625, 324, "completions", "s mid"),
        arrow(690, 356, 560, 356), text(625, 374, "grades", "s mid"),
        *box(330, 430, 230, ["runs/NAME", "metrics, rollouts, model"]),
        arrow(445, 372, 445, 430), text(455, 406, "every step", "s"),
        *box(24, 430, 180, ["pellucid look", "a page on this machine"]),
        arrow(330, 458, 204, 458), text(267, 450, "records", "s mid"),
        *box(690, 430, 180, ["pellucid serve", "OpenAI API"]),
        arrow(560, 458, 690, 458), text(625, 450, "model", "s mid"),
        text(24, 518, "Sampler servers speak HTTP, with the secret in PELLUCID_SAMPLER_TOKEN and without encryption:"
             " use a private network.", "s"),
        text(24, 538, "Each rank sends its prompts to the sampler servers, and only the first sends weights; between"
             " GPUs they go over NCCL.", "s"),
    ]  # fmt: skip
    return make_document(894, 562, "The processes of a run and the servers it may use", parts)


PICTURES: dict[str, Callable[[Path], str]] = {
    "group": draw_group,
    "microscope": draw_microscope,
    "memory": draw_memory,
    "servers": draw_servers,
}

if __name__ == "__main__":
    main()
