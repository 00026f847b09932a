"""Test the page of `pellucid look` in a real browser, from a server and from disk, also with hostile answers."""

from __future__ import annotations

import json
import math
import os
import shutil
import time

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from looking import looking
from made_runs import CONFIG, add_step, id_of, lines, metric, prompt, row, run_folder, small_run, write_tokens
from pages import HOSTILE
from pellucid.algorithm.explained import GRADIENT_RULES
from pellucid.inspect import single_file
from pellucid.inspect.run_reader import RunReader
from pellucid.inspect.sentences import explain_token
from pellucid.reporting import token_files

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium and chromium-driver"
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
VIEWS = ("run", "step", "group", "movers", "question", "pair", "why")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        *FLAGS,
        "--lang=en",
        "--window-size=1300,900",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def _a_page_of_its_own(browser):
    """Leave the page after each test. An open page would query a stopped server, and the browser would log errors."""
    yield
    browser.get("about:blank")
    browser.get_log("browser")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    with looking(small_run(folder / "one"), small_run(folder / "two", seed=1)) as server:
        yield server.url


def eventually(page, condition):
    """Wait for a condition. The page may redraw between finding an element and reading it."""
    return WebDriverWait(page, 20, ignored_exceptions=(StaleElementReferenceException,)).until(lambda _: condition())


def found(page, css):
    return page.find_elements(By.CSS_SELECTOR, css)


def go(page, address, view):
    page.get("about:blank")
    page.get(address)
    eventually(page, lambda: found(page, f"main[data-view={view}][aria-busy=false]") and found(page, "nav a"))


def text(page):
    return page.execute_script("return document.body.innerText")


def press(page, *keys):
    for key in keys:
        page.switch_to.active_element.send_keys(key)


def chosen(page):
    return page.execute_script("return document.querySelector('.tok[aria-selected=true]')?.textContent")


def silent(page):
    return not [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "says", "shows"),
    [
        ("run", "The mean reward went from 0.350 at step 1", "svg.chart"),
        ("step", "2 of 3 groups had a signal", ".group.partial"),
        ("group", "Step 9, group", ".answer .tok.fork"),
        ("movers", "Largest change of log-prob", "section.list td"),
        ("question", "asked 9 times", ".questions a"),
        ("pair", "3 questions of this step are in both runs", ".two .tok"),
        ("why", "The loss is about 0", ".finding.fine"),
    ],
)
def test_every_view_shows_its_content(browser, url, view, says, shows):
    go(browser, f"{url}#/{view}", view)
    assert says in text(browser)
    assert found(browser, shows)
    assert silent(browser)


def test_click_on_a_curve_opens_the_step_below_it(browser, url):
    go(browser, f"{url}#/run", "run")
    circle = found(browser, "svg.chart circle")[3]
    webdriver.ActionChains(browser).move_to_element(circle).click().perform()
    eventually(browser, lambda: "#/step/4" in browser.current_url)


@pytest.mark.slow
def test_groups_of_a_step_are_sorted_by_share_of_the_gradient(browser, url, tmp_path):
    go(browser, f"{url}#/step/2", "step")
    shares = [
        float(bar.get_attribute("style").split("width:")[1].strip(" %;")) for bar in found(browser, ".track .bar")
    ]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.1)


@pytest.mark.slow
def test_continuous_rewards_are_not_called_right_or_wrong(browser, tmp_path):
    """Two of three groups are recorded, so shares are relative to the recorded ones."""
    run = small_run(tmp_path / "graded", steps=1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith("groups/")} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, "groups/dead_equal": 0.3}) + "\n" for row in rows))
    with looking(run) as server:
        go(browser, f"{server.url}#/step/1", "step")
        said = text(browser)
        go(browser, f"{server.url}#/group/1/0", "group")
        said += text(browser)
    for words in ("4 answers", "no signal: equal rewards", "of the recorded groups"):
        assert words in said
    for claim in ("right,", " right", "wrong", "✓", "✗", "◐", "of the step"):
        assert claim not in said
    assert silent(browser)


