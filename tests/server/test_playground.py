# SPDX-License-Identifier: Apache-2.0
"""The playground in a real browser, against the real server and its real model."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

os.environ.update(SE_OFFLINE="true", SE_AVOID_STATS="true")  # Selenium fetches and sends nothing

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.server.process import Server

CHROMIUM = Path("/usr/bin/chromium")
CHROMEDRIVER = Path("/usr/bin/chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-sync")
PROMPT = "Tell me a long story about a lighthouse keeper who finds an old map."
MAX_TOKENS = 150
"""The model has not ended its story by then, so the figures do not depend on what it says."""
BUDGET, BUFFER = 96, 32


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    missing = [str(path) for path in (CHROMIUM, CHROMEDRIVER) if not path.exists()]
    if missing:
        reason = (
            f"{' and '.join(missing)} not found: install the Debian packages chromium and "
            "chromium-driver (apt-get install --no-install-recommends chromium chromium-driver)"
        )
        if os.environ.get("RANDKV_NO_SKIPS"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(executable_path=str(CHROMEDRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The playground as a reader sees it: ids are ``a-NAME`` and ``b-NAME`` in its two panes.

    Attributes:
        expected: Parts of console messages that a test provokes.
    """

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.expected: tuple[str, ...] = ()

    def open(self, width: int = 1400, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(f"{self.url}/")
        self.wait(lambda: self.text("status") == "Ready.")

    def find(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.find(name).text

    def figure(self, name: str) -> int:
        return int(self.text(name).replace(",", ""))

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def fill(self, **fields: str | int) -> None:
        for name, value in fields.items():
            field = self.find(name.replace("_", "-"))
            field.clear()
            field.send_keys(str(value))

    def wait(self, until: Callable[[], Any], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"status: {self.text('status')!r}"
            time.sleep(0.05)

    def is_over(self) -> bool:
        return self.find("run").is_enabled() and not self.find("stop").is_enabled()

    def run(self) -> None:
        self.find("run").click()
        self.wait(self.is_over)

    def check_console(self) -> None:
        entries = self.driver.get_log("browser")
        bad = [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]
        assert [text for text in bad if not any(part in text for part in self.expected)] == []

    def check_requests(self) -> None:
        names = self.script("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert any(name.startswith(f"{self.url}/v1/models") for name in names)
        local = (f"{self.url}/", f"blob:{self.url}/", "data:")
        assert [name for name in names if not name.startswith(local)] == []

    @property
    def sideways_overflow(self) -> int:
        """Pixels that the document is wider than the window."""
        return self.script("return document.documentElement.scrollWidth - innerWidth")


@pytest.fixture
def page(browser: webdriver.Chrome, default_server: Server) -> Iterator[Page]:
    """An open playground. Whatever a test does with it, it asks no other host and logs no error."""
    page = Page(browser, default_server.url)
    browser.get_log("browser")
    page.open()
    yield page
    page.check_requests()
    page.check_console()


def report_of(url: str, policy: dict[str, Any], prompt: str = PROMPT) -> tuple[Any, Any]:
    """Usage and report of the same request without the page and without a stream."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "seed": 1,
        "kv_cache_policy": policy,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    return answer["usage"], answer["kv_cache"]


def test_the_page_may_load_nothing_from_elsewhere(default_server: Server) -> None:
    with urllib.request.urlopen(f"{default_server.url}/", timeout=30) as response:
        policy = response.headers["Content-Security-Policy"]
        kind = response.headers["Content-Type"]
    assert kind.startswith("text/html")
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy


def test_it_says_what_it_talks_to(page: Page, default_server: Server) -> None:
    with urllib.request.urlopen(f"{default_server.url}/v1/kv_cache/policy", timeout=30) as response:
        policy = json.load(response)
    facts = page.text("facts")
    assert "smollm2-135m-instruct" in facts
    assert "30 layers × 3 KV heads" in facts
    assert f"{policy['bytes_per_token']:,} bytes per token" in facts
    assert page.find("a-dense").is_selected()
    assert page.find("b-randkv").is_selected()
    assert page.find("b-budget").get_property("value") == str(BUDGET)
    assert page.find("b-buffer").get_property("value") == str(BUFFER)


def test_two_answers_stream_and_show_what_the_server_reports(
    page: Page, default_server: Server
) -> None:
    page.fill(prompt=PROMPT, max_tokens=MAX_TOKENS)
    page.find("run").click()
    for pane in "ab":
        page.wait(lambda pane=pane: page.text(f"{pane}-content"))
    assert "streaming" in page.text("a-state") + page.text("b-state")
    page.wait(lambda: page.text("b-physical").startswith("≈"))
    assert "estimates" in page.text("b-source")
    page.wait(page.is_over)

    policies = {
        "a": {"type": "dense"},
        "b": {"type": "randkv", "budget": BUDGET, "buffer_size": BUFFER},
    }
    for pane, policy in policies.items():
        usage, report = report_of(default_server.url, policy)
        assert len(page.text(f"{pane}-content")) > 200
        assert page.text(f"{pane}-source") == "reported by the server"
        assert page.figure(f"{pane}-completion") == usage["completion_tokens"] == MAX_TOKENS
        assert page.figure(f"{pane}-physical") == report["physical_tokens"]
        assert page.figure(f"{pane}-evicted") == report["evicted_tokens"]
        assert page.figure(f"{pane}-rounds") == report["rounds"]
        computed = report["physical_tokens"] + report["evicted_tokens"]
        assert page.figure(f"{pane}-absolute") == computed
        assert computed == usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert float(page.text(f"{pane}-rate")) > 0
        assert report["request_key"] == "seed:1"
    assert page.figure("a-physical") == page.figure("a-absolute")
    assert page.figure("b-rounds") > 0
    assert page.figure("b-physical") < page.figure("b-absolute")
    held = page.figure("b-physical") / page.figure("b-absolute")
    track, bar = (page.find(f"b-bar-{name}").rect["width"] for name in ("absolute", "physical"))
    assert bar / track == pytest.approx(held, abs=0.01)


def test_the_retention_map_of_each_layer_is_shown(page: Page, default_server: Server) -> None:
    page.fill(prompt=PROMPT, max_tokens=MAX_TOKENS)
    page.run()
    image = page.find("b-image")
    page.wait(lambda: image.get_property("naturalWidth") > 0)
    assert image.is_displayed()
    assert not page.find("a-map-block").is_displayed()
    first = image.get_attribute("src")
    page.fill(b_layer=29)
    page.wait(lambda: image.get_attribute("src") != first)
    page.wait(lambda: image.get_property("naturalWidth") > 0)
    assert "layer 29" in (image.get_attribute("alt") or "")
    assert not page.find("b-map-error").is_displayed()

    link = page.find("b-json").get_property("href")
    query = {name: values[0] for name, values in parse_qs(urlsplit(str(link)).query).items()}
    usage, report = report_of(
        default_server.url, {"type": "randkv", "budget": BUDGET, "buffer_size": BUFFER}
    )
    assert query == {
        "request_key": report["request_key"],
        "prompt_tokens": str(usage["prompt_tokens"]),
        "computed_tokens": str(report["physical_tokens"] + report["evicted_tokens"]),
        "budget": str(BUDGET),
        "buffer_size": str(BUFFER),
        "seed": "0",
        "layer": "29",
        "format": "json",
    }
    with urllib.request.urlopen(str(link), timeout=30) as response:
        json.load(response)


def test_a_refusal_is_shown_in_the_server_s_words(page: Page, default_server: Server) -> None:
    page.expected = ("status of 400",)
    prompt = "Say <b>yes</b>. " + "The keeper of the lighthouse counted every wave. " * 20
    with pytest.raises(urllib.error.HTTPError) as refused:
        report_of(
            default_server.url, {"type": "randkv", "budget": BUDGET, "buffer_size": BUFFER}, prompt
        )
    assert refused.value.code == 400
    message = json.load(refused.value)["error"]["message"]
    page.fill(prompt=prompt, max_tokens=8)
    page.run()
    assert page.find("b-error").is_displayed()
    assert page.text("b-error") == message
    assert message in page.text("status")
    assert "kv_cache_policy.budget" in message
    assert page.text("b-content") == ""
    assert page.text("a-content")
    assert not page.find("a-error").is_displayed()

    page.expected = ("status of 400",)
    page.fill(prompt=PROMPT)
    page.run()
    assert not page.find("b-error").is_displayed()
    assert page.text("status").startswith("Done.")


def test_stop_ends_both_streams(page: Page) -> None:
    page.fill(max_tokens=2000)
    page.find("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    for pane in "ab":
        page.wait(lambda pane=pane: page.text(f"{pane}-content"))
    assert not page.find("run").is_enabled()
    page.find("stop").click()
    page.wait(page.is_over, seconds=5)
    assert page.text("status") == "Stopped."
    shown = [page.text(f"{pane}-content") for pane in "ab"]
    for pane in "ab":
        assert "stopped" in page.text(f"{pane}-state")
        assert "estimates" in page.text(f"{pane}-source")
        assert page.text(f"{pane}-physical").startswith("≈")
    time.sleep(1)
    assert [page.text(f"{pane}-content") for pane in "ab"] == shown


@pytest.mark.parametrize("width", [380, 1400])
def test_nothing_is_cut_off(page: Page, width: int, tmp_path: Path) -> None:
    page.open(width)
    assert page.sideways_overflow <= 0
    page.fill(prompt=PROMPT, max_tokens=40)
    page.run()
    page.wait(lambda: page.find("b-image").get_property("naturalWidth") > 0)
    assert page.sideways_overflow <= 0
    assert page.driver.save_screenshot(str(tmp_path / f"{width}.png"))
    left, right = page.find("pane-a").rect, page.find("pane-b").rect
    assert (left["y"] == right["y"]) == (width == 1400)


def test_every_control_has_a_name(page: Page) -> None:
    nameless = page.script(
        "return [...document.querySelectorAll('input, textarea, button')].filter((e) =>"
        " !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim())"
        ".map((e) => e.id)"
    )
    assert nameless == []
