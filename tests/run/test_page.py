"""The page of a plan in a real browser, opened from the disk with no network."""

import dataclasses
import re
import shutil
from collections.abc import Iterator
from importlib import metadata

import pytest

from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.measured_time import MeasuredTime, PartSeconds
from graphtrain.planning.answer import Answer
from graphtrain.planning.assess import estimate
from graphtrain.planning.collective_origins import CollectiveOrigin
from graphtrain.planning.ledger import ErrorBar
from graphtrain.planning.page import render_page
from graphtrain.planning.remedies import Remedy

pytest.importorskip("vl_convert", reason="vl-convert, for the charts of the page, is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")

CONFIG = """
[program]
target = "v5e:4x4"
mesh = { data = 2, fsdp = 2, stage = 2, tensor = 2 }
model = { layers = 4, embed = 512, heads = 8, mlp = 1024, vocab = 4096 }
batch = { global_batch_size = 64, seq_len = 512, microbatches = 4 }
pipeline = { schedule = "1f1b" }

[run]
directory = "run"
steps = 1
data = { train = "data" }
"""
SEARCHED = [
    {"mesh": {"fsdp": 16}, "rules": ["fsdp"], "step_seconds": 0.2, "peak_bytes": 9e9, "mfu": 0.4},
    {"mesh": {"fsdp": 4, "tensor": 4}, "rules": [], "step_seconds": 0.1, "peak_bytes": 4e9},
]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """A page with every section on it."""
    directory = tmp_path_factory.mktemp("page")
    (directory / "config.toml").write_text(CONFIG)
    program = resolve(load_config(directory / "config.toml").program)
    assessment = estimate(program)
    refused = dataclasses.replace(assessment.memory, compiler_out_of_memory=True)
    causes = [
        CollectiveOrigin(one, "", "", "", index > 0, f"because of {index}")
        for index, one in enumerate(assessment.collectives)
    ]
    answer = Answer(
        program,
        dataclasses.replace(assessment, memory=refused, note="</script><b>not markup</b>"),
        {"step_seconds": ErrorBar(1.2, 1.5, 3)},
        [Remedy(("program.model.remat=full",), assessment)],
        causes,
    )
    path = directory / "plan.html"
    page = render_page("a <title> & more", answer, SEARCHED, "graphtrain plan 'a <b>.toml'")
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as play:
        yield play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])


@pytest.fixture
def opened(browser, html):
    """The page, drawn; fails if it asked for anything, or complained."""
    complaints: list[str] = []
    tab = browser.new_page(viewport={"width": 1180, "height": 900})
    tab.route("**/*", lambda route: route.continue_() if _is_the_file(route) else route.abort())
    tab.on("request", lambda request: _note(complaints, request.url, html))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(html.as_uri())
    tab.wait_for_selector("body[data-drawn=yes]")
    yield tab
    assert complaints == []
    tab.close()


def _is_the_file(route) -> bool:
    return route.request.url.startswith("file:")


def _note(complaints: list[str], url: str, html) -> None:
    if url != html.as_uri():
        complaints.append(f"asked for {url}")


def test_everything_is_drawn_from_the_file_alone(opened):
    for name in ("devices", "memory", "time", "parts", "collectives", "pipeline", "search"):
        assert opened.locator(f"#{name}-chart svg").count() == 1, name
    assert opened.title() == "a <title> & more"
    assert opened.inner_text("#remark") == "</script><b>not markup</b>"
    assert (
        opened.inner_text("#verdict") == "does not fit v5e:4x4: the compiler found no way to fit it"
    )
    assert "runs: 3" in opened.inner_text("#error-bars")
    assert "--set 'program.model.remat=full'" in opened.inner_text("#remedies")
    assert opened.locator("#causes tbody tr").count() == 1
    assert "because of 0" in opened.inner_text("#causes")
    assert "because of 1" in opened.inner_text("#collectives")


def test_the_page_says_what_made_it_and_all_settings(opened):
    made = opened.inner_text("#made")
    assert (
        "graphtrain plan 'a <b>.toml'" in made
        and f"graphtrain {metadata.version('graphtrain')}" in made
    )
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", made)
    settings = opened.locator("#settings").text_content()
    assert "program.batch.global_batch_size64" in settings and "program.mesh.tensor2" in settings


def test_the_table_of_arrays_shows_what_is_split_and_what_is_not(opened):
    rows = opened.locator("#arrays tbody tr")
    up = rows.filter(has_text="layers/mlp/up").inner_text()
    assert "layers 4 over stage × embed 512 over fsdp × mlp 1024 over tensor" in up  # noqa: RUF001
    without = rows.count()
    opened.get_by_label("with optimizer state").check()
    assert rows.count() > 2 * without - 6
    assert rows.filter(has_text="adam/mu/layers/mlp/up").count() == 1


def test_the_mesh_is_a_grid_with_named_axes(opened):
    titles = opened.locator("#devices-chart .role-axis-title text").all_text_contents()
    assert sorted(titles) == ["data 2 × fsdp 2", "stage 2 × tensor 2"]  # noqa: RUF001


