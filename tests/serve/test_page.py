"""Test the page of the service in a real browser: a chat, and a group with its advantages."""

from __future__ import annotations

import math
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from conftest import CountDigits
from pellucid.types import Reward
from serving import running

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium and chromium-driver"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser):
    with running(task=CountDigits()) as (served, url):
        served.policy.eos_ids = (-1,)  # the tiny model may end its answer at once
        browser.get(url)
        yield browser


def eventually(page, condition):
    return WebDriverWait(page, 20).until(lambda _: condition())


def found(page, css):
    return page.find_elements(By.CSS_SELECTOR, css)


@pytest.mark.slow
def test_chat_shows_turns_and_can_be_cleared(page):
    eventually(page, lambda: found(page, "#health")[0].text == "ok")
    found(page, "#tokens")[0].clear()
    found(page, "#tokens")[0].send_keys("12")
    for question, turns in (("2+3=", 2), ("7*8=", 4)):
        found(page, "#say")[0].send_keys(question)
        found(page, "#send")[0].click()
        eventually(
            page, lambda turns=turns: len(found(page, ".turn")) == turns and found(page, "#send")[0].is_enabled()
        )
    said = [turn.text for turn in found(page, ".turn")]
    assert said[0] == "2+3="
    assert said[2] == "7*8="
    assert said[1]
    found(page, "#forget")[0].click()
    assert not found(page, ".turn")


@pytest.mark.slow
def test_group_is_shown_side_by_side_with_its_advantages(page):
    found(page, "#draw")[0].click()
    eventually(page, lambda: len(found(page, ".card")) == 8)
    advantages = [float(card.text.splitlines()[0].rpartition("advantage ")[2]) for card in found(page, ".card")]
    rewards = [float(card.text.split("reward ")[1].split(",")[0]) for card in found(page, ".card")]
    assert max(advantages) > 0 > min(advantages)
    assert abs(sum(advantages)) < 0.05
    assert rewards.index(max(rewards)) == advantages.index(max(advantages))
    columns = {card.location["x"] for card in found(page, ".card")}
    assert len(columns) > 1, "side by side"


@pytest.mark.slow
def test_error_message_of_the_service_is_shown(page):
    found(page, "#size")[0].clear()
    found(page, "#size")[0].send_keys("64")
    found(page, "#draw")[0].click()
    eventually(page, lambda: found(page, "#group .error"))
    assert "at most 16" in found(page, "#group .error")[0].text


def test_browser_console_has_no_errors(page):
    grave = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE" and "400" not in entry["message"]]
    assert not [entry for entry in grave if "favicon" not in entry["message"]]


@pytest.mark.slow
def test_page_asks_for_the_token_of_a_locked_service(browser):
    with running(token="open-sesame") as (_, url):
        browser.get(url)
        eventually(browser, lambda: found(browser, "#health")[0].text == "ok")
        assert not found(browser, "#token")[0].is_displayed()
        found(browser, "#tokens")[0].clear()
        found(browser, "#tokens")[0].send_keys("12")
        found(browser, "#say")[0].send_keys("2+3=")
        found(browser, "#send")[0].click()
        eventually(browser, lambda: found(browser, "#chat .error"))
        assert "needs its token" in found(browser, "#chat .error")[0].text
        found(browser, "#token")[0].send_keys("open-sesame")
        eventually(browser, found(browser, "#send")[0].is_enabled)
        assert found(browser, "#say")[0].get_property("value") == "2+3="  # the question is still there
        found(browser, "#send")[0].click()
        eventually(browser, lambda: len(found(browser, ".turn")) == 3 and found(browser, "#send")[0].is_enabled())
        assert len(found(browser, "#chat .error")) == 1
        assert browser.execute_script("return history.map(each => each.role)") == ["user", "assistant"]


@pytest.mark.slow
def test_card_says_that_an_answer_could_not_be_graded(browser):
    class Failing(CountDigits):
        def reward(self, prompt, completion):
            return Reward(math.nan, error="timed out")

    with running(task=Failing()) as (_, url):
        browser.get(url)
        found(browser, "#draw")[0].click()
        eventually(browser, found(browser, "#draw")[0].is_enabled)
        assert [card.text.splitlines()[0] for card in found(browser, ".card")] == ["not graded"] * 8
