"""Tools through the official clients: each of them understands what the model wrote."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from specops.config import Settings
from specops.models.convert import Quantization, export_checkpoint
from specops.request import FinishReason, GrammarKind, Output, TokenOutput
from specops.text.chat_template import ChatTemplate
from specops.text.tools.formats import THINKING
from tests.checkpoints import make_llama_checkpoint
from tests.fakes import FIRST_SPECIAL, STATS, FakeTokenizer, output
from tests.http.chat_clients import (
    CHAT_TOOLS,
    EVERY_CHAT,
    PROTOCOLS,
    RESPONSES_TOOLS,
    WEATHER,
    Official,
    chat,
    clients,
    messages,
    tool_choice,
    tools_of,
)
from tests.http.openai_api import CHAT, ENDPOINTS, MESSAGES, RESPONSES
from tests.http.real_engine import in_process
from tests.simulated_target import grammars, tokenizer
from tests.text.tools.scripts import BY_NAME, TEMPLATES, TOOLS, scripts, written

pytestmark = pytest.mark.anyio
FINISH = {
    "chat": ("stop", "tool_calls"),
    "messages": ("end_turn", "tool_use"),
    "responses": ("completed", "completed"),
    "ollama": ("stop", "stop"),
}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
both_ways = pytest.mark.parametrize("stream", [False, True])
ASKED = [{"role": "user", "content": "a"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


# The reader itself is tested with each format where it is: here one goes through every protocol.
# Sixteen answers have each number of calls with and without text and thoughts, and each cut.
ANSWERS = 16
EVERYWHERE = ("hermes", "lfm", "gemma4")
WAYS = [
    (name, protocol, stream)
    for name in EVERYWHERE
    for protocol in EVERY_CHAT
    for stream in (False, True)
]


@pytest.mark.parametrize(
    ("name", "protocol", "stream"),
    [*WAYS, *((name, "chat", True) for name in TEMPLATES if name not in EVERYWHERE)],
)
async def test_answers_of_each_format_are_understood(
    name: str, protocol: str, stream: bool
) -> None:
    form = BY_NAME[name]
    tools = tools_of(protocol, *(tool.for_template()["function"] for tool in TOOLS))
    # Of a model that thinks. Where the steps end does not matter: tests of the reader cut anywhere.
    async with clients(TEMPLATES[name] + "{# </think> #}") as here:
        for number, script in enumerate(scripts(form)[:ANSWERS]):
            answer = script.answer
            size = 1 if number == 0 else 1 + len(answer) // (2 + number % 5)
            here.say(*(answer[at : at + size] for at in range(0, len(answer), size)))
            said = await EVERY_CHAT[protocol](here, stream=stream, tools=tools)
            assert (said.text, said.reasoning) == (script.text, script.reasoning)
            assert said.calls == script.calls
            assert said.finish == FINISH[protocol][bool(script.calls)]


@every_protocol
async def test_a_call_that_is_cut_off_is_no_end_of_the_turn(protocol: str) -> None:
    async with clients() as here:
        here.say(CALL[:-20], finish=FinishReason.LENGTH)
        if protocol == "messages":
            said = await messages(here, stream=False)
            assert (said.calls, said.finish) == ((("get_weather", {}),), "max_tokens")
        elif protocol == "responses":
            ask: Any = here.openai.responses.create
            answer = await ask(model="fake", input="a", tools=RESPONSES_TOOLS)
            assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
            assert answer.incomplete_details.reason == "max_output_tokens"
            events = await ask(model="fake", input="a", tools=RESPONSES_TOOLS, stream=True)
            sent = {event.type: event async for event in events}
            assert sent["response.output_item.done"].item.status == "incomplete"
            assert sent["response.incomplete"].response.output[0].status == "incomplete"
        else:
            ask = here.openai.chat.completions.create
            answer = await ask(model="fake", messages=ASKED, tools=CHAT_TOOLS)
            assert answer.choices[0].finish_reason == "length"


async def test_names_come_first_then_pieces_of_arguments() -> None:
    async with clients() as here:
        here.say(*CALL)
        ask: Any = here.openai.chat.completions.create
        stream = await ask(model="fake", messages=ASKED, tools=CHAT_TOOLS, stream=True)
        first, *rest = [
            call
            async for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
    sent = first.function
    assert (sent.name, sent.arguments, first.type) == ("get_weather", "", "function")
    assert len(rest) > 10
    assert all(call.id is None and call.function.name is None for call in rest)
    assert "".join(call.function.arguments for call in rest) == '{"city": "Zürich"}'


CALLED = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
USE = {"type": "tool_use", "id": "abc", "name": "get_weather", "input": {"city": "Zürich"}}
SUNNY = {"type": "text", "text": "sunny"}
RESULT = {"type": "tool_result", "tool_use_id": "abc", "content": [SUNNY]}
HISTORY: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "abc", "type": "function", "function": CALLED}],
            },
            {"role": "tool", "tool_call_id": "abc", "content": "sunny"},
        ]
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [THOUGHT, USE]},
            {"role": "user", "content": [RESULT]},
        ]
    },
    "responses": {
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "abc", **CALLED},
            {"type": "function_call_output", "call_id": "abc", "output": "sunny"},
        ]
    },
}


@every_protocol
async def test_the_model_reads_the_same_history_whatever_the_protocol(protocol: str) -> None:
    async with clients() as here:
        here.say("Sunny.")
        await PROTOCOLS[protocol](here, stream=False, tools=[], **HISTORY[protocol])
        prompt = here.prompt
    assert prompt.replace("\n", "") == (
        "<|im_start|>userWeather?<|im_end|>"
        "<|im_start|>assistant<think>hm</think>"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call><|im_end|>'
        "<|im_start|>toolsunny<|im_end|><|im_start|>assistant"
    )


@both_ways
@every_protocol
async def test_thoughts_may_begin_in_prompts_that_end_with_a_result(
    protocol: str, stream: bool
) -> None:
    """As Gemma 4's, where thinking is on: those that end with a question leave it to the model."""
    opens = "{% if messages[-1].role == 'tool' %}<|channel>thought\n{% endif %}{# <channel|> #}"
    async with clients(TEMPLATES["gemma4"] + opens) as here:
        here.say("hm", "\n<channel|>Sunny.")
        ask = PROTOCOLS[protocol]
        answer = await ask(here, stream=stream, tools=[], **HISTORY[protocol])
        assert (answer.reasoning, answer.text) == ("hm", "Sunny.")
        answer = await ask(here, stream=stream, tools=[])
        assert answer.reasoning == ""
        assert answer.text.endswith("Sunny.")
        here.say("<|channel>thought\nhm<channel|>", "Sunny.")
        answer = await ask(here, stream=stream, tools=[])
        assert (answer.reasoning, answer.text) == ("hm", "Sunny.")


