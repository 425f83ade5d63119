"""The page of the server in a real browser."""

import shutil
import time

import pytest
from toy_engine import ToyEngine
from toy_server import served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
expect = playwright.expect
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")

ANSWER = "<b>Hello</b> 中文<|im_end|>".encode()


def answer(tokens, seed):
    begin = bytes(tokens).rindex(b"assistant\n") + len(b"assistant\n")
    return ANSWER[(len(tokens) - begin) % len(ANSWER)]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        yield play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])


@pytest.fixture
def tab(browser):
    """A tab; fails if the page complained of anything but a request that was refused."""
    complaints: list[str] = []
    tab = browser.new_page()
    tab.set_default_timeout(8000)
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    yield tab
    assert [text for text in complaints if "401 (Unauthorized)" not in text] == []
    tab.close()


def test_a_conversation_with_two_turns_and_a_new_one(tab):
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    with served(ToyEngine(answer=answer, context_length=2000)) as url:
        tab.goto(url)
        expect(tab).to_have_title("toy")
        expect(tab.locator("#models")).to_be_hidden()
        for turn in (1, 2):
            tab.fill("#input", f"question {turn}")
            tab.press("#input", "Enter")
            expect(tab.locator(".assistant").nth(turn - 1)).to_have_text("<b>Hello</b> 中文")
            expect(tab.locator("#state")).to_contain_text("tokens in")
            expect(tab.locator("#send")).to_have_text("Send")
        texts = tab.locator(".message").all_inner_texts()
        tab.click("#reset")
        assert tab.locator(".message").count() == 0
    assert texts == ["question 1", "<b>Hello</b> 中文", "question 2", "<b>Hello</b> 中文"]
    assert all(address.startswith((url, "data:")) for address in asked)


def test_a_model_without_a_template_continues_prompts_and_stop_ends_an_answer(tab):
    engine = ToyEngine(
        answer=lambda *_: ord("z"), seconds_per_call=0.02, slots=1, context_length=5000
    )
    with served(engine, template=None) as url:
        tab.goto(url)
        expect(tab.locator("#chat")).to_be_disabled()
        tab.fill("#tokens", "4000")
        tab.fill("#input", "once")
        tab.click("#send")
        expect(tab.locator(".assistant")).to_contain_text("zzzzz")
        tab.click("#send")
        expect(tab.locator("#state")).to_have_text("stopped")
        end = time.monotonic() + 5
        while engine.is_active(0) and time.monotonic() < end:
            time.sleep(0.02)
        assert not engine.is_active(0)


def test_an_adapter_is_chosen_on_the_page(tab):
    engine = ToyEngine(answer=lambda *_: ord("a"), adapters=("formal",), context_length=500)
    with served(engine) as url:
        tab.goto(url)
        expect(tab.locator("#model option")).to_have_text(["toy", "formal"])
        tab.fill("#tokens", "3")
        for name, text in (("formal", "bbb"), ("toy", "aaa")):
            tab.select_option("#model", name)
            tab.fill("#input", name)
            tab.click("#send")
            expect(tab.locator(".assistant").last).to_have_text(text)
            expect(tab.locator("#send")).to_have_text("Send")


def test_the_page_sends_the_api_key_and_says_what_is_wrong(tab):
    with served(ToyEngine(answer=answer), api_key="sesame") as url:
        tab.goto(url)
        expect(tab.locator("#state")).to_contain_text("the API key is missing or wrong")
        tab.fill("#key", "sesame")
        tab.dispatch_event("#key", "change")
        expect(tab).to_have_title("toy")
