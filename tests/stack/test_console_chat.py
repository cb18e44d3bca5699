"""The console's chat in a real browser: a conversation, its answers' look, and tools.

On the real demo pair, which continues texts and answers messages all the same; what it would never
say by itself is put into the browser's way.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.stack.console import PROMPT, console, finish, until
from tests.stack.test_console_for_everyone import contrasts

pytestmark = pytest.mark.e2e
URL = "**/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


def open_chat(page: Any) -> None:
    page.get_by_role("tab", name="Chat").click()


def option(page: Any, label: str, text: str) -> None:
    if not page.get_by_label(label).is_visible():
        page.get_by_text("Options").click()
    page.get_by_label(label).fill(text)


def say(page: Any, text: str) -> None:
    page.locator("#message").fill(text)
    page.get_by_role("button", name="Send").click()


def chunk(text: str = "", origin: str = "target", finish: str | None = None, **delta: Any) -> Any:
    tokens = [{"id": 1, "text": text, "origin": origin}] if text else []
    if text and not delta:
        delta = {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "tokens": tokens, "finish_reason": finish}]}


TIMINGS = {
    "predicted_n": 3,
    "predicted_per_second": 10.0,
    "tokens_per_step": 1.5,
    "draft_n": 2,
    "draft_n_accepted": 1,
}
LAST = chunk(finish="stop") | {"timings": TIMINGS}


def script(page: Any, *events: Any, asked: list[Any] | None = None) -> None:
    """Let the next requests get these events; note what they ask."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(route: Any) -> None:
        if asked is not None:
            asked.append(route.request.post_data_json)
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)

    page.unroute(URL)
    page.route(URL, answer)


def answers(page: Any) -> Any:
    return page.locator("#turns li.assistant .content > div")


def test_a_conversation_goes_on_with_all_that_was_said(page: Any) -> None:
    open_chat(page)
    option(page, "Longest answer", "60")
    option(page, "System message", "")
    with page.expect_response(URL) as sent:
        say(page, PROMPT)
    finish(page)
    events = [json.loads(line[6:]) for line in sent.value.text().splitlines() if "{" in line]
    first = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    tokens = [token for event in events for token in event["choices"][0].get("tokens", [])]
    spans = page.locator("#turns li.assistant .content span")
    coloured = {
        span["text"]
        for span in spans.evaluate_all(
            "all => all.map((s) => ({text: s.textContent, c: s.className}))"
        )
        if span["c"].startswith("draft-")
    }
    assert bool(coloured) == any(token["origin"] not in ("target",) for token in tokens)
    legend = page.locator("#chat-legend").inner_text()
    assert sum(map(int, re.findall(r": (\d+)$", legend, re.MULTILINE))) == len(tokens) == 60
    assert "60 tokens" in page.locator("#turns li.assistant .hint").inner_text()
    with page.expect_request(URL) as again:
        say(page, "import os")
    finish(page)
    assert again.value.post_data_json["messages"] == [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "import os"},
    ]
    assert page.locator("#turns > li").count() == 4


MARKDOWN = """# Title
Some **bold**, *slanted* and `code`.
- <img src=x onerror=alert(1)>
- two
3. three
```python
if a < b: # <b>
```
<script>alert(1)</script> [x](javascript:alert(1)) ** * `"""


def test_markdown_is_shown_and_no_html_is_made_of_it(page: Any) -> None:
    open_chat(page)
    pieces = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
    script(page, *(chunk(text, ("target", "suffix")[i % 2]) for i, text in enumerate(pieces)), LAST)
    say(page, "<b>hi</b>")
    finish(page)
    view = answers(page)
    assert view.locator("p.heading").inner_text() == "Title"
    assert view.locator("strong").inner_text() == "bold"
    assert view.locator("em").inner_text() == "slanted"
    assert view.locator("p code").inner_text() == "code"
    assert view.locator("ul li").all_inner_texts() == ["<img src=x onerror=alert(1)>", "two"]
    assert view.locator("ol").get_attribute("start") == "3"
    assert view.locator("pre code").inner_text() == "if a < b: # <b>\n"
    assert view.locator("img, script, a, b").count() == 0
    assert "<script>alert(1)</script> [x](javascript:alert(1)) ** * `" in view.inner_text()
    assert page.locator("#turns li.user .said").inner_text() == "<b>hi</b>"
    assert view.locator("em span[title='drafted by suffix']").count() > 0


