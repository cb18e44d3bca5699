"""Conversations with tools become the prompts of transformers, or plain text."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specops.text.chat_template import ChatTemplate
from specops.text.template_process import SHARED, TemplateProcess
from tests.text.tools.scripts import BY_NAME, TEMPLATES, TOOLS

ASK = "And the weather?"
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": ASK},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"},
    {"role": "tool", "content": "warm", "tool_call_id": "abcdefghi", "name": "get_weather"},
]


SHOWING = [name for name in TEMPLATES if name not in ("phi", "granite", "json")]


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_tools_and_calls_are_those_of_transformers(name: str, tools: Any) -> None:
    described = [tool.for_template() for tool in tools] or None
    (theirs,), _ = render_jinja_template(
        [MESSAGES], tools=described, chat_template=TEMPLATES[name], add_generation_prompt=True
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
    empty = template.render([{"role": "system", "content": ""}, *MESSAGES], TOOLS)
    assert empty == text.replace("Be brief.\n\n", "")
    assert '{"name": "search.web-2", "description": "", "parameters": {"type"' in system
    assert user == "<|im_start|>user\nAnd the weather?"
    assert call.endswith('assistant\n{"name": "get_weather", "arguments": {"city": "Zürich"}}')
    assert result == (
        "<|im_start|>user\nget_weather returned:\nsunny\n\nget_weather returned:\nwarm"
    )


def test_lfm2_gets_calls_and_results_as_it_was_trained_on_them() -> None:
    """Its first templates show the tools, and texts of every role."""
    for sign in ("<|tool_list_start|>", "List of tools: ["):
        source = "{% if tools %}SIGN{{ tools | tojson }}{% endif %}" + TEMPLATES["json"]
        template = ChatTemplate(source.replace("SIGN", sign), {})
        assert template.calls == BY_NAME["lfm"]
        text = template.render(two_calls(), TOOLS)
        assert roles(text) == ["user", "assistant", "tool", "tool", "assistant"]
        call = "<|tool_call_start|>[get_weather(), search.web-2()]<|tool_call_end|>"
        assert f"assistant\n{call}<|im_end|>" in text
        odd = CALL | {"arguments": {"a": 'it\'s "x"\n', "b": [True, None], "c": False, "d": 1.5}}
        told = [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": odd}]}]
        written = r"""[get_weather(a="it's \"x\"\n", b=[true, null], c=False, d=1.5)]"""
        assert written in template.render(told, TOOLS)


OTHER_MARKS_FOR_SEVERAL = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% set calls = m.tool_calls or [] %}
{%- if calls | length == 1 %}<tool_call>{{ calls[0].function | tojson }}</tool_call>
{%- elif calls %}<tool_calls>[
{%- for call in calls %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor -%}
]</tool_calls>{% endif %}<|im_end|>
{% endfor %}"""


def test_other_marks_around_several_calls_than_around_one_are_no_format() -> None:
    template = ChatTemplate(OTHER_MARKS_FOR_SEVERAL, {})
    assert ASK in template.render(MESSAGES, TOOLS)


