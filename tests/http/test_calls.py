"""Rules of calls with a real engine, in each format and protocol (an agent: test_agent_loop)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.config import Settings
from specops.models.convert import Quantization, export_checkpoint
from specops.text.chat_template import ChatTemplate
from tests.checkpoints import make_llama_checkpoint
from tests.http.chat_clients import PROTOCOLS, Official, tool_choice, tools_of
from tests.http.real_engine import in_process
from tests.text.tools.scripts import TEMPLATES

pytestmark = pytest.mark.anyio


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