def test_each_part_of_the_model_has_its_flops_and_its_roofline(opened):
    rows = opened.locator("#parts tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == [
        "attention projections", "attention scores", "MLP", "LM head",
    ]  # fmt: skip
    assert all("once" in row and "FLOP" in row and "unknown" not in row for row in rows)


@pytest.mark.parametrize("width", [600, 1300])
def test_charts_fill_the_width_and_nothing_is_wider(opened, width):
    opened.set_viewport_size({"width": width, "height": 900})
    opened.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    room = opened.locator("#time-chart").bounding_box()["width"]
    opened.wait_for_function(
        f"document.querySelector('#time-chart svg').getBoundingClientRect().width > {room - 40}"
    )


def test_unknown_is_never_shown_as_zero(browser, html, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a profile of this machine in the checkout would know it
    program = resolve(load_config(html.parent / "config.toml", ["program.target=cpu:16"]).program)
    page = tmp_path / "cpu.html"
    page.write_text(render_page("cpu", Answer(program, estimate(program), {})), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector("body[data-drawn=yes]")
    assert "not known: memory, communication over" in tab.inner_text("#time-unknown")
    figures = tab.inner_text("#figures")
    assert "step time, at least" in figures and "utilization" not in figures
    assert "unknown" in tab.inner_text("#parts") and "0.0 µs" not in tab.inner_text("#parts")
    tab.close()


def test_a_time_by_a_profile_is_said_and_adds_up(browser, html, tmp_path):
    program = resolve(load_config(html.parent / "config.toml", ["program.target=cpu:16"]).program)
    parts = (PartSeconds(32.0, seconds) for seconds in (2.0, 1.0, 0.5))
    measured = MeasuredTime("measured on 2026-01-02", *parts)
    time = StepTime(2.0, 1.0, {}, 0.0, 0.0, starting=0.5, measured=measured)
    answer = Answer(program, dataclasses.replace(estimate(program), time=time), {})
    page = tmp_path / "profile.html"
    page.write_text(render_page("profile", answer), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector("body[data-drawn=yes]")
    assert not tab.is_visible("#time-roofline")
    about = tab.inner_text("#time-profile")
    assert "measured on 2026-01-02" in about and "96.00 s of processor time" in about
    bars = tab.inner_text("#time-chart")
    assert "starting operations" in bars and "500.00 ms" in bars and "3.50 s" in bars
    assert "3.50 s step time profile" in " ".join(tab.inner_text("#figures").split())
    tab.close()


COLOURS = """count => new Set([...document.querySelectorAll("#devices-chart .mark-rect path")]
    .map(square => square.getAttribute("fill"))).size === count"""


@pytest.mark.parametrize(
    ("array", "pieces", "about"),
    [
        ("layers/mlp/up", 8, "layers 4 over stage"),
        ("final_norm/scale", 2, "embed 512 over fsdp"),
        ("embedding/tokens", 4, "vocab 4096 over tensor"),
    ],
)
def test_a_chosen_array_is_shown_where_it_lives(opened, array, pieces, about):
    opened.select_option("#array", f"state/parameters/{array}")
    opened.wait_for_function(COLOURS, arg=pieces)
    told = opened.inner_text("#array-about")
    assert about in told and f"{pieces} different shards" in told


def test_pointing_at_a_device_tells_what_it_holds(opened):
    opened.locator("#devices-chart .mark-rect path").nth(3).hover()
    tip = opened.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    text = tip.inner_text()
    assert "mesh coordinates" in text and "data 0" in text and "shard" in text


def test_headers_sort_the_collectives(opened):
    header = opened.locator("#collectives th", has_text="per step")
    column = "#collectives tbody td:nth-child(3)"
    header.get_by_role("button").click()
    falling = [int(text.replace(",", "")) for text in opened.locator(column).all_inner_texts()]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 1
    assert header.get_attribute("aria-sort") == "descending"
    header.get_by_role("button").click()
    rising = [int(text.replace(",", "")) for text in opened.locator(column).all_inner_texts()]
    assert rising == falling[::-1] or rising == sorted(falling)


def test_memory_is_drawn_beside_the_device(opened):
    rule = "#memory-chart .mark-rule.role-mark line"
    assert opened.locator(rule).count() == 0
    opened.get_by_label("scale to the device").check()
    opened.wait_for_selector(rule, state="attached")


def test_the_schedule_shows_every_pass(opened):
    # 2 stages, 4 microbatches, forward and backward
    assert opened.locator("#pipeline-chart .mark-rect path").count() == 16
    assert "1f1b: 2 stages, 1 round, 4 microbatches" in opened.inner_text("#pipeline-about")


def test_search_results_are_a_table_and_points(opened):
    assert opened.locator("#search tbody tr").count() == 2
    assert "fsdp 4 × tensor 4" in opened.inner_text("#search")  # noqa: RUF001
    assert opened.locator("#search-chart .mark-symbol path").count() == 2