def binding(protocol: str, how: str) -> dict[str, Any]:
    """Fields that bind the model: a choice of tools, or tools that are `strict`; `auto`: none."""
    if how in ("auto", "strict"):
        strict = {"tools": tools_of(protocol, WEATHER | {"strict": True})}
        return strict if how == "strict" else {}
    return tool_choice(protocol, how)


@every_protocol
async def test_what_tool_choice_and_strict_tools_ask_for_binds_the_model(protocol: str) -> None:
    async with clients() as here:
        here.say("a")
        for how in ("auto", "none", "required", "named", "one", "strict"):
            await PROTOCOLS[protocol](here, stream=False, **binding(protocol, how))
            assert ("get_weather" in here.prompt) == (how != "none")
            grammar = here.request.sampling.grammar
            if how in ("auto", "none"):
                assert grammar is None
                continue
            assert grammar.kind is GrammarKind.LARK
            assert ("get_weather" in grammar.text) == (how != "named")
            assert ("said" in grammar.text) == (how in ("one", "strict"))  # a text is allowed


SEARCH_ONLY: dict[str, Any] = {
    "chat": {"tools": [{"type": "function", "function": {"name": "search"}}]},
    "responses": {"tools": [{"type": "function", "name": "search"}]},
}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("protocol", SEARCH_ONLY)
async def test_some_of_the_tools_may_be_called_and_the_prompt_describes_all(
    protocol: str, mode: str
) -> None:
    """So a client that changes what may be called leaves the prompt's beginning as it was."""
    allowed = {"mode": mode, **SEARCH_ONLY[protocol]}
    nested = {"allowed_tools": allowed} if protocol == "chat" else allowed
    async with clients() as here:
        here.say("a")
        choice = {"type": "allowed_tools", **nested}
        await PROTOCOLS[protocol](here, stream=False, tool_choice=choice)
        assert "get_weather" in here.prompt
        matcher = grammars().matcher(here.request.sampling.grammar)
        for text, allows in (
            (written(BY_NAME["hermes"], [("search", {})]), True),
            (written(BY_NAME["hermes"], [("get_weather", {"city": "a"})]), False),
            ("Hello", mode == "auto"),
        ):
            tokens = [*tokenizer().encode(text, special_tokens=False), 0]
            assert (matcher.allows(tokens) == len(tokens)) is allows, text
        unknown = json.loads(json.dumps(choice).replace("search", "find"))
        with pytest.raises(openai.BadRequestError, match="there is no tool 'find'"):
            await PROTOCOLS[protocol](here, stream=False, tool_choice=unknown)