@pytest.mark.slow
def test_keyboard_leads_from_the_run_to_a_token_and_on(browser, url):
    go(browser, f"{url}#/run", "run")
    press(browser, "3")
    eventually(browser, lambda: found(browser, "main[data-view=group][aria-busy=false]"))
    press(browser, Keys.ARROW_RIGHT)
    assert chosen(browser) == " So"
    press(browser, Keys.ARROW_RIGHT)
    assert chosen(browser) == " we"
    assert "c=0&t=1" in browser.current_url
    press(browser, Keys.ARROW_DOWN)
    assert "c=1&t=1" in browser.current_url
    press(browser, Keys.END)
    assert "c=1&t=9" in browser.current_url
    press(browser, Keys.HOME, "p")
    assert "c=1&t=2" in browser.current_url  # all answers begin with the same two tokens
    before = browser.execute_script("return document.getElementById('by').value")
    press(browser, "h")
    assert browser.execute_script("return document.getElementById('by').value") != before
    token = chosen(browser)
    press(browser, "a")
    assert found(browser, ".board.rows")
    assert chosen(browser) == token
    kept = int(browser.current_url.partition("?")[0][-1])
    press(browser, "a", "[")
    eventually(browser, lambda: "#/group/8" in browser.current_url)
    eventually(browser, lambda: f"Step 8, group {kept}" in text(browser))
    press(browser, "j", "k")  # one of them leads to the other group of the step
    eventually(browser, lambda: f"Step 8, group {1 - kept}" in text(browser))
    press(browser, "2")
    eventually(browser, lambda: browser.current_url.endswith("#/step/8"))
    eventually(browser, lambda: found(browser, "main[data-view=step][aria-busy=false]"))
    press(browser, "3")
    eventually(browser, lambda: browser.current_url.endswith(f"#/group/8/{1 - kept}"))
    press(browser, "?")
    assert found(browser, "dialog[open]")
    press(browser, Keys.ESCAPE)
    assert not found(browser, "dialog[open]")


@pytest.mark.slow
def test_token_of_the_prompt_can_be_selected(browser, url):
    go(browser, f"{url}#/group/3/0", "group")
    found(browser, "details .tok")[0].click()
    assert found(browser, "details .tok[aria-selected=true]")
    assert "It is part of the prompt" in found(browser, ".panel .sentence")[0].text
    press(browser, Keys.ARROW_RIGHT)
    assert "c=0&t=0" in browser.current_url


@pytest.mark.slow
def test_url_restores_the_selected_token(browser, url):
    go(browser, f"{url}#/group/3/1?c=2&t=4", "group")
    eventually(browser, lambda: chosen(browser))
    labels = [box.get_attribute("aria-label") for box in found(browser, ".answer .flow")]
    assert len(labels) == 4
    assert all("reward" in label for label in labels)
    assert found(browser, ".panel .sentence")[0].text


@pytest.mark.slow
def test_a_question_is_followed_through_the_steps(browser, url):
    go(browser, f"{url}#/question", "question")
    found(browser, ".questions a")[0].click()
    eventually(browser, lambda: len(found(browser, ".history")) == 9)
    labels = [chart.get_attribute("aria-label") for chart in found(browser, "svg.chart")]
    assert labels[0] == "Reward: reward from 0.5 at step 1 to 0.5 at step 9"
    assert labels[1] == "Length: length from 10 at step 1 to 10 at step 9"
    assert silent(browser)


