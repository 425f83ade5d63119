"""The page of graphtrain watch in a real browser, while files of runs grow."""

import http.client
import json
import shutil
import signal
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from places import Place
from written_runs import CONFIG, append, records, write_checkpoint, write_goodput

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("vl_convert", reason="vl-convert, for the charts of the page, is not installed")
expect = playwright.expect
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
POINTS = "name => charts.get(name)?.view?.data('rows').map(one => [one.name, one.step])"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with a run of a hostile name, a killed one, and one that has not begun."""
    path = tmp_path_factory.mktemp("watch")
    first, killed = path / HOSTILE.replace("/", ""), path / "killed"
    append(first, records(1, 20))
    write_goodput(first, "completed")
    write_checkpoint(first, 10)
    (first / "config.toml").write_text(CONFIG)
    spike = {"step": 7, "on_spike": "skip", "loss": None, "grad_norm": 3.0, "documents": {}}
    append(first, [spike], "spikes.jsonl")
    samples = [{"step": step, "prompt": HOSTILE, "text": f"text {step}"} for step in (10, 20)]
    append(first, samples, "samples.jsonl")
    append(killed, records(1, 3))
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe damaged\n{"step": 4, "lo')
    write_goodput(killed, None)
    (path / "later").mkdir()
    return path


@pytest.fixture(scope="module")
def url(here):
    """Address of the command, which SIGTERM ends with 0."""
    place = Place(here, here / "cache")
    runs = sorted(path.name for path in here.iterdir())
    with place.start("watch", *runs, "--port", "0") as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            yield line.removeprefix("listening on ").partition(";")[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.fixture(scope="module")
def tab(url):
    """The page, drawn; fails if it complained, or asked for anything but its own server."""
    complaints: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.set_default_timeout(20_000)
        tab.on("request", lambda one: complaints.append(one.url) if url not in one.url else None)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(url)
        tab.wait_for_selector("body[data-drawn=yes]")
        yield tab
        assert [one for one in complaints if not one.startswith("data:")] == []


def wait_for_points(tab, count: int) -> None:
    """Wait until the curve of the loss has a number of points; the page's policy forbids eval."""
    end = time.monotonic() + 20
    while len(found := tab.evaluate(POINTS, "loss") or []) != count:
        assert time.monotonic() < end, found
        tab.wait_for_timeout(50)


def test_curves_grow_while_the_file_of_a_run_grows(tab, here):
    wait_for_points(tab, 23)
    append(here / "later", records(1, 5))
    wait_for_points(tab, 28)
    later = [step for name, step in tab.evaluate(POINTS, "loss") if name == "later"]
    assert later == [1, 2, 3, 4, 5]
    expect(tab.locator("#runs")).to_contain_text("later")


def test_a_run_that_is_resumed_replaces_its_curve(tab, here):
    append(here / "other", records(1, 2))
    (here / "other" / "metrics.jsonl").replace(here / "later" / "metrics.jsonl")
    wait_for_points(tab, 25)
    later = [step for name, step in tab.evaluate(POINTS, "loss") if name == "later"]
    assert later == [1, 2]


def test_hostile_names_and_samples_are_shown_as_text(tab):
    expect(tab.locator("#runs")).to_contain_text(HOSTILE.replace("/", ""))
    expect(tab.locator("#starts")).to_contain_text("<b>host</b>")
    expect(tab.locator("#samples")).to_have_text(f"{HOSTILE}{HOSTILE}text 20")
    tab.select_option("#sample-step", "10")
    expect(tab.locator("#samples")).to_contain_text("text 10")
    assert tab.title() == "graphtrain watch" and tab.locator("img").count() == 0


def test_plan_checkpoints_spikes_and_goodput_are_shown(tab):
    plan = tab.locator("#plan tbody tr").first
    expect(plan).to_contain_text("v5e:1x1")
    expect(plan).to_contain_text("250 ms")
    expect(plan).to_contain_text("estimate")
    assert tab.evaluate("charts.get('memory_bytes').view.data('plans').length") == 1
    expect(tab.locator("#checkpoints tbody tr")).to_have_count(1)
    expect(tab.locator("#checkpoints")).to_contain_text("whole")
    expect(tab.locator("#spikes tbody tr")).to_contain_text("not finite")
    expect(tab.locator("#goodput")).to_contain_text("50 % of 10 s")
    expect(tab.locator("#runs")).to_contain_text("20 of 100")
    expect(tab.locator("#runs")).to_contain_text("killed or lost")


def test_what_is_wrong_with_files_is_said(tab):
    problems = tab.locator("#problems")
    expect(problems).to_contain_text("killed: metrics.jsonl: left out 1 damaged line")
    expect(problems).to_contain_text("killed: metrics.jsonl ends with half a line")
    expect(problems).to_contain_text("config.toml does not exist yet")


def test_the_page_fits_a_narrow_window(tab):
    tab.set_viewport_size({"width": 500, "height": 900})
    tab.wait_for_timeout(200)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_of_another_name_gets_no_answer_and_scripts_are_the_servers_own(url):
    address = urlsplit(url).netloc
    status, _, body = ask(address, "/data?known=1:2,x", address)
    assert status == 200 and "runs" in json.loads(body)
    status, _, body = ask(address, "/data", "evil.example")
    assert status == 421 and "runs" not in json.loads(body)
    _, headers, _ = ask(address, "/", address)
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy and "unsafe-eval" not in policy


def ask(address: str, path: str, host: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a request with a Host header; return status, headers and body."""
    with closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
