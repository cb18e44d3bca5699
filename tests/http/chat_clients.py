"""The official clients of the chat protocols, for an application with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from anthropic import AsyncAnthropic
from ollama import AsyncClient as AsyncOllama
from openai import AsyncOpenAI

from specops.request import FinishReason, GenerationRequest, Output
from specops.text.chat_template import ChatTemplate
from tests.fakes import FakeService, output
from tests.http.openai_api import api

ASK = "And the weather?"
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
SEARCH: dict[str, Any] = {"name": "search", "parameters": {"type": "object", "properties": {}}}


def tools_of(protocol: str, *functions: dict[str, Any]) -> list[Any]:
    """Describe functions as a protocol has them."""
    if protocol == "messages":
        renamed = {"parameters": "input_schema"}
        return [{renamed.get(key, key): value for key, value in item.items()} for item in functions]
    if protocol == "responses":
        return [{"type": "function", **item} for item in functions]
    return [{"type": "function", "function": item} for item in functions]


def tool_choice(protocol: str, how: str, name: str = "search") -> dict[str, Any]:
    """The fields that let the model call `none` of the tools, have it call some (`required`) or
    the one with the name (`named`), or allow only `one` call."""
    if protocol == "messages":
        kinds = {"none": "none", "required": "any", "named": "tool", "one": "auto"}
        more = {"named": {"name": name}, "one": {"disable_parallel_tool_use": True}}
        return {"tool_choice": {"type": kinds[how], **more.get(how, {})}}
    if how == "one":
        return {"parallel_tool_calls": False}
    one = {"name": name}
    named = {"type": "function", **({"function": one} if protocol == "chat" else one)}
    return {"tool_choice": named if how == "named" else how}


CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS = (
    tools_of(protocol, WEATHER, SEARCH) for protocol in ("chat", "messages", "responses")
)
# Qwen's, in short: thoughts, tools and calls in its own forms.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content }}{% for call in m.tool_calls or [] %}
{{ "" if loop.first and not m.content else "\\n" }}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
<|im_end|>{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""


@dataclass
class Official:
    """OpenAI's and Anthropic's clients of one application."""

    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    @classmethod
    def of(cls, http: httpx.AsyncClient, key: str = "key") -> Official:
        """Make them of a client of the application."""
        return cls(
            AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0),
            AsyncAnthropic(base_url="http://test", api_key=key, http_client=http, max_retries=0),
        )


@dataclass
class Clients(Official):
    """Clients of one application, and its scripted service."""

    service: FakeService
    http: httpx.AsyncClient
    ollama: AsyncOllama

    def say(self, *pieces: str, finish: FinishReason = FinishReason.STOP) -> None:
        """Script the next answers, a step per piece."""
        self.script([*(output(piece) for piece in pieces), output(finish=finish)])

    def script(self, answer: Iterable[Output]) -> None:
        self.service.answer = tuple(answer)

    @property
    def request(self) -> GenerationRequest:
        """The last request of the engine."""
        return self.service.requests[-1]

    @property
    def prompt(self) -> str:
        """The last prompt, without special tokens."""
        return self.service.loaded.tokenizer.decode(self.request.prompt_tokens)


@asynccontextmanager
async def clients(
    template: str = TEMPLATE, key: str = "key", **settings: Any
) -> AsyncIterator[Clients]:
    async with api(FakeService(), **settings) as here:
        here.service.loaded.chat_template = ChatTemplate(template, {})
        both = Official.of(here.client, key)
        ollama = AsyncOllama("http://test", transport=httpx.ASGITransport(here.app))
        yield Clients(both.openai, both.anthropic, here.service, here.client, ollama)


@dataclass(frozen=True)
class Said:
    """An answer as a client understood it, whatever protocol it speaks."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]
    finish: str


async def whole(endpoint: Any, final: str, *, stream: bool, **body: Any) -> Any:
    """The whole answer of an official client; of a stream, what its `get_final_…` returns."""
    if not stream:
        return await endpoint.create(**body)
    async with endpoint.stream(**body) as events:
        return await getattr(events, f"get_final_{final}")()


async def chat(here: Official, *, stream: bool, **body: Any) -> Said:
    """Ask OpenAI's older protocol."""
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": ASK}],
        "tools": CHAT_TOOLS,
    } | body
    answer = await whole(here.openai.chat.completions, "completion", stream=stream, **body)
    (choice,) = answer.choices
    sent = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in sent.tool_calls or ()
    ]
    ids = {call.id for call in sent.tool_calls or ()}
    assert len(ids) == len(calls)
    reasoning = getattr(sent, "reasoning_content", None)
    return Said(sent.content or "", reasoning or "", tuple(calls), choice.finish_reason)


async def messages(here: Official, *, stream: bool, **body: Any) -> Said:
    """Ask Anthropic's protocol."""
    asked = [{"role": "user", "content": ASK}]
    body = {"model": "fake", "max_tokens": 99, "messages": asked, "tools": MESSAGES_TOOLS} | body
    answer = await whole(here.anthropic.messages, "message", stream=stream, **body)
    text = "".join(block.text for block in answer.content if block.type == "text")
    thought = "".join(block.thinking for block in answer.content if block.type == "thinking")
    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    return Said(text, thought, tuple(calls), answer.stop_reason)


async def responses(here: Official, *, stream: bool, **body: Any) -> Said:
    """Ask OpenAI's newer protocol."""
    body = {"model": "fake", "input": ASK, "tools": RESPONSES_TOOLS} | body
    answer = await whole(here.openai.responses, "response", stream=stream, **body)
    thought = "".join(
        part.text for item in answer.output if item.type == "reasoning" for part in item.content
    )
    calls = [
        (item.name, json.loads(item.arguments))
        for item in answer.output
        if item.type == "function_call"
    ]
    return Said(answer.output_text, thought, tuple(calls), answer.status)


async def ollama(here: Clients, *, stream: bool, **body: Any) -> Said:
    """Ask Ollama's protocol."""
    asked = [{"role": "user", "content": ASK}]
    body = {"model": "fake", "messages": asked, "tools": CHAT_TOOLS, "stream": stream} | body
    answer: Any = await here.ollama.chat(**body)
    parts = [part async for part in answer] if stream else [answer]
    text = "".join(part.message.content or "" for part in parts)
    thought = "".join(part.message.thinking or "" for part in parts)
    found = [call.function for part in parts for call in part.message.tool_calls or ()]
    calls = [(one.name, dict(one.arguments)) for one in found]
    return Said(text, thought, tuple(calls), parts[-1].done_reason)


PROTOCOLS = {"chat": chat, "messages": messages, "responses": responses}
# Ollama's cannot be told which tool to call, and has its errors and histories in a form of its own.
EVERY_CHAT: dict[str, Any] = PROTOCOLS | {"ollama": ollama}
