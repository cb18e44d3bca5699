"""Recorded requests hold no prose of others, and agree as far as the originals did."""

import pytest

from bench.agents.recorded import FOLDER, expanded, load
from bench.agents.reuse import FULL, PROTOCOLS, end_of_tools
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.text.chat_template import ChatTemplate
from tests.text.tools.scripts import TEMPLATES


def test_equal_lines_are_read_as_equal_words_of_their_length() -> None:
    body = {"system": "# Rules\n§50.0123abcd\n§50.0123abcd\n§60.4567abcd", "model": "§50.0123abcd"}
    long = expanded(body)
    first, one, two, other = long["system"].split("\n")
    assert (first, len(one), len(other)) == ("# Rules", 50, 60)
    assert one == two != other[:50]
    assert long["model"] == body["model"]  # only prose is replaced


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