FORM = {"type": "object", "properties": {"place": {"type": "string"}}}
FORMS: dict[str, dict[str, Any]] = {
    "chat": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}
    },
    "messages": {"extra_body": {"guided_json": FORM}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": FORM}}},
}


@every_protocol
async def test_a_form_of_the_text_goes_together_with_tools(protocol: str) -> None:
    """An answer is calls by their schemas, or text by the form, as OpenAI has it."""
    async with clients() as here:
        ask = PROTOCOLS[protocol]
        here.say('{"place": "here"}')
        answer = await ask(here, stream=False, **FORMS[protocol])
        assert (answer.text, answer.calls) == ('{"place": "here"}', ())
        both = here.request.sampling.grammar
        assert "@said" in both.text
        assert json.loads(both.said.text) == FORM
        here.say(written(BY_NAME["hermes"], [("get_weather", {"city": "a"})]))
        answer = await ask(here, stream=False, **FORMS[protocol])
        assert answer.calls == (("get_weather", {"city": "a"}),)
        await ask(here, stream=False, **tool_choice(protocol, "required"), **FORMS[protocol])
        assert here.request.sampling.grammar.said is None
        await ask(here, stream=False, tools=[], **FORMS[protocol])
        alone = here.request.sampling.grammar
        assert alone.text.startswith("start: reasoning? @said")


async def test_a_model_that_does_not_think_answers_by_the_form_alone() -> None:
    async with clients(TEMPLATES["json"]) as here:
        here.say("{}")
        await chat(here, stream=False, tools=[], **FORMS["chat"])
    assert here.request.sampling.grammar.kind is GrammarKind.JSON_SCHEMA


async def test_a_schema_that_no_grammar_can_be_made_of_is_refused_with_the_reason() -> None:
    tool = WEATHER | {
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"$ref": "http://x"}}},
    }
    async with clients() as here:
        here.say("a")
        with pytest.raises(openai.BadRequestError) as wrong:
            await chat(here, stream=False, tools=[{"type": "function", "function": tool}])
    assert (wrong.value.param, wrong.value.code) == ("tools", "invalid_grammar")


@every_protocol
async def test_tools_that_this_server_has_not_are_skipped_and_named(protocol: str) -> None:
    other = {"type": "web_search_20250305", "name": "web_search"}
    async with clients() as here:
        here.say("a")
        path = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}[protocol]
        response = await here.http.post(path, json=ENDPOINTS[path] | {"tools": [other]})
    assert response.status_code == 200
    assert "tools.web_search_20250305" in response.headers["x-ignored-fields"]
    assert "web_search" not in here.prompt


