"""The console's chat in a real browser: a conversation, the look of its answers, and tools.

On the default model. Answers that it would never give are scripted.
"""

import json
import re
from typing import Any

import pytest

from tests.stack.console import (
    CHAT_URL,
    LAST,
    PROMPT,
    chunk,
    converse,
    finish,
    open_completion,
    option,
    say,
    script,
    slow_network,
    until,
)

pytestmark = pytest.mark.e2e
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
MARKDOWN = """# Title
Some **bold**, *slanted* and `code`.
- <img src=x onerror=alert(1)>
- two
3. three
```python
if a < b: # <b>
```
<script>alert(1)</script> [x](javascript:alert(1)) ** * `"""


def test_a_conversation_goes_on_with_all_that_was_said(page: Any) -> None:
    option(page, "Longest answer", "60")
    option(page, "System message", "")
    with page.expect_response(CHAT_URL) as sent:
        converse(page, PROMPT)
    events = [json.loads(line[6:]) for line in sent.value.text().splitlines() if "{" in line]
    first = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    tokens = [token for event in events for token in event["choices"][0].get("tokens", [])]
    coloured = page.locator("#turns li.assistant .content span[class^=draft-]").count()
    assert bool(coloured) == any(token["origin"] != "target" for token in tokens)
    legend = page.locator("#chat-legend").inner_text()
    assert sum(map(int, re.findall(r": (\d+)$", legend, re.MULTILINE))) == len(tokens) <= 60
    assert f"{len(tokens)} tokens" in page.locator("#turns li.assistant .hint").inner_text()
    with page.expect_request(CHAT_URL) as again:
        converse(page, "import os")
    assert again.value.post_data_json["messages"] == [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "import os"},
    ]
    assert page.locator("#turns > li").count() == 4


def test_markdown_is_shown_but_never_becomes_html(page: Any) -> None:
    pieces = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
    script(page, *(chunk(text, ("target", "suffix")[i % 2]) for i, text in enumerate(pieces)), LAST)
    converse(page, "<b>hi</b>")
    view = page.locator("#turns li.assistant .content > div")
    for selector, text in (
        ("p.heading", "Title"),
        ("strong", "bold"),
        ("em", "slanted"),
        ("p code", "code"),
        ("pre code", "if a < b: # <b>\n"),
    ):
        assert view.locator(selector).inner_text() == text
    assert view.locator("ul li").all_inner_texts() == ["<img src=x onerror=alert(1)>", "two"]
    assert view.locator("ol").get_attribute("start") == "3"
    assert view.locator("img, script, a, b").count() == 0
    assert "<script>alert(1)</script> [x](javascript:alert(1)) ** * `" in view.inner_text()
    assert page.locator("#turns li.user .said").inner_text() == "<b>hi</b>"
    assert view.locator("em span[title='drafted by suffix']").count() > 0