@pytest.mark.slow
def test_page_and_terminal_explain_tokens_alike(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    said = [{"rule": rule, "push": 0.0, "ratio": 0.76, "bound": 0.8, "advantage": -0.9} for rule in GRADIENT_RULES[1:]]
    said += [{"push": push, "logprob_after": after} for push in (0.1, -0.1) for after in (-0.25, -0.75, -0.5, None)]
    write_tokens(run, 1, [row(0, 0, i, f"t{i}", **each) for i, each in enumerate(said)])
    columns = RunReader(run).read_tokens(1).columns
    expected = [explain_token({name: values[i] for name, values in columns.items()}) for i in range(len(said))]
    with looking(run) as server:
        go(browser, f"{server.url}#/group/1/0?c=0&t=0", "group")
        shown = []
        for i in range(len(said)):
            eventually(browser, lambda i=i: chosen(browser) == f"t{i}")
            shown.append(found(browser, ".panel .sentence")[0].text)
            press(browser, Keys.ARROW_RIGHT)
    assert shown == expected


@pytest.mark.slow
def test_page_shows_new_steps_of_a_running_run(browser, tmp_path):
    run = small_run(tmp_path / "run", steps=2)
    with looking(run) as server:
        go(browser, f"{server.url}#/run", "run")
        assert len(found(browser, ".cell")) == 2
        add_step(run, 3)
        eventually(browser, lambda: len(found(browser, ".cell.recorded")) == 3)
        go(browser, f"{server.url}#/group/2/0?c=0&t=1", "group")
        add_step(run, 4)
        eventually(browser, lambda: found(browser, ".stepper a[href='#/group/3']"))
        assert chosen(browser)  # the token stays selected


@pytest.mark.slow
def test_the_file_from_disk_shows_every_view(browser, tmp_path):
    runs = [RunReader(small_run(tmp_path / name, steps=3, seed=seed)) for seed, name in enumerate(("one", "two"))]
    single_file.write_page(runs, tmp_path / "page.html")
    for view in VIEWS:
        go(browser, f"{(tmp_path / 'page.html').as_uri()}#/{view}", view)
        assert not found(browser, "[role=alert]"), view
    go(browser, f"{(tmp_path / 'page.html').as_uri()}#/group/3/0?c=0&t=1", "group")
    eventually(browser, lambda: chosen(browser) == " we")
    assert not found(browser, "#live")
    assert not found(browser, "#foot")[0].text
    assert silent(browser)


@pytest.mark.slow
def test_file_says_what_it_leaves_out(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(single_file, "estimate_step_count", lambda runs, files, room: 2)
    said = single_file.write_page([RunReader(small_run(tmp_path / "run", steps=3))], tmp_path / "page.html")
    go(browser, f"{(tmp_path / 'page.html').as_uri()}#/run", "run")
    assert said == "Left out for room: the tokens of 1 of 3 steps."
    assert found(browser, "#foot")[0].text == said
    go(browser, f"{(tmp_path / 'page.html').as_uri()}#/group/2/0", "group")
    assert "The tokens of step 2 are not in this file" in text(browser)
    assert found(browser, "main a[href^='#/group/']")


COLUMNS = {
    "entropy": "entropy_before", "ratio": "ratio", "advantage": "advantage", "weight": "weight", "push": "push",
    "gradient": "gradient", "bound": "bound",
}  # fmt: skip


def other_passes(run):
    """Write a step in which some rows were not scored, and one whose likeliest tokens before the update come from
    another forward pass than its log-probs, as they do for the last optimizer step.
    """
    tops = {f"top_{when}{kind}": of for when in ("before", "after") for kind, of in TOPS.items()}
    unscored = {"logprob_before": None, "push": None, "gradient": None, "ratio": None}
    rows = [
        row(0, c, i, " a", logprob_before=math.log(0.6), logprob_after=math.log(0.6), **tops)
        for c in (0, 1)
        for i in range(4)
    ]
    write_tokens(run, 2, [*rows, *({**each, "completion": 2, **unscored} for each in rows[:4])])
    write_tokens(run, 3, [{**each, "logprob_before": math.log(0.2), "logprob_after": math.log(0.25)} for each in rows])
    lines(run / "metrics.jsonl", [metric(2), metric(3)])


TOPS = {"": [id_of(" a"), 7], "_text": [" a", " b"], "_logprob": [math.log(0.6), math.log(0.3)]}


@pytest.mark.slow
def test_tokens_in_the_file_equal_those_of_the_server(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    add_step(run, 1, said=["a\x00b", "答案", "", "\n", *(" x" * i for i in range(300))])
    other_passes(run)
    single_file.write_page([RunReader(run)], tmp_path / "page.html")
    for step in (1, 2, 3):
        go(browser, f"{(tmp_path / 'page.html').as_uri()}#/group/{step}/0", "group")
        page = json.loads(browser.execute_script("return JSON.stringify(document.microscope.data)"))
        assert page == json.loads(json.dumps(RunReader(run).answer(f"tokens/{step}")))
        compared(page, token_files.read_tokens(run, step).to_pylist())
        assert page["sequences"] == RunReader(run).read_tokens(step).sequences


def compared(page, exact):
    """Check that numbers agree to four digits, to 0.0001, or to 0.0001 of the largest value in the step."""
    scale = {name: max(abs(each[name] or 0.0) for each in exact) for name in ("weight", "push", "gradient")}

    def close(shown, true, unit=1e-4):
        if true is None or math.isnan(true):
            return shown is None
        return abs(shown - true) <= 0.5001 * max(unit, 1e-3 * abs(true)) + 1e-6

    for i, each in enumerate(exact):
        assert page["vocabulary"][page["token"][i]] == [each["token"], each["text"]]
        assert page["kind"][i] == each["kind"][0]
        assert (page["rules"][page["rule"][i]] if page["rule"][i] >= 0 else "") == (each["rule"] or "")
        for name, column in COLUMNS.items():
            shown = page[name][i] if page.get(name) else None
            assert close(shown, each[column], 1e-4 * scale.get(name, 1.0)), (name, shown, each[column])
        before, after, sampler = (each[name] for name in ("logprob_before", "logprob_after", "sampler_logprob"))
        assert close(page["before"][i], before)
        if before is not None:
            assert close(page["change"][i], after - before)
            assert close(page["gap"][i], before - sampler)
        elif after is not None:
            assert close(page["after"][i], after)
            assert close(page["sampler"][i], sampler)
        for when in ("before", "after"):
            flat = (page[f"top_{when}"] or [None] * len(exact))[i]
            likely = list(zip(*(each[f"top_{when}{kind}"] or () for kind in ("", "_text", "_logprob")), strict=True))
            assert (flat is None) == (each[f"top_{when}"] is None)
            if flat is None:
                continue
            assert [page["vocabulary"][word] for word in flat[::2]] == [[id_, word] for id_, word, _ in likely]
            assert all(close(shown, top[2]) for shown, top in zip(flat[1::2], likely, strict=True))


def test_browser_that_cannot_unpack_shows_a_message(browser, tmp_path):
    single_file.write_page([RunReader(small_run(tmp_path / "run", steps=2))], tmp_path / "page.html")
    old = browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "delete window.DecompressionStream"}
    )
    try:
        browser.get("about:blank")
        browser.get(f"{(tmp_path / 'page.html').as_uri()}#/step/1")
        eventually(browser, lambda: "This browser cannot unpack the page" in text(browser))
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", old)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_page_does_not_scroll_sideways_at_400_pixels(browser, url, view):
    narrow = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        go(browser, f"{url}#/{view}", view)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_page_follows_the_color_scheme_of_the_browser(browser, url):
    def paper():
        go(browser, f"{url}#/run", "run")
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    def scheme(value):
        features = [{"name": "prefers-color-scheme", "value": value}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    scheme("dark")
    assert paper() == "rgb(21, 24, 26)"
    scheme("light")
    assert paper() == "rgb(251, 250, 247)"


@pytest.mark.slow
def test_page_switches_to_chinese_and_back(browser, url):
    go(browser, f"{url}#/step/2", "step")
    press(browser, "l")
    eventually(browser, lambda: "第 2 步" in text(browser))
    assert browser.execute_script("return document.documentElement.lang") == "zh"
    assert "3 组中有 2 组有信号" in text(browser)
    press(browser, "l")
    eventually(browser, lambda: "Step 2" in text(browser))


@pytest.mark.slow
def test_hostile_answers_are_shown_and_not_executed(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    evil = HOSTILE.replace("\ud800", "")
    huge = "<b>x</b>" * 131_072
    texts = [evil, "\u202eright to left", "\x1b[31mred", huge]
    write_tokens(run, 1, [prompt(0, 0, evil), *(row(0, 0, i, each) for i, each in enumerate(texts))])
    add_step(run, 2, said=[evil, *["<script>alert(1)</script>"] * 5000])
    with looking(run) as server:
        go(browser, f"{server.url}#/group/1/0?c=0&t=0", "group")
        assert "<script>alert(1)</script>" in text(browser)
        assert "\\u202eright to left" in text(browser)
        assert "\\x1b[31mred" in text(browser)
        assert len(text(browser)) < 20_000  # the megabyte is cut, and a button shows the rest
        [button] = found(browser, ".tok .more")
        assert "1048576" in button.text
        browser.execute_script("arguments[0].click()", button)
        assert len(text(browser)) > 1_000_000
        for view in VIEWS:
            go(browser, f"{server.url}#/{view}", view)
        assert len(found(browser, "script")) == 3  # the import map, the words and the page
        assert not found(browser, "main img, main script, main iframe, main b > script")
        go(browser, f"{server.url}#/group/2/0", "group")
        assert 1500 < len(found(browser, ".tok")) < 1700
        assert found(browser, ".flow > button.more")
    assert silent(browser)


@pytest.mark.slow
def test_conversations_show_turns_and_given_tokens(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    said = [row(0, 0, 0, "call"), row(0, 0, 1, "{42}", kind="given", rule="given", push=None), row(0, 0, 2, "so 42")]
    write_tokens(run, 1, said)
    with looking(run) as server:
        go(browser, f"{server.url}#/group/1/0", "group")
        assert [turn.text for turn in found(browser, ".turn")] == ["policy", "given", "policy"]
        assert found(browser, ".tok.given")[0].text == "{42}"


@pytest.mark.slow
def test_conversations_name_called_tools_and_answers_without_tokens(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    said = [row(0, 0, 0, "call"), row(0, 0, 1, "{42}", kind="given", rule="given", push=None), row(0, 0, 2, "so 42")]
    turns = {"0/0/0": [["add", "<b>x</b>"], ["tool add", "tool <b>x</b>"], []]}
    write_tokens(run, 1, said, turns=turns, silent={"0": [1, 3]})
    lines(run / "metrics.jsonl", [metric(1)])
    single_file.write_page([RunReader(run)], tmp_path / "page.html")
    with looking(run) as server:
        for address in (server.url, (tmp_path / "page.html").as_uri()):
            go(browser, f"{address}#/group/1/0", "group")
            shown = ["policy, calls add, <b>x</b>", "given, tool add, tool <b>x</b>", "policy"]
            assert [turn.text for turn in found(browser, ".turn")] == shown
            assert "before the policy spoke: answer 1, 3." in text(browser)


@pytest.mark.slow
def test_damaged_file_is_reported_and_the_others_are_shown(browser, tmp_path):
    run = small_run(tmp_path / "run", steps=2)
    (run / "tokens" / "step-000001.parquet").write_bytes(b"PAR1")
    with looking(run) as server:
        browser.get("about:blank")
        browser.get(f"{server.url}#/group/1/0")
        eventually(browser, lambda: "is damaged" in text(browser))
        go(browser, f"{server.url}#/group/2/0", "group")
    browser.get_log("browser")


@pytest.mark.slow
def test_answers_that_begin_alike_are_one_mover_with_their_sum(browser, tmp_path):
    """Three answers share the first token and two the second. Each copy alone has less gradient than token c."""
    run = run_folder(tmp_path / "run")
    same = {"logprob_after": -0.2, "gradient": 0.2, "push": 0.2}
    against = {**same, "reward": 0.0, "push": -0.1, "advantage": -0.5}
    rows = [row(0, c, i, text, **(against if c == 2 else same)) for c in range(2) for i, text in enumerate("ab")]
    rows += [row(0, 2, 0, "a", **against), row(0, 2, 1, "c", gradient=0.3, push=-0.3, logprob_after=-0.9)]
    rows += [row(0, 3, 0, "d", gradient=0.1, push=0.1, logprob_after=-0.4)]
    write_tokens(run, 1, [{**each, "token": ord(each["text"])} for each in rows], dtype="bfloat16")
    with looking(run) as server:
        go(browser, f"{server.url}#/movers/1", "movers")
        tables = [
            [[cell.text for cell in line.find_elements(By.TAG_NAME, "td")] for line in found(table, "tbody tr")]
            for table in found(browser, "section.list table")
        ]
        says = text(browser)
        go(browser, f"{server.url}#/group/1/0?c=0&t=1", "group")
        share = [line.text for line in found(browser, ".numbers div") if "share" in line.text]
    rose = "together pushed up, and its log-prob rose by 0.3."
    assert [line[0] for line in tables[0]] == ["c", "a", "b"]  # d moved by less than the rounding
    assert tables[0][1] == ["a", "0.3", f"3 answers, ratio 1: {rose}", "group 0, token 0, 3 answers"]
    assert [line[:2] for line in tables[1]] == [["a", "42.9%"], ["b", "28.6%"], ["c", "21.4%"], ["d", "7.1%"]]
    assert "Changes below 0.13 nats are within the rounding of bfloat16" in says
    assert "All are below 0.0001." in says
    assert share == ["share of the group's gradient, 2 identical answers\n28.6%"]


@pytest.mark.slow
def test_missing_quantities_are_disabled_and_legend_shows_clipping(browser, tmp_path):
    run = run_folder(tmp_path / "run")
    rows = [row(0, 0, i, f"t{i}", logprob_after=-0.25, ref_logprob=None) for i in range(99)]
    write_tokens(
        run,
        1,
        [*rows, *(row(0, 0, i, "far", logprob_after=x, ref_logprob=None) for i, x in ((99, -0.01), (100, -2.0)))],
    )
    with looking(run) as server:
        go(browser, f"{server.url}#/group/1/0", "group")
        closed = [option.get_attribute("value") for option in found(browser, "#by option:disabled")]
        assert closed == ["ratio", "gap", "drift", "rule"]
        assert found(browser, ".legend")[0].text == "≤ -0.25 to ≥ 0.25"


@pytest.mark.slow
def test_movers_show_changes_and_missing_step_names_the_nearest(browser, tmp_path):
    run = run_folder(tmp_path / "run", CONFIG)
    for step in (1, 2, 3):
        write_tokens(run, step, [row(0, 0, 0, "a")])
    with looking(run) as server:
        go(browser, f"{server.url}#/movers/2", "movers")
        assert [head.text for head in found(browser, "section.list th")][:2] == ["token", "change"]
        assert found(browser, "section.list td")[1].text == "0.1"
        go(browser, f"{server.url}#/step/40", "step")
        assert "Recorded are steps 1 to 3; the nearest is Step 3" in text(browser)
        assert found(browser, "main a[href='#/step/3']")


@pytest.mark.slow
def test_run_is_live_until_its_last_step_or_10_minutes_without_news(browser, tmp_path):
    run = small_run(tmp_path / "run", steps=8)
    with looking(run) as server:
        go(browser, f"{server.url}#/run", "run")
        eventually(browser, lambda: found(browser, "#live")[0].text == "live")
        add_step(run, 9)  # the last planned step
        eventually(browser, lambda: found(browser, "#live")[0].text == "ended")
    other = small_run(tmp_path / "other", steps=2)
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        os.utime(other / name, (1e9, 1e9))
    with looking(other) as server:
        go(browser, f"{server.url}#/run", "run")
        eventually(browser, lambda: found(browser, "#live")[0].text == "no news for 10 minutes")


@pytest.mark.slow
def test_both_of_two_runs_are_live(browser, tmp_path):
    one, two = small_run(tmp_path / "one", steps=3), small_run(tmp_path / "two", steps=2)

    def turn(view):
        browser.execute_script(f"location.hash = '#/{view}/3'")
        eventually(browser, lambda: found(browser, f"main[data-view={view}][aria-busy=false]"))

    def shared():
        turn("why")
        turn("pair")
        return found(browser, "main .lede")[0].text

    with looking(one, two) as server:
        go(browser, f"{server.url}#/pair/3", "pair")
        assert shared() == "0 questions of this step are in both runs."
        time.sleep(3)  # the page has polled once
        add_step(two, 3)
        eventually(browser, lambda: shared() == "3 questions of this step are in both runs.")


@pytest.mark.slow
def test_language_is_remembered(browser, url):
    go(browser, f"{url}#/run", "run")
    press(browser, "l")
    eventually(browser, lambda: "中文" not in found(browser, "#language")[0].text)
    go(browser, f"{url}#/run", "run")
    try:
        titles = [title.text for title in found(browser, "svg.chart text.title")]
        assert {"奖励", "无信号的组"} <= set(titles)
        assert "奖励 0.75" in [label.text for label in found(browser, "svg.chart text.label")]
        assert "tiny，任务 arithmetic" in text(browser)
        assert "平均奖励从第 1 步的 0.350 变为第 9 步的 0.750。" in text(browser)
    finally:
        press(browser, "l")
    eventually(browser, lambda: found(browser, "#language")[0].text == "中文")


@pytest.mark.slow
def test_two_runs_share_a_color_scale_and_count_shown_answers(browser, tmp_path):
    runs = [run_folder(tmp_path / name) for name in ("one", "two")]
    for run, after in zip(runs, (-0.4, -0.1), strict=True):
        write_tokens(run, 1, [prompt(0, 0, "Q"), *(row(0, c, 0, "x", logprob_after=after) for c in range(6))])
    with looking(*runs) as server:
        go(browser, f"{server.url}#/pair/1", "pair")
        assert text(browser).count("4 of 6 answers are shown") == 2
        assert "-0.4 to 0.4" in found(browser, ".legend")[0].text
        strength = [node.get_attribute("style").split("/")[1] for node in found(browser, ".two .tok")]
        assert [float(part.strip(" );")) for part in strength] == [0.155] * 4 + [0.62] * 4
