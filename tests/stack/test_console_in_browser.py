"""The console in a real browser, on the real demo pair: it types, streams, colours and draws.

Needs playwright and a Chromium (Debian: `apt-get install chromium`); skipped, saying so, without.
What the demo pair does not do by itself (refuse, fail half way) is put into the browser's way.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.stack.console import PROMPT, ask, finish, until
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e


def test_an_answer_streams_and_draft_tokens_are_coloured(page: Any) -> None:
    # Told by the page itself whenever the answer grows: it is faster than any look from outside.
    page.evaluate(
        """() => {
            const answer = document.getElementById('answer');
            const progress = document.getElementById('progress');
            window.seen = new Set();
            new MutationObserver(() =>
                window.seen.add(`${progress.textContent} ${answer.children.length}`)
            ).observe(answer, { childList: true });
        }"""
    )
    ask(page, 400)
    finish(page)
    seen = page.evaluate("[...window.seen]")
    partial = {text for text in seen if re.fullmatch(r"Generating\. [1-9]\d*", text)}
    assert len(partial - {"Generating. 400"}) >= 2
    colours = page.evaluate(
        """() => ['#answer span:not([class])', '#answer [class^=draft-]'].map((selector) =>
            getComputedStyle(document.querySelector(selector)).color)"""
    )
    assert colours[0] != colours[1]
    legend = dict(re.findall(r"^(.*): (\d+)$", page.locator("#legend").inner_text(), re.MULTILINE))
    assert sum(map(int, legend.values())) == page.locator("#answer span").count()


def test_the_figures_are_those_of_the_answer(page: Any) -> None:
    with page.expect_response("**/generate") as sent:
        ask(page, 40)
    finish(page)
    events = [line for line in sent.value.text().splitlines() if line.startswith("data: {")]
    answer = json.loads(events[-1].removeprefix("data: "))
    assert page.locator("#answer").text_content() == answer["generated_text"]
    assert page.locator("#answer span").count() == answer["generated_tokens"] == 40
    assert page.locator("#f-speed").inner_text() == f"{answer['tokens_per_second']:.1f}"
    assert page.locator("#f-jump").inner_text() == f"{answer['avg_tokens_per_jump']:.2f}"
    details = answer["details"]
    accepted = f"{details['accepted_tokens']} of {details['draft_tokens']}"
    assert page.locator("#f-accepted").inner_text() == accepted


def draft_always(route: Any) -> None:
    """Sends a request on to the service, which is not to judge whether drafting pays."""
    body = {**route.request.post_data_json, "adaptive": False}
    route.continue_(post_data=json.dumps(body))


def test_every_drafter_has_a_look_of_its_own(page: Any) -> None:
    looks = set()
    page.route("**/generate", draft_always)
    page.get_by_text("Options").click()
    page.get_by_label("Longest answer").fill("120")
    page.get_by_label("Prompt").fill(PROMPT)
    for drafter in ("suffix", "draft"):
        page.get_by_label("Drafter").select_option(drafter)
        page.get_by_label("Most draft tokens per step").fill("4")
        page.get_by_role("button", name="Generate").click()
        finish(page)
        assert f"drafted by {drafter}" in page.locator("#legend").inner_text()
        answer, legend = page.evaluate(
            """(drafter) => [`#answer span[title="drafted by ${drafter}"]`, '#legend [class]'].map(
                (selector) => {
                    const look = getComputedStyle(document.querySelector(selector));
                    return [look.color, look.textDecorationStyle];
                })""",
            drafter,
        )
        assert answer == legend
        looks.add(tuple(answer))
    colours, underlines = zip(*looks, strict=True)
    assert len(set(colours)) == len(set(underlines)) == 2


def test_the_model_and_what_drafting_does_are_shown(page: Any, console_url: str) -> None:
    served = httpx.get(f"{console_url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    until(page, "document.querySelectorAll('#model dd').length > 0")
    shown = page.locator("#model").inner_text()
    assert served in shown
    assert "Drafters" in shown
    ask(page, 100)
    until(page, "/Accepted, \\w+\\s+\\d+ %/.test(document.getElementById('controller').innerText)")
    assert "Estimated gain" in page.locator("#controller").inner_text()


def test_charts_move(page: Any) -> None:
    path = "document.querySelector('#chart-speed path').getAttribute('d')"
    until(page, f"{path} !== null")
    before = page.evaluate(path)
    ask(page, 150)
    until(page, f"{path}.length > {len(before)}")
    until(page, "Number(document.getElementById('now-speed').textContent) > 0")
    until(page, "Number(document.getElementById('now-jump').textContent) >= 1")
    assert re.fullmatch(r"\d+ of \d+", page.locator("#now-memory").inner_text())
    assert "Tokens per jump" in page.locator("#chart-jump").get_attribute("aria-label")


def test_an_error_shows_as_an_error(page: Any) -> None:
    ask(page, 10_000_000)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "422" in alert.inner_text()
    assert "max_new_tokens" in alert.inner_text()
    page.get_by_label("Longest answer").fill("4")
    page.get_by_role("button", name="Generate").click()
    finish(page)
    assert not alert.is_visible()


def answer_with(page: Any, status: int, *events: object, **headers: str) -> None:
    """Let the next requests get this instead of the service's answer."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    headers |= {"content-type": "text/event-stream" if status == 200 else "application/json"}
    body = body if status == 200 else json.dumps(events[0])
    page.route(
        "**/generate", lambda route: route.fulfill(status=status, headers=headers, body=body)
    )


TOKEN = {"text": "a", "tokens": [{"id": 1, "text": "a", "origin": "target"}]}
ERROR = {"error": {"message": "the engine failed", "code": "engine_error"}}


@pytest.mark.parametrize(
    ("status", "events", "headers", "words"),
    [
        (429, [ERROR], {"retry-after": "7"}, "429: the engine failed (try again in 7 s)"),
        (200, [TOKEN, ERROR], {}, "the engine failed"),
        (200, [TOKEN], {}, "the answer broke off"),
    ],
    ids=["refused", "failed half way", "broken off"],
)
def test_whatever_goes_wrong_is_said(
    page: Any, status: int, events: list[object], headers: dict[str, str], words: str
) -> None:
    answer_with(page, status, *events, **headers)
    page.get_by_role("button", name="Generate").click()
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == words
    assert page.locator("#progress").inner_text() == "Failed."
    assert page.locator("#answer").inner_text() == ("a" if status == 200 else "")
    page.unroute("**/generate")
    page.get_by_role("button", name="Generate").click()
    finish(page)
    assert not alert.is_visible()


def test_a_service_that_cannot_be_reached_is_said_and_found_again(
    page: Any, console_url: str
) -> None:
    other = page.context.new_page()
    other.route("**/console/figures", lambda route: route.abort())
    other.goto(console_url)
    other.wait_for_selector("#state.failed")
    assert "not connected" in other.locator("#state").inner_text()
    other.unroute("**/console/figures")
    other.wait_for_selector("#state.ready")


def test_an_answer_is_text_and_never_a_page(page: Any) -> None:
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    token = {"text": text, "tokens": [{"id": 1, "text": text, "origin": text}]}
    answer_with(page, 200, token)
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").wait_for()
    assert page.locator("#answer").inner_text() == text
    assert page.locator("#answer b, #legend b, img").count() == 0


def test_an_answer_can_be_stopped(page: Any) -> None:
    slow = {"offline": False, "latency": 0, "downloadThroughput": 10_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
    ask(page, 900)  # about 100 kB
    page.wait_for_selector("#answer span")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.get_by_role("button", name="Generate").is_enabled()
