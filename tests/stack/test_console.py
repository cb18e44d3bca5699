"""The console in a real browser on the default model: completions, accessibility, themes.

Needs playwright and a Chromium (Debian: `apt-get install chromium`); skipped without. What the
model does not do by itself (refuse, fail in the middle of an answer) is scripted.
"""

import json
import re
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.stack.console import (
    LAST,
    PROMPT,
    ask,
    chunk,
    console,
    contrasts,
    finish,
    open_chat,
    open_completion,
    say,
    script,
    slow_network,
    until,
)
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e


def test_an_answer_streams_with_coloured_draft_tokens_and_its_own_figures(page: Any) -> None:
    # The page itself records each growth of the answer: a look from outside would be too slow.
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
    with page.expect_response("**/generate") as sent:
        ask(page, 200)
    finish(page)
    seen = page.evaluate("[...window.seen]")
    partial = {text for text in seen if re.fullmatch(r"Generating\. [1-9]\d*", text)}
    assert len(partial) >= 2
    colours = page.evaluate(
        """() => ['#answer span:not([class])', '#answer [class^=draft-]'].map((selector) =>
            getComputedStyle(document.querySelector(selector)).color)"""
    )
    assert colours[0] != colours[1]
    legend = dict(re.findall(r"^(.*): (\d+)$", page.locator("#legend").inner_text(), re.MULTILINE))
    spans = page.locator("#answer span").count()
    assert sum(map(int, legend.values())) == spans

    events = [line for line in sent.value.text().splitlines() if line.startswith("data: {")]
    answer = json.loads(events[-1].removeprefix("data: "))
    assert page.locator("#answer").text_content() == answer["generated_text"] != ""
    assert spans == answer["generated_tokens"]
    details = answer["details"]
    first_seconds = details["queue_seconds"] + details["prefill_seconds"]
    for name, figure in (
        ("speed", f"{answer['tokens_per_second']:.1f}"),
        ("jump", f"{answer['avg_tokens_per_jump']:.2f}"),
        ("first", f"{first_seconds * 1000:.0f} ms"),
        ("latency", f"{answer['latency_ms']:.0f} ms"),
        ("accepted", f"{details['accepted_tokens']} of {details['draft_tokens']}"),
    ):
        assert page.locator(f"#f-{name}").inner_text() == figure


