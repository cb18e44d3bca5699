"""Conversations with tools become the prompts of transformers, or plain text."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specops.text.chat_template import ChatTemplate, ChatTemplateError
from tests.text.tools.scripts import TEMPLATES, TOOLS

CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "And the weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"},
    {"role": "tool", "content": "warm", "tool_call_id": "abcdefghi", "name": "get_weather"},
]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("phi", "json")])
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_tools_and_calls_are_those_of_transformers(name: str, tools: Any) -> None:
    told = [tool.for_template() for tool in tools] or None
    (theirs,), _ = render_jinja_template(
        [MESSAGES], tools=told, chat_template=TEMPLATES[name], add_generation_prompt=True
    )
    assert ChatTemplate(TEMPLATES[name], {}).render(MESSAGES, tools) == theirs


def test_phi_finds_its_tools_in_the_system_message() -> None:
    template = ChatTemplate(TEMPLATES["phi"], {})
    assert template.render(MESSAGES, TOOLS).startswith('<|tool|>[{"name": "get_weather"')
    own = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert "Be brief." in template.render(own, TOOLS)
    assert "<|tool|>" not in template.render(own)


def test_a_template_without_tools_gets_them_as_text() -> None:
    template = ChatTemplate(TEMPLATES["json"], {})
    text = template.render([{"role": "system", "content": "Be brief."}, *MESSAGES], TOOLS)
    system, user, call, result, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '{"name": "search.web-2", "description": "", "parameters": {"type"' in system
    assert user == "<|im_start|>user\nAnd the weather?"
    assert call.endswith('assistant\n{"name": "get_weather", "arguments": {"city": "Zürich"}}')
    assert result == (
        "<|im_start|>user\nget_weather returned:\nsunny\n\nget_weather returned:\nwarm"
    )


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_a_template_would_leave_out_is_refused(role: str) -> None:
    source = TEMPLATES["hermes"].replace(
        "{{ m.content }}", "{% if m.role != ROLE %}{{ m.content }}{% endif %}"
    )
    template = ChatTemplate(source.replace("ROLE", repr(role)), {})
    messages = MESSAGES if role == "tool" else [{"role": "system", "content": "a"}, MESSAGES[0]]
    with pytest.raises(ChatTemplateError, match=f"leaves out messages of the role '{role}'"):
        template.render(messages)
    assert template.render(MESSAGES[:2])