def test_calls_are_shown_and_their_results_asked_for(page: Any) -> None:
    open_chat(page)
    asked: list[Any] = []
    call = {"index": 0, "id": "abc", "function": {"name": "get_weather", "arguments": ""}}
    script(
        page,
        chunk("<think>hm</think>", reasoning_content="hm"),
        chunk("<tool_call>", tool_calls=[call]),
        chunk(
            '{"city": ',
            "grammar",
            tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}],
        ),
        chunk('"Bern"}', tool_calls=[{"index": 0, "function": {"arguments": '"Bern"}'}}]),
        LAST,
        asked=asked,
    )
    option(page, "Tools, as JSON", json.dumps(TOOLS))
    option(page, "JSON schema that answers follow", '{"type": "object"}')
    option(page, "System message", "Be brief.")
    say(page, "Weather?")
    finish(page)
    assert asked[0]["tools"] == TOOLS
    assert asked[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert page.locator(".call .heading").inner_text() == "calls get_weather"
    assert page.locator(".call pre").inner_text() == '{"city": "Bern"}'
    assert page.locator(".call .by-grammar").inner_text() == '{"city": '
    assert "left no choice by the grammar" in page.locator("#chat-legend").inner_text()
    assert page.locator(".thoughts p").inner_text() == "hm"
    assert page.locator("#message-label").inner_text() == "Result of get_weather"
    script(page, chunk("Sunny."), LAST, asked=asked)
    say(page, "sun")
    finish(page)
    assert page.locator("#message-label").inner_text() == "Message"
    called, result = asked[1]["messages"][2:]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    assert result == {"role": "tool", "tool_call_id": "abc", "content": "sun"}


def test_an_answer_can_be_had_anew_and_a_chat_begun_anew(page: Any) -> None:
    open_chat(page)
    asked: list[Any] = []
    script(page, chunk("one"), LAST, asked=asked)
    say(page, "a")
    finish(page)
    script(page, chunk("two"), LAST, asked=asked)
    page.get_by_role("button", name="Regenerate").click()
    until(page, "document.querySelector('#turns li.assistant')?.innerText.includes('two')")
    finish(page)
    assert asked[0]["messages"] == asked[1]["messages"]
    assert page.locator("#turns > li").count() == 2
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#turns > li").count() == 0
    assert page.get_by_role("button", name="Regenerate").is_disabled()


def test_a_turn_can_be_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_chat(page)
    script(page, chunk("**one**"), LAST)
    say(page, "a")
    finish(page)
    page.locator("#turns li.assistant").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**one**"


def test_what_is_wrong_is_said_before_anything_is_asked(page: Any) -> None:
    open_chat(page)
    option(page, "JSON schema that answers follow", "{")
    say(page, "a")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text().startswith("JSON schema that answers follow: ")
    option(page, "JSON schema that answers follow", '{"type": 5}')
    page.get_by_role("button", name="Regenerate").click()
    until(page, "document.getElementById('error').textContent.startsWith('400')")
    assert page.locator("#turns li.assistant").count() == 0


def test_a_streaming_answer_can_be_stopped_and_stays(page: Any) -> None:
    open_chat(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": 10_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
    option(page, "Longest answer", "900")
    say(page, PROMPT)
    page.wait_for_selector("#turns li.assistant span")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.locator("#turns li.assistant .hint").inner_text() == "stopped"
    assert page.get_by_role("button", name="Send").is_enabled()


def test_the_keyboard_is_enough_to_chat(page: Any) -> None:
    page.get_by_role("tab", name="Completion").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-chat"
    page.evaluate("document.activeElement.blur(); document.getElementById('skip').focus()")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    script(page, chunk("one"), LAST)
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    finish(page)
    assert page.locator("#turns li.user .said").inner_text() == "two\nlines"


@pytest.mark.parametrize("width", [320, 390])
def test_a_chat_fits_on_a_phone(browser: Any, console_url: str, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 800}, "is_mobile": True, "has_touch": True}
    with console(browser, console_url, **phone) as page:
        page.get_by_role("tab", name="Chat").tap()
        script(page, chunk("```\n" + "x" * 300 + "\n```\n" + "y" * 300), LAST)
        page.locator("#message").fill("z" * 300)
        page.get_by_role("button", name="Send").tap()
        finish(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = page.evaluate(
            """() => [...document.querySelectorAll('a, button, input, select, summary')]
                .filter((e) => e.checkVisibility() && !e.matches('.skip'))
                .filter((e) => e.getBoundingClientRect().height < 24).map((e) => e.outerHTML)"""
        )
        assert small == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_chat_is_readable_in_both_themes(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    open_chat(page)
    script(
        page,
        chunk("hm", reasoning_content="hm"),
        chunk("Hello "),
        chunk("you", "grammar"),
        chunk(" there", "suffix"),
        LAST,
    )
    say(page, "a")
    finish(page)
    seen = contrasts(
        page, "#turns p, #turns span, #turns h3, #turns button, [role=tab], #turns summary"
    )
    assert any("by-grammar" in html for html in seen)
    assert {html: ratio for html, ratio in seen.items() if ratio < 4.5} == {}
