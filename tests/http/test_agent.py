"""An agent framework does a task with two tools, against a scripted model."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.http.chat_clients import clients

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
