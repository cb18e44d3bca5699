"""Fakes of the service below the API: a test decides what they answer, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from specops.engine.model_info import ModelInfo, ModelState
from specops.request import (
    TARGET,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    SourceStats,
    TokenOutput,
)
from specops.runtime.cost_model import PrefillSpeed
from specops.sampling_defaults import SamplingDefaults
from specops.serving.admission import QueueFull
from specops.serving.async_engine import NotReady
from specops.serving.request_handle import QueuePosition, RequestHandle
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.grammar import Grammars
from specops.text.tokenizer import _BYTES, Tokenizer
from specops.text.tools.formats import Tool

BEGIN, END = "<|begin|>", "<|end|>"
BEGIN_TOKEN, END_TOKEN = 256, 257  # behind the bytes
FIRST_SPECIAL = 258  # of those that one test needs
PREFIX, SUFFIX, MIDDLE, FILE = range(FIRST_SPECIAL, FIRST_SPECIAL + 4)  # of `fills_in`
INFO = ModelInfo(
    name="fake",
    quant="int8-128",
    parameters=8_000_000,
    draft_parameters=800_000,
    draft_quant="int8-128",
    drafters=("draft", "head", "suffix", "cascade", "none"),
    default_drafter="cascade",
    vocab_size=264,
    context=64,
    slots=2,
    kv_tokens=128,
    kv_bytes=1024,
    kv_dtype="fp16",
    threads=1,
    kernels="plain C",
    ort_matmuls=(),
    chat=False,
    sampling=SamplingDefaults(),
    reading=PrefillSpeed(1 / 256),
    embedding_size=4,
    head=Path("/models/fake/head"),
    ngrams=Path("/models/fake/ngrams.bin"),
    head_agreement=0.5,
)
STATS = GenerationStats(
    prompt_tokens=3,
    cached_prompt_tokens=1,
    generated_tokens=5,
    sequence_steps=2,
    drafts=1,
    draft_misses=1,
    sources={"suffix": SourceStats([1, 1, 1], [1, 1, 0], [1, 1, 1])},
    accepted_found_in={"table": 2},
    queue_seconds=0.25,
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


def output(*texts: str, finish: FinishReason | None = None, origin: str = TARGET) -> Output:
    """Make the output of one step: a piece for each text, and statistics if it is the last."""
    pieces = tuple(TokenOutput(_token(text), text, origin) for text in texts)
    return Output("fake", pieces, finish, STATS if finish else None)


def _token(text: str) -> int:
    """A token for a piece of text: its first byte, or what ends a text."""
    return text.encode(errors="replace")[0] if text else END_TOKEN


class _Broken(Output):
    """An output that raises an exception when it is read."""

    def __init__(self, cause: Exception) -> None:
        self.cause, self.finish = cause, None

    @property
    def request_id(self) -> str:  # type: ignore[override]
        raise self.cause


class FakeHandle(RequestHandle):
    """Yields pushed outputs and raises pushed exceptions; a cancellation ends it."""

    def __init__(
        self, requests: Sequence[GenerationRequest], queue_position: QueuePosition
    ) -> None:
        super().__init__(requests, queue_position, self._leave, self._end)
        self._finished = 0
        self.cancelled = asyncio.Event()
        self.ended: set[str] = set()

    def push(self, *outputs: Output | Exception, to: int = 0) -> FakeHandle:
        """Push outputs for the request with the index `to`."""
        own = self.requests[to].request_id
        for item in outputs:
            whole = isinstance(item, Output)
            self.deliver(replace(item, request_id=own) if whole else _Broken(item))
        return self

    async def outputs(self, pause: float | None = None) -> AsyncIterator[list[Output]]:
        """Yield the outputs, and count the last ones."""
        async for outputs in super().outputs(pause):
            self._finished += sum(item.finish is not None for item in outputs)
            yield outputs

    def _end(self, request_id: str) -> None:
        """End one answer; outputs that are on their way already still come."""
        if request_id not in self.ended:
            self.ended.add(request_id)
            index = [item.request_id for item in self.requests].index(request_id)
            self.push(output(finish=FinishReason.STOP), to=index)

    def _leave(self) -> None:
        if self._finished < len(self.requests) and not self.cancelled.is_set():
            self.cancelled.set()
            for index in range(len(self.requests)):
                self.push(output(finish=FinishReason.CANCELLED), to=index)


class FakeTokenizer(Tokenizer):
    """A real tokenizer, with a token for each byte and special tokens behind them.

    Args:
        special: tokens of its own, from `FIRST_SPECIAL` on.
        shown: more of them, which decoded texts show.
    """

    def __init__(self, *special: str, shown: Sequence[str] = ()) -> None:
        fast = FastTokenizer(BPE(_BYTES, merges=[]))
        fast.pre_tokenizer = ByteLevel(add_prefix_space=False)  # words, as in real ones
        fast.decoder = ByteLevelDecoder()
        fast.add_special_tokens([BEGIN, END, *special])
        fast.add_tokens(list(shown))
        fast.post_processor = TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_TOKEN)]
        )
        super().__init__(fast)


def fills_in() -> FakeTokenizer:
    """The tokenizer of a model that fills in."""
    return FakeTokenizer(shown=["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])


def begun(text: str) -> tuple[int, ...]:
    """The tokens of a text, with the special token that begins it."""
    return (BEGIN_TOKEN, *text.encode())


@cache
def grammars() -> Grammars:
    """Grammars over these tokens."""
    return Grammars(FakeTokenizer(), INFO.vocab_size, frozenset({END_TOKEN}))


class Waiting(FakeTokenizer):
    """A tokenizer, a chat template and a compiler of grammars that work when the test lets them."""

    calls = reasoning_tags = None
    ignored: tuple[object, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.begun.set()
        assert self.may.wait(60)

    def parts(self, text: str, *, special_tokens: bool = True) -> Iterator[list[int]]:
        self._wait()
        return super().parts(text, special_tokens=special_tokens)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        self._wait()
        return super().decode(tokens, special=special)

    def render(self, *_: object, **__: object) -> str:
        self._wait()
        return "a"

    def opens_reasoning(self, *_: object) -> bool:
        return False

    def compiled(self, *_: object) -> None:
        """Nothing is compiled yet."""

    def matcher(self, *_: object) -> Waiting:
        self._wait()
        return self

    def stop(self) -> None:
        """Nothing ends early."""


class FakeEngine:
    """The part of `Engine` that the API uses."""

    def __init__(self) -> None:
        self.info = INFO
        self.tokenizer: Tokenizer = FakeTokenizer()
        self.grammars = grammars()
        source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        self.chat_template: ChatTemplate | None = ChatTemplate(source, {})

    def encode(self, text: str, *, any_length: bool = False) -> tuple[int, ...]:
        return self.tokenizer.encode(text)

    def render_chat(
        self,
        messages: list[Any],
        tools: Sequence[Tool] = (),
        options: Any = None,
        *,
        asks: bool = True,
    ) -> str:
        if self.chat_template is None:
            raise ChatTemplateError("there is no template")
        return self.chat_template.render(messages, tools, options, asks=asks)

    def collected(
        self, parts: Iterable[Sequence[int]], *, any_length: bool = False
    ) -> tuple[int, ...]:
        return tuple(chain.from_iterable(parts)) or (BEGIN_TOKEN,)

    def encode_chat(
        self, prompt: str, *, begins: bool = True, any_length: bool = False
    ) -> tuple[int, ...]:
        tokens = self.tokenizer.encode(prompt, special_tokens=False)
        begin = self.tokenizer.begin if begins and tokens[:1] != self.tokenizer.begin else ()
        return (*begin, *tokens) or (BEGIN_TOKEN,)


class FakeAdmission:
    """The part of `AdmissionController` that routes use; all requests get `refusal`."""

    def __init__(self, refusal: Exception | None) -> None:
        self._refusal = refusal

    def check(self, count: int, tokens: int = 0) -> None:
        if isinstance(self._refusal, QueueFull):
            raise self._refusal

    def reserve(self, count: int = 1) -> Callable[[], None]:
        self.check(count)
        return lambda: None


class FakeService:
    """The public part of `AsyncEngine`. Every request gets the outputs of `answer`.

    Without `answer`, a test takes the handles from `submitted` and pushes outputs itself.
    """

    def __init__(self, answer: Iterable[Output] | None = None) -> None:
        self.state = ModelState.READY
        self.error: str | None = None
        self.detail = ""
        self.alive = True
        self.crashed = asyncio.Event()
        self.info: ModelInfo | None = INFO
        self.loaded = FakeEngine()
        self.running = 0
        self.waiting = 0
        self.queue_position = QueuePosition(0, 0.0)
        self.refusal: Exception | None = None
        self.calls: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.submitted: asyncio.Queue[FakeHandle] = asyncio.Queue()
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()  # a test that watches the draining clears it
        self.may_stop.set()
        self.answer = None if answer is None else tuple(answer)

    @property
    def engine(self) -> FakeEngine:
        if self.info is None or self.state is not ModelState.READY:
            raise NotReady(self.state, self.error or "not ready")
        self.loaded.info = self.info
        return self.loaded

    @property
    def admission(self) -> FakeAdmission:
        return FakeAdmission(self.refusal)

    def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")
        self.state = ModelState.DRAINING
        self.stopping.set()
        await self.may_stop.wait()

    def submit(self, *requests: GenerationRequest) -> FakeHandle:
        if self.refusal:
            raise self.refusal
        handle = FakeHandle(requests, self.queue_position)
        for index in range(len(requests)):
            handle.push(*(self.answer or ()), to=index)
        self.requests += requests
        self.submitted.put_nowait(handle)
        return handle
