"""Recorded requests hold no prose of others, and agree as far as the originals did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.agents.recorded import FOLDER, Recording, expanded, load, save, shortened
from bench.agents.reuse import FULL, PROTOCOLS, end_of_tools
from specops.runtime.prefix_trie import common_prefix
from specops.text.chat_template import ChatTemplate
from tests.text.tools.scripts import TEMPLATES

PROSE = "You are an agent that does one thing and does it well."
BODY: dict[str, Any] = {
    "model": "m",
    "metadata": {"user_id": "somebody"},
    "system": [{"type": "text", "text": f"# Rules\n{PROSE}\n  {PROSE}\n</env>"}],
    "messages": [{"role": "user", "content": "Short."}],
    "tools": [{"name": "read_a_file_from_the_disk", "description": PROSE}],
}


def test_prose_is_replaced_by_as_many_characters_and_equal_lines_stay_equal() -> None:
    short = shortened(BODY)
    assert "metadata" not in short
    assert PROSE not in json.dumps(short)
    long = expanded(short)
    (before,), (after,) = BODY["system"], long["system"]
    lines = list(zip(before["text"].split("\n"), after["text"].split("\n"), strict=True))
    assert all(len(old) == len(new) for old, new in lines)
    assert [old == new for old, new in lines] == [True, False, False, True]
    assert long["tools"] == [{"name": "read_a_file_from_the_disk", "description": lines[1][1]}]
    assert lines[1][1] != lines[2][1]
    assert shortened(long) != short  # the digests are of the original lines
    assert long["messages"] == BODY["messages"]


def test_a_saved_recording_is_read_back(tmp_path: Path) -> None:
    other = BODY | {"messages": [*BODY["messages"], {"role": "assistant", "content": "Yes."}]}
    recording = Recording("agent 1", "/v1/messages", {"first": BODY, "second": other})
    save(tmp_path / "a.json", recording)
    again = load(tmp_path / "a.json")
    assert again.requests["first"] == expanded(shortened(BODY))
    assert again.requests["second"]["messages"] == other["messages"]
    assert (again.agent, again.path) == (recording.agent, recording.path)


@pytest.mark.parametrize("agent", FULL.agents)
@pytest.mark.parametrize("template", ["hermes", "llama"])
def test_later_requests_begin_with_the_system_prompt_and_tools_of_the_first(
    agent: str, template: str
) -> None:
    recording = load(FOLDER / f"{agent}.json")
    writes = ChatTemplate(TEMPLATES[template], {})
    first, *others = (
        PROTOCOLS[recording.path].conversation(body)
        for kind, body in recording.requests.items()
        if kind != "plan"  # opencode describes a tool otherwise then
    )
    prompt = writes.render(first.messages, first.tools)
    assert len(prompt) > 20_000
    for asked in others:
        other = writes.render(asked.messages, asked.tools)
        assert common_prefix(prompt, other) >= end_of_tools(other, asked) > 20_000