def test_the_model_the_controller_and_moving_charts_are_shown(page: Any, console_url: str) -> None:
    path = "document.querySelector('#chart-speed path').getAttribute('d')"
    until(page, f"{path} !== null")
    before = page.evaluate(path)
    ask(page, 150)
    until(page, f"{path}.length > {len(before)}")
    until(page, "Number(document.getElementById('now-speed').textContent) > 0")
    until(page, "Number(document.getElementById('now-jump').textContent) >= 1")
    assert re.fullmatch(r"\d+ of \d+", page.locator("#now-memory").inner_text())
    assert "Tokens per pass" in page.locator("#chart-jump").get_attribute("aria-label")
    served = httpx.get(f"{console_url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    shown = page.locator("#model").inner_text()
    assert served in shown
    assert "Drafters" in shown
    until(page, "/Accepted, \\w+\\s+\\d+ %/.test(document.getElementById('controller').innerText)")
    assert "Estimated gain" in page.locator("#controller").inner_text()


def test_a_refused_request_shows_the_services_error(page: Any) -> None:
    ask(page, -5)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "422" in alert.inner_text()
    assert "max_new_tokens" in alert.inner_text()


HTML = "<img src=x onerror=alert(1)><b>bold</b>"
ERROR = {"error": {"message": "the engine failed", "code": "engine_error"}}


def token(text: str, origin: str = "target") -> dict[str, Any]:
    return {"text": text, "tokens": [{"id": 1, "text": text, "origin": origin}]}


@pytest.mark.parametrize(
    ("answer", "words", "shown"),
    [
        ((429, ERROR), "429: the engine failed (try again in 7 s)", ""),
        ((200, token("a"), ERROR), "the engine failed", "a"),
        ((200, token("a")), "the answer broke off", "a"),
        ((200, token(HTML, HTML)), "the answer broke off", HTML),
    ],
    ids=["refused", "failed in the middle", "broken off", "text that looks like a page"],
)
def test_an_answer_that_fails_shows_why_and_the_next_one_clears_that(
    page: Any, answer: tuple[Any, ...], words: str, shown: str
) -> None:
    status, *events = answer
    kind, body = "application/json", json.dumps(events[0])
    if status == 200:
        kind = "text/event-stream"
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    headers = {"content-type": kind, "retry-after": "7"}
    page.route(
        "**/generate", lambda route: route.fulfill(status=status, headers=headers, body=body)
    )
    ask(page, 20)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == words
    assert page.locator("#progress").inner_text() == "Failed."
    assert page.locator("#answer").inner_text() == shown
    assert page.locator("#answer b, #legend b, img").count() == 0
    page.unroute("**/generate")
    page.get_by_role("button", name="Generate").click()
    finish(page)
    assert not alert.is_visible()


def test_a_service_that_cannot_be_reached_is_shown_and_found_again(
    page: Any, console_url: str
) -> None:
    other = page.context.new_page()
    other.route("**/console/figures", lambda route: route.abort())
    other.goto(console_url)
    other.wait_for_selector("#state.failed")
    assert "not connected" in other.locator("#state").inner_text()
    other.unroute("**/console/figures")
    other.wait_for_selector("#state.ready")


def test_an_answer_can_be_stopped(page: Any) -> None:
    slow_network(page)
    ask(page, 900)  # about 100 kB
    page.wait_for_selector("#answer span", state="attached")  # it may be a newline
    page.keyboard.press("Escape")
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.get_by_role("button", name="Generate").is_enabled()


# -- accessibility -----------------------------------------------------------------------------


def test_the_keyboard_is_enough_reaches_everything_and_shows_the_focus(page: Any) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the message
    assert page.evaluate("document.activeElement.id") == "message"
    open_completion(page)
    page.evaluate("document.getElementById('limit').value = 20")
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("import os")
    page.keyboard.press("Control+Enter")
    finish(page)
    assert page.locator("#answer span").count() > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.get_by_text("Options").focus()
    page.keyboard.press("Enter")
    page.evaluate("document.activeElement.blur()")
    count = page.evaluate(
        """() => {
            const all = 'a, button, input, select, textarea, summary, [tabindex="0"]';
            const open = (e) => !e.disabled && e.checkVisibility();
            window.reachable = [...document.querySelectorAll(all)].filter(open);
            return window.reachable.length;
        }"""
    )
    reached = []
    for _ in range(count + 1):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # between the last element and the first
        index, outline = page.evaluate(
            """() => [window.reachable.indexOf(document.activeElement),
                getComputedStyle(document.activeElement).outlineStyle]"""
        )
        assert outline != "none", index
        reached.append(index)
    assert sorted(reached) == list(range(count))
    assert count >= 12


def test_a_screen_reader_finds_names_for_everything(page: Any) -> None:
    open_completion(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button, a, svg')]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel
                || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for role, name in (("region", "Answer"), ("textbox", "Prompt"), ("heading", "Ask")):
        assert page.get_by_role(role, name=name).count() == 1
    for status in ("#progress", "#state"):
        assert page.locator(f"{status}[role=status]").count() == 1
    for landmark in ("banner", "navigation", "main"):
        assert page.get_by_role(landmark).count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    until(page, "document.querySelectorAll('svg[role=img][aria-label]').length === 4")
    # Figures change every second: a screen reader does not announce them by itself.
    assert page.locator("#charts [aria-live=off]").count() == 4


@pytest.mark.parametrize("width", [320, 768])
def test_both_tabs_fit_on_a_phone(browser: Any, console_url: str, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 800}, "is_mobile": True, "has_touch": True}
    with console(browser, console_url, **phone) as page:

        def fits() -> None:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("visualViewport.scale") == 1
            small = page.evaluate(
                """() => [...document.querySelectorAll('a, button, input, select, summary')]
                    .filter((e) => e.checkVisibility() && !e.matches('.skip'))
                    .filter((e) => e.getBoundingClientRect().height < 24).map((e) => e.outerHTML)"""
            )
            assert small == []  # WCAG 2.2's smallest size of what one taps

        page.get_by_role("tab", name="Completion").tap()
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_text("Options").tap()
        page.get_by_label("Longest answer").fill("60")
        button = page.get_by_role("button", name="Generate")
        button.tap()
        finish(page)
        fits()
        assert button.bounding_box()["height"] >= 44  # the width of a finger
        page.get_by_role("tab", name="Chat").tap()
        script(page, chunk("```\n" + "x" * 300 + "\n```\n" + "y" * 300), LAST)
        page.locator("#message").fill("z" * 300)
        page.get_by_role("button", name="Send").tap()
        page.locator("#turns li.assistant pre").wait_for()
        finish(page)
        fits()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    ask(page, 80)
    finish(page)
    # Looks of other drafters, and of an error, which no answer here has.
    page.evaluate(
        """() => {
            for (const n of [0, 1, 2, 3, 4]) {
                const drafted = document.createElement('span');
                drafted.className = `draft-${n}`;
                document.getElementById('answer').append(drafted);
            }
            document.getElementById('error').hidden = false;
        }"""
    )
    seen = contrasts(
        page,
        "#answer, #answer [class^=draft-], #legend li, h1, h2, h3, label, input, .hint, dt, dd, "
        "figcaption span, figcaption output, .state, .error, a:not(.skip), button:enabled, summary",
    )
    assert any("draft-4" in html for html in seen)
    open_chat(page)
    events = [chunk("hm", reasoning_content="hm"), chunk("Hello "), chunk("you", "grammar")]
    script(page, *events, chunk(" there", "suffix"), LAST)
    say(page, "a")
    page.locator("#turns li.assistant .by-grammar").wait_for()
    finish(page)
    seen |= contrasts(
        page, "#turns p, #turns span, #turns h3, #turns button, [role=tab], #turns summary"
    )
    assert any("by-grammar" in html for html in seen)
    assert {html: ratio for html, ratio in seen.items() if ratio < 4.5} == {}


def test_the_theme_follows_the_system_until_it_is_switched(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        seen[theme] = page.evaluate(colour)
    assert seen["light"] != seen["dark"]
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(colour) == seen["light"]
