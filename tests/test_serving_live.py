"""What people see of a running server: its live page in a real browser, and a Grafana dashboard over its /metrics."""

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest

from faser import cli
from faser.bench.browser import Browser, installed
from faser.bench.client import replay
from faser.bench.metrics import Metrics
from faser.bench.server import Server, free_port

pytestmark = pytest.mark.server

KEY = "an-admin-key-of-a-test"
PAGE = ("", "page.html", "page.css", "page.js", "figures.js", "charts.js", "ab.js")
COLOUR = """interval({cut: {differs: CUT}}, {differs: 1, better: "lower", relative: 0.1, relative_low: 0.05,
  relative_high: 0.2}, 1).querySelectorAll("line")[1].getAttribute("class")"""
"""Of a metric that got worse; CUT: whether the arms' shares of requests that were cut short differ."""
BROWSER = pytest.mark.skipif(installed() is None, reason="no Chromium here (Debian: apt-get install chromium)")
PROMETHEUS = pytest.mark.skipif(which("prometheus") is None, reason="no Prometheus here (apt-get install prometheus)")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One with an A/B test by short windows, so that every series is there."""
    flags = ["--policy", "a=static:2", "--policy", "b=random:1", "--split-window-s", "4", "--split-washout-s", "1"]
    with Server([*flags, "--faser-deadline-ms", "1000"], env={"FASER_ADMIN_KEY": KEY}) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def get(server: Server, route: str, key: str | None = KEY) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False)


def post(server: Server, route: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    httpx.post(f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False).raise_for_status()


def ask(server: Server, requests: int = 6) -> None:
    prompts = [f"Write a short story about the number {i}." for i in range(requests)]
    asyncio.run(replay(server.url, prompts, concurrency=requests, max_tokens=30))


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests without a pause while open."""
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            ask(server)

    streams = threading.Thread(target=keep_asking)
    streams.start()
    try:
        yield
    finally:
        done.set()
        streams.join()


def test_the_last_minutes_are_the_counters_of_metrics(server: Server) -> None:
    ask(server)
    ask(server, 1)
    answer = get(server, "live").json()
    counts = server.metrics("faser:")
    seconds = answer["seconds"]
    by_length = counts.by("faser:verify_length_total", "length")
    assert {str(k): sum(s["lengths"][k] for s in seconds) for k in range(8)} == by_length
    assert sum(by_length.values()) > 30
    assert sum(s["accepted"] for s in seconds) == counts.total("faser:accepted_tokens_total") > 0
    vllm = server.metrics("vllm:")
    after_the_first = vllm.total("vllm:generation_tokens_total") - vllm.total("vllm:request_success_total")
    assert 0 <= after_the_first - sum(s["written"] for s in seconds) <= 8  # the last step is told when another begins
    ran = sum(counts.by("faser:draft_depth_total", "depth").values())
    assert sum(s["steps"] for s in seconds) == ran >= counts.total("faser:steps_total")
    assert ran <= counts.total("faser:decisions_total")
    assert all(0 <= s["busy"] <= 1.001 and s["running"] <= 6.01 for s in seconds)
    assert {s["arm"] for s in seconds} <= {"a", "b"} | {""}
    assert answer["now"] == pytest.approx(time.time(), abs=60)
    (engine,) = answer["engines"]
    assert engine["decisions"] == counts.total("faser:decisions_total")
    newest = seconds[-1]["t"]
    assert [s["t"] for s in get(server, f"live?since={newest}").json()["seconds"]] == [newest]
    assert get(server, "live?since=x").status_code == 400


def test_arms_are_counted_and_add_up(server: Server) -> None:
    ask(server)
    counts = server.metrics("faser:")
    rows = counts.by("faser:arm_request_steps_total", "arm")
    assert set(rows) <= {"a", "b"}
    assert sum(rows.values()) == counts.total("faser:verify_length_total")
    assert counts.total("faser:arm_verified_tokens_total") == counts.total("faser:verified_tokens_total")
    assert counts.total("faser:arm_accepted_tokens_total") == counts.total("faser:accepted_tokens_total")


def test_the_page_comes_without_a_key_and_its_data_do_not(server: Server) -> None:
    for path in PAGE:
        answer = get(server, path, key=None)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"//\w|url\(|@import", text)  # nothing from elsewhere
        assert KEY not in text
        assert "static:2" not in text
    assert get(server, "live", key=None).status_code == 404
    assert get(server, "live", key="wrong").status_code == 401
    for path in ("grafana.json", "history.py", "../page.js", "%2e%2e/page.js", "page.js/"):
        assert get(server, path, key=None).status_code == 404
    assert httpx.post(f"{server.url}/faser/", trust_env=False).status_code == 404


