"""The live page in a real browser, where there is one: headless Chromium over the WebDriver protocol, no client library."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import Language, ScriptedExecutor, scattered
from tests.server import test_faults
from tests.server.test_faults import VOCAB, body_of
from tests.waits import line_with, turns

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
serve = test_faults.serve
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason="no Chromium with its driver")


class Browser:
    """One session of a chromedriver that listens on `url`."""

    def __init__(self, url: str) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
        options = {"binary": BROWSER, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._url = url
        self._session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def call(self, method: str, path: str, body: object = None) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, raw, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]

    def session(self, method: str, path: str, body: object = None) -> Any:
        return self.call(method, f"/session/{self._session}{path}", body)

    def run(self, script: str) -> Any:
        return self.session("POST", "/execute/sync", {"script": script, "args": []})

    def text(self, id: str) -> str:
        return str(self.run(f"return document.getElementById('{id}').textContent"))

    def log(self, kind: str) -> list[Any]:
        found: list[Any] = self.session("POST", "/se/log", {"type": kind})
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    popen = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
    if popen.stdout is None:
        raise RuntimeError("no pipe")
    port = line_with(popen, r"successfully on port (\d+)")[0][1]
    opened = Browser(f"http://127.0.0.1:{port}")
    yield opened
    opened.session("DELETE", "")
    popen.terminate()
    popen.wait(10)


def test_the_page_shows_a_server_at_work(browser: Browser, start_server: Any, tmp_path: Path) -> None:
    server = start_server(lambda _: [[97] * 3] * 400)
    server.engine.step_s = 0.02
    asked = threading.Thread(target=lambda: server.client.complete(max_tokens=900))
    asked.start()
    browser.session("POST", "/url", {"url": f"{server.url}/dashboard"})
    end = time.monotonic() + 15
    while not (browser.text("rate") not in ("–", "0.0") and browser.text("status") == "serving") and time.monotonic() < end:
        time.sleep(0.2)
    assert browser.text("status") == "serving" and browser.text("model") == "fake"
    assert 20 < float(browser.text("rate")) < 200, "three tokens every 20 ms or a little more"
    assert browser.text("requests") == "1 + 0"
    points = browser.run("return document.querySelector('#rate-chart polyline').getAttribute('points').split(' ').length")
    assert points >= 1
    picture = base64.b64decode(browser.session("GET", "/screenshot"))
    (tmp_path / "dashboard.png").write_bytes(picture)
    assert picture[:4] == b"\x89PNG" and len(picture) > 10_000
    errors = [entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]
    assert not errors
    messages = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    outside = {url for url in urls if not url.startswith(server.url)}
    assert f"{server.url}/dashboard.json" in urls and not outside, "the page asks nobody else"
    server.server.stop()
    asked.join(20)


@pytest.fixture
def drafting(serve: Any) -> Any:
    """A server over the real engine: trees from a scripted drafter, 5.5 of 8 experts a layer, a quick step for each row count."""
    run = ScriptedExecutor(Language(VOCAB), num_pages=512, guess=scattered(3), delay_s=0.005)
    run.limits = dataclasses.replace(run.limits, experts=8)
    step = run.step
    run.step = lambda plan: dataclasses.replace(step(plan), experts=5.5)  # type: ignore[method-assign]
    return serve(run, speculative={"tree_budget": 6})


def test_the_page_shows_speculation_experts_and_the_threshold(browser: Browser, drafting: Any, tmp_path: Path) -> None:
    bodies = [body_of(100 + i, 450, stream=False) for i in range(6)]
    asked = [threading.Thread(target=drafting.client.post, args=("/v1/completions", body)) for body in bodies]
    browser.session("POST", "/url", {"url": f"{drafting.url}/dashboard"})
    for thread in asked:
        thread.start()
    end, shown = time.monotonic() + 15, ""
    while "5.5 of 8 experts a layer" not in shown and time.monotonic() < end:
        time.sleep(0.1)
        shown = browser.text("step-note")
    assert shown == "5.5 of 8 experts a layer"
    for thread in asked:
        thread.join(30)
    for _ in turns(lambda: drafting.engine.stats().running, "requests"):  # the last step is counted after its answers have gone out
        time.sleep(0.01)
    figures = drafting.client.get("/dashboard.json")[1]
    while browser.run("return history[history.length - 1].steps") < figures["steps"] and time.monotonic() < end + 15:
        time.sleep(0.1)
    bars = {
        id: browser.run(f"return document.querySelectorAll('#{id} rect').length") for id in ("depth-chart", "bucket-chart", "stage-chart")
    }
    assert bars == {"depth-chart": len(figures["accepted_per_position"]), "bucket-chart": len(figures["buckets"]), "stage-chart": 6}
    assert figures["threshold"] is not None, "every step takes the same time here: further rows are free"
    assert browser.text("threshold").startswith(f"Further rows are cheap from M {figures['threshold']} on")
    (tmp_path / "dashboard.png").write_bytes(base64.b64decode(browser.session("GET", "/screenshot")))
    severe = [entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]
    assert not [message for message in severe if drafting.url in message or "http" not in message], "what an earlier page said is not ours"


def test_the_page_says_when_the_server_is_gone(browser: Browser, start_server: Any) -> None:
    server = start_server()
    browser.session("POST", "/url", {"url": f"{server.url}/dashboard"})
    end = time.monotonic() + 10
    while browser.text("status") != "serving" and time.monotonic() < end:
        time.sleep(0.1)
    server.stop()
    while browser.text("status") != "no answer" and time.monotonic() < end + 10:
        time.sleep(0.1)
    assert browser.text("status") == "no answer"
