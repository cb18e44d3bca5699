"""How much of an agent's system prompt and tools its later requests find in the prefix cache.

Recorded requests of coding agents (`recorded`) go through the API to an engine with random weights,
because cache hits depend only on tokens. Each chat template in turn writes the prompts. The figure
is the cached share of a prompt's tokens up to the end of its system prompt and tools. So for a
template that puts the history before the tools, the history counts, too.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.agents.recorded import FOLDER, Recording, load
from bench.tools.report import Outcome, Table, Target, progress
from specops.config import Settings
from specops.http.answering.prompt import Conversation, render
from specops.http.protocols.anthropic import MessagesRequest
from specops.http.protocols.openai.chat import ChatRequest
from specops.http.protocols.openai.responses import ResponsesRequest
from specops.models.convert import Quantization, export_checkpoint
from specops.serving.async_engine import AsyncEngine
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from tests.checkpoints import make_llama_checkpoint, train_tokenizer
from tests.http.real_engine import in_process
from tests.text.tools.scripts import TEMPLATES

_MIN_SHARE = 0.95
_CONTEXT = 1 << 16
_VOCAB = 4096
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_SECOND = "after a tool"  # the second request of each agent
_MARK = 24  # minimum characters of a line that identifies its place in a prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """The agents, and the number of templates (None: all)."""

    agents: tuple[str, ...] = ("claude-code", "opencode", "codex")
    templates: int | None = None


FULL = Plan()
QUICK = Plan(agents=("opencode",), templates=1)


class _Protocol(NamedTuple):
    """How to read a protocol's request, and where its answer says how much was cached."""

    conversation: Callable[[dict[str, Any]], Conversation]
    limit: str
    cached: Callable[[dict[str, Any]], int]