@BROWSER
def test_a_person_opens_the_page(server: Server, browser: Browser, tmp_path: Path) -> None:
    browser.open(f"{server.url}/faser", width=360, height=740)
    browser.type("a-wrong-key-of-a-test")
    browser.wait("document.getElementById('state').textContent.includes('key is wrong')")
    assert browser.run("document.getElementById('live').hidden")
    assert browser.run("sessionStorage.length") == 0
    browser.problems.clear()  # Chromium's console notes the 401
    with load(server):
        browser.type(KEY)
        browser.wait("document.getElementById('state').textContent === 'Live'")
        browser.wait("last.seconds.length > 0 && now().tokens > 0 && now().acceptance > 0")
        browser.wait("!document.getElementById('tiles').textContent.includes('–')")
        browser.wait("document.getElementById('conclusion').childElementCount > 0")
        assert browser.run("document.getElementById('ask').checkVisibility()") is False
        for width in (360, 768, 1280):
            for dark in (False, True):
                browser.open(f"{server.url}/faser/", width=width, dark=dark)
                browser.wait("last !== null && document.getElementById('tiles').childElementCount > 0")
                assert browser.run("document.scrollingElement.scrollWidth") <= width
                browser.picture(tmp_path / f"page-{width}-{'dark' if dark else 'light'}.png")
        drawn = "[...document.querySelectorAll('canvas')].map((c) => c.getContext('2d')"
        drawn += ".getImageData(0, 0, c.width, c.height).data.some((v) => v > 0))"
        assert browser.run(drawn) == [True] * 7
        names = browser.run("[...document.querySelectorAll('canvas')].map((c) => c.getAttribute('aria-label'))")
        assert all("Now: " in name and name.count("undefined") == name.count("NaN") == 0 for name in names)
        shown = browser.run("document.body.innerText")
        assert not re.search(r"undefined|NaN|null|\[object", shown)
        assert "static:2" in shown
        assert [browser.run(COLOUR.replace("CUT", cut)) for cut in ("0", "1")] == ["worse", ""]
    assert browser.problems == []
    assert all(url.startswith((server.url, "data:")) for url in browser.asked)
    assert not any(KEY in url for url in browser.asked)


@BROWSER
def test_a_server_that_does_not_answer_is_said_and_nothing_old_passes_for_new(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/faser/")
    browser.type(KEY)
    browser.wait("document.getElementById('state').textContent === 'Live'")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        browser.wait("document.getElementById('state').textContent.includes('does not answer')")
        assert "What is shown is from" in browser.run("document.getElementById('state').textContent")
        figures = browser.run("[...document.querySelectorAll('dd')].map((d) => d.textContent)")
        assert set(figures) == {"–"}
        assert browser.run("document.body.classList.contains('stale')")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    browser.wait("document.getElementById('state').textContent === 'Live'")
    assert not browser.run("document.body.classList.contains('stale')")


def panels(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, dict[str, str]]]:
    """Title and target of every query of the dashboard that `faser grafana` prints."""
    assert cli.main(["grafana"]) == 0
    board = json.loads(capsys.readouterr().out)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    return [(panel["title"], target) for panel in board["panels"] for target in panel["targets"]]


def bench_for_a_while(server: Server) -> None:
    """So that there are fallbacks."""
    post(server, "policy/bench")
    ask(server)
    post(server, "policy/unbench")


def test_every_query_of_the_dashboard_names_what_metrics_has(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server)
    bench_for_a_while(server)
    samples = Metrics.parse(httpx.get(f"{server.url}/metrics", trust_env=False).text).samples
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    for title, target in panels(capsys):
        query = target["expr"]
        names = re.findall(r"\b(?:vllm|faser):\w+", query)
        assert names, title
        by = set(re.findall(r"(?:by|ignoring) \((\w+)\)|{{(\w+)}}", f"{query} {target['legendFormat']}"))
        by = {one or other for one, other in by}
        for name in names:
            assert name in labels, f"{title}: {name} is not in /metrics"
            assert not name.endswith("_bucket") or by == {"le"}, title
        assert all(label in labels[names[0]] for label in by), title


@PROMETHEUS
def test_every_query_of_the_dashboard_gives_numbers_in_prometheus(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    queries = {t["expr"].replace("$instance", ".*").replace("$__rate_interval", "15s") for _, t in panels(capsys)}
    assert not [query for query in queries if "$" in query]
    with prometheus(server, tmp_path) as at, load(server):
        bench_for_a_while(server)
        missing, until = set(queries), time.monotonic() + 90
        while missing and time.monotonic() < until:
            time.sleep(1)
            missing = {query for query in missing if not numbers(at, query)}
    assert not missing


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """One that scrapes `server` each second."""
    target = server.url.removeprefix("http://")
    config = folder / "prometheus.yml"
    config.write_text(
        f"scrape_configs: [{{job_name: t, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]"
    )
    at = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={at}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while not ready(at) and time.monotonic() < until:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield f"http://{at}"
    finally:
        process.terminate()
        process.wait()


def ready(at: str) -> bool:
    try:
        return httpx.get(f"http://{at}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def numbers(at: str, query: str) -> list[Any]:
    """What the query gives now, if that is finite numbers."""
    answer = httpx.get(f"{at}/api/v1/query", params={"query": query}, trust_env=False).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found = answer["data"]["result"]
    return found if all(re.fullmatch(r"[-+.\de]+", each["value"][1]) for each in found) else []