# As Gemma 4's: the results follow the calls in the assistant's turn, and its text comes last.
RESULTS_WITHIN = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- set i = loop.index0 %}{% set before = messages[i - 1].role if i else '' %}
{%- if m.role != 'tool' %}
{%- if m.role != 'assistant' or before not in ('assistant', 'tool') %}<|turn>{{ m.role }}
{% endif %}{% for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{
{%- for key, value in call.function.arguments | items %}{{ key }}:
{{- '<|"|>' ~ value ~ '<|"|>' if value is string else value | tojson }}{{ ',' if not loop.last }}
{%- endfor %}}<tool_call|>{% endfor %}
{%- for r in messages[i + 1:] if m.tool_calls and r.role == 'tool' and r.tool_call_id in
  (m.tool_calls | map(attribute='id') | list) %}<|tool_response>{{ r.content }}<tool_response|>
{%- endfor %}{{ m.content }}
{%- set next = messages[i + 1].role if not loop.last else '' %}
{%- if m.tool_calls and not next %}<|tool_response>
{%- elif next not in ('assistant', 'tool') %}<turn|>
{% endif %}{% endif %}{% endfor %}"""


def test_text_beside_calls_comes_before_them_and_their_results() -> None:
    """The model said it so, and the prompt must not end a turn that goes on."""
    template = ChatTemplate(RESULTS_WITHIN, {})
    assert template.calls == BY_NAME["gemma4"]
    beside = MESSAGES[1] | {"content": "Let me see."}
    text = template.render([MESSAGES[0], beside, *MESSAGES[2:3]], TOOLS)
    _, _, turn = text.partition("<|turn>assistant\n")
    assert turn == (
        "Let me see."
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>}<tool_call|>'
        "<|tool_response>sunny<tool_response|>"
    )
    alone = template.render([MESSAGES[0], *MESSAGES[1:3]], TOOLS)
    assert alone == text.replace("Let me see.", "")


@pytest.mark.parametrize("name", ["phi", "granite"])
def test_calls_that_a_template_leaves_out_are_text_in_the_models_format(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    beside = MESSAGES[1] | {"content": "Let me see."}
    text = template.render([MESSAGES[0], beside, *MESSAGES[2:]], TOOLS)
    call = '[{"name": "get_weather", "arguments": {"city": "Zürich"}}]'
    assert f"assistant\nLet me see.\n<|tool_call|>{call}" in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text  # this they show


def test_tools_are_where_a_template_looks_for_them() -> None:
    """As SmolLM3's: it reads `xml_tools`, and leaves out past calls."""
    source = "{% if xml_tools %}{{ xml_tools }}<tool_call>{% endif %}" + TEMPLATES["json"]
    template = ChatTemplate(source, {})
    assert template.calls == BY_NAME["hermes"]
    text = template.render(two_calls(), TOOLS)
    assert text.startswith("[{'type': 'function', 'function': {'name': 'get_weather'")
    assert roles(text) == ["user", "assistant", "tool", "tool", "assistant"]
    assert text.count("<tool_call>\n{") == 2
    assert "xml_tools" not in template.render(two_calls())


def two_calls() -> list[dict[str, Any]]:
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": {}}}
        for index, name in enumerate(("get_weather", "search.web-2"))
    ]
    results = [
        {"role": "tool", "content": f"result {index}", "tool_call_id": f"call_{index}"}
        for index in (1, 0)
    ]
    return [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_come_in_the_order_of_their_calls(name: str) -> None:
    """Most templates show no ids, so that nothing else says which call a result is of."""
    text = ChatTemplate(TEMPLATES[name], {}).render(two_calls(), TOOLS)
    assert text.index("result 0") < text.index("result 1")


def test_results_without_a_call_stay_behind_those_that_have_one() -> None:
    template = ChatTemplate(TEMPLATES["hermes"], {})
    lone = [
        {"role": "tool", "content": f"lone {index}", "tool_call_id": f"other_{index}"}
        for index in range(2)
    ]
    asked, called, *results = two_calls()
    text = template.render([asked, called, lone[0], *results, lone[1]], TOOLS)
    places = [text.index(word) for word in ("result 0", "result 1", "lone 0", "lone 1")]
    assert places == sorted(places)
    text = template.render([*lone, asked], TOOLS)
    assert text.index("lone 0") < text.index("lone 1") < text.index(ASK)


def roles(text: str) -> list[str]:
    return [turn.partition("\n")[0] for turn in text.split("<|im_start|>")[1:]]


def test_several_calls_become_turns_of_their_own_where_a_template_takes_one() -> None:
    single = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('single') }}{% endif %}"
    source = TEMPLATES["llama"].replace("{{ m.content }}", single + "{{ m.content }}")
    text = ChatTemplate(source, {}).render(two_calls(), TOOLS)
    assert roles(text) == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    first, second = text.split("<|im_start|>")[2:4], text.split("<|im_start|>")[4:6]
    assert '"get_weather"' in first[0]
    assert "result 0" in first[1]
    assert '"search.web-2"' in second[0]
    assert "result 1" in second[1]


def test_foreign_ids_get_nine_letters_where_a_template_wants_them() -> None:
    source = TEMPLATES["mistral"].replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    text = ChatTemplate(source, {}).render(two_calls(), TOOLS)
    ids = {turn[5:14] for turn in text.split("<|im_start|>") if turn.startswith("tool\n")}
    assert len(ids) == 2
    assert all(item.isalnum() for item in ids)
    assert "call_" not in text


ALTERNATES = """{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}
{{ raise_exception('roles must alternate') }}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}"""  # as Gemma 2 and the first Mistral 7B