def test_calls_are_shown_and_the_chat_asks_for_their_results(page: Any) -> None:
    asked: list[Any] = []

    def call(text: str) -> list[Any]:
        return [{"index": 0, "function": {"arguments": text}}]

    first = {"index": 0, "id": "abc", "function": {"name": "get_weather", "arguments": ""}}
    script(
        page,
        chunk("<think>hm</think>", reasoning_content="hm"),
        chunk("<tool_call>", tool_calls=[first]),
        chunk('{"city": ', "grammar", tool_calls=call('{"city": ')),
        chunk('"Bern"}', tool_calls=call('"Bern"}')),
        LAST,
        asked=asked,
    )
    option(page, "Tools, as JSON", json.dumps(TOOLS))
    option(page, "JSON schema that answers follow", '{"type": "object"}')
    option(page, "System message", "Be brief.")
    converse(page, "Weather?")
    assert asked[0]["tools"] == TOOLS
    assert asked[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    for selector, text in (
        (".call .heading", "calls get_weather"),
        (".call pre", '{"city": "Bern"}'),
        (".call .by-grammar", '{"city": '),
        (".thoughts p", "hm"),
        ("#message-label", "Result of get_weather"),
    ):
        assert page.locator(selector).inner_text() == text
    assert "left no choice by the grammar" in page.locator("#chat-legend").inner_text()
    script(page, chunk("Sunny."), LAST, asked=asked)
    converse(page, "sun")
    assert page.locator("#message-label").inner_text() == "Message"
    called, result = asked[1]["messages"][2:]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    assert result == {"role": "tool", "tool_call_id": "abc", "content": "sun"}


def test_an_answer_can_be_repeated_and_copied_and_a_new_chat_begun(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    asked: list[Any] = []
    script(page, chunk("one"), LAST, asked=asked)
    converse(page, "a")
    script(page, chunk("**two**"), LAST, asked=asked)
    page.get_by_role("button", name="Regenerate").click()
    until(page, "document.querySelector('#turns li.assistant')?.innerText.includes('two')")
    finish(page)
    assert asked[0]["messages"] == asked[1]["messages"]
    assert page.locator("#turns > li").count() == 2
    page.locator("#turns li.assistant").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**two**"
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#turns > li").count() == 0
    assert page.get_by_role("button", name="Regenerate").is_disabled()


def test_a_wrong_option_is_named_by_the_page_or_by_the_service(page: Any) -> None:
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
    slow_network(page)
    option(page, "Longest answer", "900")
    say(page, PROMPT)
    page.wait_for_selector("#turns li.assistant span")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.locator("#turns li.assistant .hint").inner_text() == "stopped"
    assert page.get_by_role("button", name="Send").is_enabled()
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("#turns li.assistant span")
    page.get_by_role("button", name="New chat").click()
    until(page, "document.getElementById('progress').textContent === 'Stopped.'")
    assert page.locator("#turns > li").count() == 0


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


def test_limit_and_sampling_are_the_servers_and_the_models(page: Any) -> None:
    asked: list[Any] = []
    script(page, chunk("one"), LAST, asked=asked)
    converse(page, "a")
    assert not {"max_tokens", "temperature"} & set(asked[0])
    page.get_by_text("Options").click()
    assert page.get_by_label("Longest answer").get_attribute("placeholder") == "the server's, 1024"
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "the model's, 0.2"
    open_completion(page)
    with page.expect_request("**/generate") as sent:
        page.get_by_role("button", name="Generate").click()
    body = sent.value.post_data_json
    assert (body["max_new_tokens"], body["temperature"]) == (-1, 0.2)


def test_a_conversation_survives_a_reload_until_a_new_one_begins(page: Any) -> None:
    asked: list[Any] = []
    option(page, "System message", "Be brief.")
    script(page, chunk(reasoning_content="hm"), chunk("**one**"), LAST, asked=asked)
    converse(page, "a")
    before = page.locator("#turns").inner_text()
    page.reload()
    page.wait_for_selector("#state.ready")
    assert page.locator("#turns").inner_text() == before
    assert page.locator("#turns strong").inner_text() == "one"
    converse(page, "b")
    assert asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "**one**"},
        {"role": "user", "content": "b"},
    ]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    page.wait_for_selector("#state.ready")
    assert page.locator("#turns > li").count() == 0
    page.evaluate("localStorage.setItem('specops.conversation', '{')")
    page.reload()
    page.get_by_role("alert").wait_for()
    assert "cannot be read" in page.get_by_role("alert").inner_text()


def test_an_earlier_message_is_edited_and_sent_again(page: Any) -> None:
    asked: list[Any] = []
    script(page, chunk("one"), LAST, asked=asked)
    for text in ("a", "b", "c"):
        converse(page, text)
    edit = page.locator("#turns li.user").nth(1).get_by_role("button", name="Edit")
    edit.click()
    assert page.get_by_label("Edited message").input_value() == "b"
    assert page.locator("#turns .faint").count() == 4
    edit.click()
    assert page.get_by_label("Message", exact=True).input_value() == ""
    assert page.locator("#turns .faint").count() == 0
    edit.click()
    converse(page, "b, again")
    assert [turn["content"] for turn in asked[3]["messages"]] == ["a", "one", "b, again"]
    assert page.locator("#turns > li").count() == 4


def test_a_text_file_is_put_where_the_cursor_is_and_no_other_file(page: Any) -> None:
    def add(name: str, content: bytes) -> None:
        with page.expect_file_chooser() as chosen:
            page.get_by_role("button", name="Add a text file").click()
        file = {"name": name, "mimeType": "application/octet-stream", "buffer": content}
        chosen.value.set_files(file)

    for field in ("message", "prompt"):
        page.locator(f"#{field}").fill("Who?  Why?")
        page.evaluate(f"document.getElementById('{field}').setSelectionRange(5, 5)")
        add("notes.txt", "Zoë\r\nAnn".encode())
        until(page, f"document.getElementById('{field}').value === 'Who? Zoë\\nAnn Why?'")
        for content in (b"\xff\xfe", b"x" * (1 << 20) + b"y"):
            page.evaluate("document.getElementById('error').hidden = true")
            add("image.png", content)
            page.get_by_role("alert").wait_for()
            assert page.get_by_role("alert").inner_text().startswith("image.png is not a text file")
        open_completion(page)