@both_ways
@every_protocol
async def test_tags_that_are_special_tokens_are_known(protocol: str, stream: bool) -> None:
    tokenizer = FakeTokenizer("[TOOL_CALLS]", "[ARGS]", *THINKING[1])
    calls, args, thinks, thought = range(FIRST_SPECIAL, FIRST_SPECIAL + 4)
    said: tuple[int | str, ...] = (thinks, "hm", thought, calls, "get_weather", args)
    pieces = tuple(
        TokenOutput(ord(item[0]), item, "target")
        if isinstance(item, str)
        else TokenOutput(item, "", "target")
        for item in (*said, '{"city": "a"}')
    )
    async with clients(TEMPLATES["mistral-args"] + "{# [/THINK] #}") as here:
        here.service.loaded.tokenizer = tokenizer
        here.script([Output("", pieces, FinishReason.STOP, STATS)])
        answer = await PROTOCOLS[protocol](here, stream=stream)
        assert (answer.reasoning, answer.calls) == ("hm", (("get_weather", {"city": "a"}),))
        await PROTOCOLS[protocol](here, stream=False, **tool_choice(protocol, "required"))
    lark = here.request.sampling.grammar.text
    assert f"start: reasoning? <[{calls}]> calls" in lark
    assert f"<[{args}]> args_0" in lark


@both_ways
@pytest.mark.parametrize("protocol", EVERY_CHAT)
async def test_an_answer_ends_before_it_repeats_a_call(protocol: str, stream: bool) -> None:
    """In an open answer and in one that must call: the engine is told to end it."""
    calls = [("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Biel"})]
    text = written(BY_NAME["hermes"], [*calls, calls[0]])
    for how in ("auto", "required") if protocol in PROTOCOLS else ("auto",):
        async with clients() as here:
            here.script(output(text[at : at + 3]) for at in range(0, len(text), 3))
            ask = EVERY_CHAT[protocol]
            answer = await ask(here, stream=stream, **binding(protocol, how))
            assert (answer.calls, answer.finish) == (tuple(calls), FINISH[protocol][True])
            handle = here.service.submitted.get_nowait()
            assert handle.ended == {here.request.request_id}


async def test_usage_counts_the_tokens_up_to_a_repeated_call_however_they_came() -> None:
    text = written(BY_NAME["hermes"], [("search", {}), ("search", {}), ("search", {"a": 1})])
    counted = set()
    for tokens in (1, 4, len(text)):
        pieces = list(text)
        steps = [output(*pieces[at : at + tokens]) for at in range(0, len(pieces), tokens)]
        async with clients() as here:
            here.script(steps)
            ask: Any = here.openai.chat.completions.create
            answer = await ask(model="fake", messages=ASKED, tools=CHAT_TOOLS)
            counted.add(answer.usage.completion_tokens)
            assert len(answer.choices[0].message.tool_calls) == 1
    assert counted == {text.index("}}", text.index("}}") + 1) + 2}


@both_ways
async def test_one_of_several_answers_ends_alone(stream: bool) -> None:
    text = written(BY_NAME["hermes"], [("search", {}), ("search", {})])
    async with clients() as here:
        here.script([output(text)])
        body = {"model": "fake", "messages": ASKED, "tools": CHAT_TOOLS, "n": 2, "stream": stream}
        asked = asyncio.create_task(here.http.post(CHAT, json=body))
        handle = await here.service.submitted.get()
        response = await asked
        assert response.status_code == 200
        assert len(handle.ended) == 2
        assert not handle.cancelled.is_set()