def test_a_template_of_two_roles_takes_every_conversation() -> None:
    system = {"role": "system", "content": "Be brief."}
    other = {"role": "user", "content": "Now!"}
    template = ChatTemplate(ALTERNATES, {})
    assert not template.traits.system
    text = template.render([system, *MESSAGES, other, other], TOOLS)
    assert roles(text) == ["user", "assistant", "user"]
    asked, call, results = text.split("<|im_start|>")[1:]
    assert asked.index("Be brief.") < asked.index("search.web-2") < asked.index(ASK)
    assert '{"name": "get_weather", "arguments": {"city": "Zürich"}}' in call
    assert results.count("get_weather returned:") == 2
    assert results.endswith("Now!\n\nNow!<|im_end|>")


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_a_template_would_leave_out_is_shown_as_the_users(role: str) -> None:
    source = TEMPLATES["hermes"].replace(
        "{{ m.content }}", "{% if m.role != ROLE %}{{ m.content }}{% endif %}"
    )
    template = ChatTemplate(source.replace("ROLE", repr(role)), {})
    text = template.render([{"role": "system", "content": "Be brief."}, *MESSAGES], TOOLS)
    for word in ("Be brief.", '"city": "Zürich"', "sunny", "warm"):
        assert word in text


def test_a_template_for_pictures_gets_texts_as_parts() -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = ChatTemplate(TEMPLATES["hermes"].replace("{{ m.content }}", parts), {})
    system = {"role": "system", "content": "Be brief."}
    expected = ChatTemplate(TEMPLATES["hermes"], {}).render([system, *MESSAGES], TOOLS)
    assert template.render([system, *MESSAGES], TOOLS) == expected
    begun = template.render([MESSAGES[0], {"role": "assistant", "content": "So far"}])
    assert begun.endswith("<|im_start|>assistant\nSo far")


def test_what_a_template_refuses_only_sometimes_is_rendered_as_text() -> None:
    late = "{% if m.role == 'tool' and not loop.last %}{{ raise_exception('late') }}{% endif %}"
    source = TEMPLATES["hermes"].replace("{{ m.content }}", late + "{{ m.content }}")
    text = ChatTemplate(source, {}).render([*MESSAGES, MESSAGES[0]], TOOLS)
    assert roles(text) == ["user", "assistant", "user", "assistant"]
    assert "<tool_call>" in text
    assert "sunny" in text


@pytest.mark.parametrize("wants", ["arguments", "arguments.strip()"])
def test_arguments_are_json_where_a_template_wants_a_text(wants: str) -> None:
    template = ChatTemplate(TEMPLATES["hermes"].replace("arguments | tojson", wants), {})
    assert template.traits.arguments_as_text
    assert '"arguments": {"city": "Zürich"}}' in template.render(MESSAGES, TOOLS)


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def render(*asked: Any) -> str:
        rendered.append(asked)
        return SHARED.render(*asked)

    process = TemplateProcess()
    monkeypatch.setattr(process, "render", render)
    template = ChatTemplate(TEMPLATES["hermes"], {}, process=process)
    template.render(MESSAGES, TOOLS)
    probes = len(rendered) - 1
    for _ in range(3):
        template.render(MESSAGES, TOOLS)
    process.close()
    assert len(rendered) == probes + 4
    assert probes <= 20


SYSTEMS = "{% for m in messages %}{% if m.role == 'system' %}"
ONE_SYSTEM = {
    "refuses a later one": "{% if not loop.first %}{{ raise_exception('first only') }}{% endif %}",
    "shows the last one": "{% if m != (messages | selectattr('role', 'eq', 'system') | list)[-1] %}"
    "{% continue %}{% endif %}",
}
SEVERAL: dict[str, list[dict[str, str]]] = {
    "as Claude Code": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "There are agents."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Look"},
    ],
    "as Codex": [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "There are agents."},
        {"role": "user", "content": "Look"},
    ],
}


@pytest.mark.parametrize("agent", SEVERAL)
@pytest.mark.parametrize("kind", ONE_SYSTEM)
def test_several_system_messages_are_shown_by_a_template_that_knows_one(
    kind: str, agent: str
) -> None:
    called = [*SEVERAL[agent], *MESSAGES[1:]]
    source = TEMPLATES["hermes"].replace("{% for m in messages %}", SYSTEMS + ONE_SYSTEM[kind], 1)
    source = source.replace(ONE_SYSTEM[kind], ONE_SYSTEM[kind] + "{% endif %}", 1)
    text = ChatTemplate(source, {}).render(called, TOOLS)
    places = [
        text.index(said) for said in ("Be brief.", "There are agents.", "Look", "<tool_call>")
    ]
    assert places == sorted(places)
    assert text.count("<|im_start|>system") == 1
    # A template that shows them where they stand gets them as they are.
    own = ChatTemplate(TEMPLATES["hermes"], {}).render(called, TOOLS)
    assert own.count("<|im_start|>system") == 2
