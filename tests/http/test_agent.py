"""Agents' loops: a framework against a scripted model, and rules of calls with real engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from specops.config import Settings
from specops.models.convert import Quantization, export_checkpoint
from specops.text.chat_template import ChatTemplate
from tests.checkpoints import make_llama_checkpoint
from tests.http.chat_clients import PROTOCOLS, Official, clients, tool_choice, tools_of
from tests.http.real_engine import in_process
from tests.text.tools.scripts import TEMPLATES

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_an_agent_does_a_task_with_two_tools(
    kind: type[OpenAIChatModel] | type[OpenAIResponsesModel],
) -> None:
    async with clients() as here:
        model = kind("fake", provider=OpenAIProvider(openai_client=here.openai))
        agent = Agent(model, instructions="Use the tools.")

        @agent.tool_plain
        def find_city(country: str) -> str:
            here.say('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>')
            return f"{country}: Bern"

        @agent.tool_plain
        def weather(city: str) -> str:
            here.say("It is sunny in Bern.")
            return f"{city}: sunny"

        here.say(
            '<tool_call>{"name": "find_city", "arguments": {"country": "Switzerland"}}</tool_call>'
        )
        done = await agent.run("How is the weather in the capital of Switzerland?")
    assert done.output == "It is sunny in Bern."
    assert len(here.service.requests) == 3
    for said in ("Use the tools.", "Switzerland: Bern", "Bern: sunny"):
        assert said in here.prompt


PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = ({"name": "look", "parameters": PLACE}, {"name": "stop", "parameters": EMPTY})
POSSIBLE = [("look", {"place": "here"}), ("look", {"place": "there"}), ("stop", {})]
CALLED = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}


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
                assert (said.finish, said.text) == (CALLED[protocol], ""), (name, protocol, how)
                assert 1 <= len(said.calls) <= (3 if how == "required" else 1)
                assert all(said.calls.count(call) == 1 and call in POSSIBLE for call in said.calls)
                assert how != "named" or said.calls[0][0] == "look"