@every_protocol
async def test_a_tool_that_is_named_is_called_once(protocol: str) -> None:
    async with clients() as here:
        here.say("a")
        counts = {}
        for how in ("required", "named"):
            await PROTOCOLS[protocol](here, stream=False, **tool_choice(protocol, how))
            matcher = grammars().matcher(here.request.sampling.grammar)
            for count in (1, 2):
                text = written(BY_NAME["hermes"], [("search", {})] * count)
                tokens = tokenizer().encode(text, special_tokens=False)
                counts[how, count] = matcher.allows(tokens) == len(tokens)
    assert counts == {
        ("required", 1): True, ("required", 2): True, ("named", 1): True, ("named", 2): False,
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "count"])
async def test_the_billing_line_of_claude_code_is_not_in_the_prompt(protocol: str) -> None:
    """It changes with every request: nothing after it would be found in the prefix cache."""
    prompts = set()
    for cch in ("eb6c6", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.100.{cch[:3]}; cch={cch};"
        parts = [{"type": "text", "text": text} for text in (line, "You are an agent.")]
        asked: dict[str, Any] = {"model": "fake", "messages": ASKED}
        body, path = {
            "chat": ({"messages": [{"role": "system", "content": parts}, *ASKED]}, CHAT),
            "messages": ({**asked, "system": parts, "max_tokens": 9}, MESSAGES),
            "responses": ({"instructions": f"{line}\nYou are an agent.", "input": "a"}, RESPONSES),
            "count": ({**asked, "system": parts}, f"{MESSAGES}/count_tokens"),
        }[protocol]
        async with clients() as here:
            here.say("a")
            response = await here.http.post(path, json=ENDPOINTS.get(path, {}) | body)
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "x-anthropic-billing-header"
        prompts.add(response.text if protocol == "count" else here.prompt)
    (prompt,) = prompts
    assert "billing" not in prompt


# -- a real engine ---------------------------------------------------------------------------------

PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = ({"name": "look", "parameters": PLACE}, {"name": "stop", "parameters": EMPTY})
POSSIBLE = [("look", {"place": "here"}), ("look", {"place": "there"}), ("stop", {})]


@pytest.fixture(scope="module")
def roomy_settings(tmp_path_factory: pytest.TempPathFactory, tiny_settings: Settings) -> Settings:
    """Settings of a model with random weights that has room for tools and their results."""
    folder: Path = tmp_path_factory.mktemp("roomy")
    checkpoint = make_llama_checkpoint(folder / "checkpoint", context=2048)
    export_checkpoint(checkpoint, folder / "model", quantization=Quantization.parse("int8-128"))
    return replace(tiny_settings, target=str(folder / "model"), draft="none", max_batched_tokens=96)


async def test_random_weights_make_the_calls_that_were_asked_for_and_end(
    roomy_settings: Settings,
) -> None:
    """As many as asked for, none twice: in each format and protocol, whole and streamed."""
    cases = [(name, "chat") for name in TEMPLATES]
    cases += [("hermes", protocol) for protocol in PROTOCOLS if protocol != "chat"]
    async with in_process(roomy_settings) as (service, http):
        here = Official.of(http)
        for name, protocol in cases:
            service.engine.chat_template = ChatTemplate(TEMPLATES[name], {})
            tools = tools_of(protocol, *FUNCTIONS)
            for how in ("required", "named", "one"):
                choice = tool_choice(protocol, "named" if how == "named" else "required", "look")
                if how == "one" and protocol == "messages":
                    choice["tool_choice"]["disable_parallel_tool_use"] = True
                elif how == "one":
                    choice["parallel_tool_calls"] = False
                limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
                body = {"model": service.engine.info.name, "tools": tools, limit: 600}
                body |= {"temperature": 0, **choice}
                said = await PROTOCOLS[protocol](here, stream=False, **body)
                assert said == await PROTOCOLS[protocol](here, stream=True, **body)
                ended = FINISH[protocol][True], ""
                assert (said.finish, said.text) == ended, (name, protocol, how)
                assert 1 <= len(said.calls) <= (3 if how == "required" else 1)
                assert all(said.calls.count(call) == 1 and call in POSSIBLE for call in said.calls)
                assert how != "named" or said.calls[0][0] == "look"