PROTOCOLS = {
    "/v1/messages": _Protocol(
        lambda body: MessagesRequest.model_validate(body).conversation(),
        "max_tokens",
        lambda usage: usage["cache_read_input_tokens"],
    ),
    "/v1/chat/completions": _Protocol(
        lambda body: ChatRequest.model_validate(body).conversation(),
        "max_tokens",
        lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    ),
    "/v1/responses": _Protocol(
        lambda body: ResponsesRequest.model_validate(body).conversation({}),
        "max_output_tokens",
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
}


@dataclass(frozen=True, slots=True)
class Reuse:
    """One agent's requests with one template.

    Attributes:
        tokens: tokens of the second request's prompt up to the end of its system prompt and tools.
        shares: cached share of these tokens, for each request after the first.
        refused: why the template refuses these requests.
    """

    agent: str
    template: str
    tokens: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""


def run(folders: Sequence[Path], plan: Plan) -> Outcome:
    """Send each agent's requests with each template.

    Args:
        folders: folders with templates (`*.jinja`), in addition to a short one per call format.
        plan: which agents and templates to use.
    """
    templates = [*TEMPLATES.items(), *_templates(folders)][: plan.templates]
    agents = [load(FOLDER / f"{name}.json") for name in plan.agents]
    found = asyncio.run(_play(agents, templates))
    kinds = list(dict.fromkeys(kind for agent in agents for kind in list(agent.requests)[1:]))
    rows = [
        (
            item.template,
            item.agent,
            str(item.tokens or ""),
            *(f"{item.shares[kind]:.3f}" if kind in item.shares else "" for kind in kinds),
            item.refused,
        )
        for item in found
    ]
    table = Table(
        "System prompts and tools of agents that later requests find in the prefix cache",
        ("template", "agent", "tokens", *kinds, "refused"),
        rows,
        ("share of the tokens up to the end of system prompt and tools; tokens: of the second "
         "request, by a vocabulary of 4,096",),
    )  # fmt: skip
    targets = []
    for agent in agents:
        seconds = [one.shares[_SECOND] for one in found if one.agent == agent.agent and one.shares]
        title = f"{agent.agent}, second request, all templates: share"
        targets.append(Target(title, _MIN_SHARE, min(seconds, default=0.0)))
    return Outcome({"reuse": [asdict(item) for item in found]}, [table], targets=targets)


def _templates(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted(folder.glob("*.jinja")):
            yield path.stem, path.read_text(encoding="utf-8")


async def _play(agents: Sequence[Recording], templates: Sequence[tuple[str, str]]) -> list[Reuse]:
    """Send all requests; each case is a separate client, so that it finds no other's prompts."""
    cases = [(name, source, agent) for name, source in templates for agent in agents]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            target=str(_model(Path(folder), agents)),
            draft="none",
            quant="int8-128",
            cache_dir=Path(folder) / "cache",
            context=_CONTEXT,
            kv_tokens=2 * _CONTEXT,
            max_batched_tokens=4096,
            max_inter_token_latency=10.0,
            api_keys=",".join(f"client{number}:key{number}" for number in range(len(cases))),
        )
        async with in_process(settings) as (service, http):
            found = []
            for number, (name, source, agent) in enumerate(cases):
                progress(f"{name}, {agent.agent}")
                http.headers["authorization"] = f"Bearer key{number}"
                try:
                    service.engine.chat_template = ChatTemplate(source, _TOKENS)
                    found.append(await _case(service, http, name, agent))
                except (ChatTemplateError, _RefusedError) as error:
                    found.append(Reuse(agent.agent, name, refused=str(error)[:80]))
            return found


class _RefusedError(RuntimeError):
    """The service did not answer a request."""


async def _case(
    service: AsyncEngine, http: httpx.AsyncClient, template: str, agent: Recording
) -> Reuse:
    protocol, second = PROTOCOLS[agent.path], 0
    shares: dict[str, float] = {}
    for kind, body in agent.requests.items():
        own = body | {"stream": False, protocol.limit: 1, "model": service.engine.info.name}
        own.pop("stream_options", None)
        response = await http.post(agent.path, json=own)
        if response.is_error:
            raise _RefusedError(response.json()["error"]["message"])
        asked = protocol.conversation(own)
        prompt = render(service.engine, asked)
        tokens = len(service.engine.encode_chat(prompt[: end_of_tools(prompt, asked)]))
        shares[kind] = min(1.0, protocol.cached(response.json()["usage"]) / tokens)
        second = tokens if kind == _SECOND else second
    del shares[next(iter(agent.requests))]
    return Reuse(agent.agent, template, second, shares)


def end_of_tools(prompt: str, asked: Conversation) -> int:
    """The position in a prompt at which its system prompt and tools end."""
    first = takewhile(lambda message: message["role"] == "system", asked.messages)
    texts = [message["content"] for message in first]
    texts += [text for tool in asked.tools for text in _descriptions(tool.for_template())]
    lines = [line for text in texts for line in text.split("\n") if len(line) >= _MARK]
    found = [prompt.rfind(line) + len(line) for line in lines if line in prompt]
    if not found:
        raise _RefusedError("the template shows neither system prompt nor tools")
    return max(found)


def _descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(text := value.get("description"), str):
            yield text
        for item in value.values():
            yield from _descriptions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _descriptions(item)


def _model(folder: Path, agents: Sequence[Recording]) -> Path:
    """A small random model with a long context and a vocabulary trained on the requests."""
    checkpoint = make_llama_checkpoint(
        folder / "checkpoint", hidden=32, heads=2, kv_heads=1, layers=1, ffn=64, vocab=_VOCAB,
        context=_CONTEXT,
    )  # fmt: skip
    texts = [json.dumps(list(agent.requests.values())[:1]) for agent in agents]
    train_tokenizer(checkpoint, texts, _VOCAB)
    export_checkpoint(checkpoint, folder / "model", quantization=Quantization.parse("int8-128"))
    shutil.rmtree(checkpoint)
    return folder / "model"
