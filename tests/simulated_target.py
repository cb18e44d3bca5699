"""A simulated target for the engine's tests, with a clock of its own and TinyLlama's costs.

The KV cache is real. Instead of keys and values, each position holds one number that depends on all
numbers before it, read through the block tables. The next token depends on all of these numbers. So
a wrong block, a stale number or a missing copy changes the text, as it does with a model.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specops.config import Settings
from specops.engine.drafting import Drafting
from specops.engine.order import Order
from specops.engine.pass_budget import MANY_ROWS, PassBudget
from specops.engine.request_state import Drafters, RequestState
from specops.engine.scheduler import Scheduler
from specops.engine.slots import SlotManager
from specops.request import (
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    SamplingParams,
    Step,
)
from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.layer_shapes import Attention
from specops.runtime.sampling import Floats
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Drafter
from specops.speculation.safeguard import Safeguard
from specops.speculation.verifier import verify
from specops.text.grammar import Grammars
from specops.text.tokenizer import Tokenizer

VOCAB = 64  # the demo pair's first tokens: each but token 0 is one printable ASCII character
SHAPE = CacheShape((Attention(kv_heads=1, head_size=8),), "fp16")
GREEDY = SamplingParams()
# Milliseconds of a pass by its tokens: TinyLlama's shape in int4 on two cores.
TINYLLAMA = {
    1: 12.5, 2: 14.3, 3: 15.2, 4: 16.3, 6: 19.7, 8: 23.6, 9: 24.6, 10: 29.1, 12: 32.0,
    16: 39.5, 24: 58.5, 32: 75.3, 48: 109.0, 64: 147.0, 96: 209.0,
}  # fmt: skip
PAIR_SECONDS = 1e-6
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ids = count()


def tinyllama(share: float = 1.0, logit_seconds: float = 0.0) -> CostModel:
    """A cost model of these passes, or of passes that take a share of their time."""
    seconds = [share * item / 1000 for item in TINYLLAMA.values()]
    return CostModel(list(TINYLLAMA), seconds, share * PAIR_SECONDS, 0.0, logit_seconds)


@dataclass(frozen=True)
class Text:
    """Determines which token follows a sequence of tokens.

    Attributes:
        surprise: share of positions at which the last token alone does not determine the next.
        seed: texts of two seeds agree where neither has a surprise.
    """

    surprise: float = 0.25
    seed: int = 0
    vocab_size: int = VOCAB

    def key(self, state: int, token: int) -> int:
        """The number of a token that follows tokens whose numbers add up to `state`."""
        return _mixed((state + (token + 1) * _GOLDEN + self.seed) & _WORD)

    def grow(self, state: int, position: int, key: int) -> int:
        """The state after one more position, whose number is `key`."""
        return (state + key * (2 * position + 1)) & _WORD

    def logits(self, states: Sequence[int], last: Sequence[int]) -> Floats:
        """Logits [n, V] after the states [n], whose last tokens are [n]."""
        offsets = np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        seeds = np.array([_mixed(state) for state in states], np.uint64)
        noise = seeds[:, None] + offsets
        noise = (noise ^ (noise >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        logits = (noise >> np.uint64(40)).astype(np.float32) * np.float32(4 / (1 << 24))
        for row, (seed, token) in enumerate(zip(seeds.tolist(), last, strict=True)):
            if seed / _WORD >= self.surprise:
                logits[row, (3 * token + 7) % self.vocab_size] += 6
        return logits

    def continuation(
        self, tokens: Iterable[int], most: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """The next `most` tokens, greedy or with a seed: as plain decoding must choose."""
        state, position, token = 0, -1, 0
        for position, token in enumerate(tokens):
            state = self.grow(state, position, self.key(state, token))
        found: list[int] = []
        rng = np.random.default_rng(0)
        while len(found) < most:
            logits = self.logits([state], [token])
            token = verify(
                logits,
                (),
                None,
                sampling=sampling,
                noise=sampling.seed,
                rng=rng,
                position=position + 1,
            ).next_token
            found.append(token)
            position += 1
            state = self.grow(state, position, self.key(state, token))
        return found


class Rest(NamedTuple):
    """Seconds of a step beside its pass: text and output."""

    step: float = 20e-6
    request: float = 6e-6
    draft_token: float = 5e-6
    token: float = 30e-6

    def seconds(self, step: Step) -> float:
        """Seconds of the rest of a step."""
        seconds = self.step + self.request * step.decoding + self.token * step.emitted_tokens
        return seconds + self.draft_token * step.draft_tokens


REST = Rest()


@dataclass
class Clock:
    """A clock, in seconds, that only passes move, and in `Served.step` the rest of a step."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedTarget:
    """Takes the place of `ModelRunner`.

    Args:
        num_slots, context, num_blocks, reuse: of the cache; by default with blocks for all tokens.
        max_tokens: largest number of tokens in a pass.
        text: determines the logits.
        clock: each pass moves it.
        slowness: a pass takes so many times as long as `costs` says.
        scatter: a pass takes up to this share more or less.
        costs: time of passes.
        rest: time of the rest of a step.

    Attributes:
        passes: the computed batches.
    """

    def __init__(
        self,
        *,
        num_slots: int = 8,
        context: int = 1024,
        num_blocks: int | None = None,
        reuse: PrefixSharing = PrefixSharing.CLIENT,
        max_tokens: int = 96,
        text: Text = Text(),
        clock: Clock | None = None,
        slowness: float = 1.0,
        scatter: float = 0.0,
        costs: CostModel | None = None,
        rest: Rest = REST,
    ) -> None:
        if num_blocks is None:
            num_blocks = num_slots * -(-context // BLOCK_TOKENS)
        self.cache = KvCache(
            SHAPE, num_blocks=num_blocks, num_slots=num_slots, context=context, reuse=reuse
        )
        self.max_tokens = max_tokens
        self.vocab_size = text.vocab_size
        self.text = text
        self.clock = Clock() if clock is None else clock
        self.passes: list[Batch] = []
        self.rest = rest
        self._costs = costs or tinyllama()
        self._slowness = slowness
        self._scatter = scatter
        self._rng = np.random.default_rng(0)
        self._memory = _memory(self.cache)
        self._memory[:] = self._rng.integers(0, _WORD, self._memory.shape, np.uint64)
        self._weights = 2 * np.arange(context + BLOCK_TOKENS, dtype=np.uint64) + np.uint64(1)
        self._logits: Floats = np.empty((max_tokens, self.vocab_size), np.float32)
        self._states: list[int] = []

    def forward(self, batch: Batch) -> Floats:
        """Compute a batch; see `ModelRunner.forward`."""
        if not 0 < batch.num_tokens <= self.max_tokens:
            raise ValueError(f"a pass takes 1 to {self.max_tokens} tokens, not {batch.num_tokens}")
        states, scored = list[int](), list[int]()
        last: list[int] = []
        for span in batch.spans:
            low, high = self.cache.writable(span.slot)
            if not low <= span.start <= high - len(span.tokens):
                raise ValueError(f"slot {span.slot}: {span.start} on is not within {low} to {high}")
            found = self._span(span.slot, span.start, span.tokens)
            first = len(found) - span.num_logits
            states += found[first:]
            if span.scored:
                scored += found[first:]
                last += span.tokens[first:]
        self.passes.append(batch)
        self._states = states if batch.hidden else []
        count, work = batch.num_tokens, batch.attention_work
        seconds = self._costs.cost(count, work, len(batch.spans), batch.num_logits)
        self.clock.now += seconds * self._slowness * (1 + self._scatter * self._rng.uniform(-1, 1))
        if scored:
            self._logits[: len(scored)] = self.text.logits(scored, last)
        return self._logits[: len(scored)]

    def publish_hidden_states(self, slot: int, length: int) -> None:
        """Nothing: no draft head reads its states."""

    def hidden_states(self, row: int, count: int) -> Floats:
        """States [count, 4] that depend on all tokens before."""
        states = np.array(self._states[row : row + count], np.uint64)
        parts = states[:, None] >> np.arange(0, 64, 16, dtype=np.uint64) & np.uint64(0xFFFF)
        return parts.astype(np.float32) / np.float32(1 << 15) - 1

    @property
    def computed(self) -> int:
        """Number of tokens in all passes so far."""
        return sum(batch.num_tokens for batch in self.passes)

    def _span(self, slot: int, start: int, tokens: Sequence[int]) -> list[int]:
        """Write a span's numbers; returns the state after each of its tokens."""
        table = self.cache.block_tables[slot]
        held = self._memory[table[: -(-start // BLOCK_TOKENS)]].reshape(-1)[:start]
        state = int((held * self._weights[:start]).sum(dtype=np.uint64))
        states = []
        for position, token in enumerate(tokens, start):
            key = self.text.key(state, token)
            self._memory[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = key
            state = self.text.grow(state, position, key)
            states.append(state)
        return states


def _mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _memory(cache: KvCache) -> npt.NDArray[np.uint64]:
    """The numbers [num_blocks, 64] at the address that the operator gets."""
    address, blocks, size, _ = cache.descriptor.tolist()
    words = (ctypes.c_uint64 * (blocks * size // 8)).from_address(address)
    found: npt.NDArray[np.uint64] = np.ctypeslib.as_array(words).reshape(blocks, size // 8)
    return found[:, :BLOCK_TOKENS]


# -- requests through a scheduler ------------------------------------------------------------------


@cache
def tokenizer() -> Tokenizer:
    """The demo pair's tokenizer."""
    return Tokenizer.load(Settings().models_dir / "demo" / "target")


@cache
def grammars() -> Grammars:
    """Grammars over its vocabulary; token 0 ends a text."""
    return Grammars(tokenizer(), max(tokenizer().vocabulary().values()) + 1, frozenset({0}))


def make_request(
    prompt: int | Sequence[int] = 8, output: int = 16, **fields: object
) -> GenerationRequest:
    """A request. A number as the prompt makes a random prompt of that many tokens."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = np.random.default_rng(number).integers(1, VOCAB, prompt).tolist()
    given: dict[str, object] = {"ignore_eos": True, **fields}
    return GenerationRequest(
        request_id=str(number),
        prompt_tokens=tuple(prompt),
        max_new_tokens=output,
        **given,  # type: ignore[arg-type]
    )


def make_state(
    request: GenerationRequest, drafters: Mapping[str, Drafters] = MappingProxyType({})
) -> RequestState:
    """The state of a request, with its drafters by their name."""
    return RequestState(
        request,
        tokenizer(),
        end_tokens=frozenset(),
        clock=Clock(),
        grammars=grammars(),
        drafters=drafters.get(request.drafter, ()),
    )


def chains(*drafters: Drafter) -> dict[str, Drafters]:
    """Each drafter alone, under its own name."""
    return {item.name: (item,) for item in drafters}


def make_budget(
    draft_costs: CostModel | None = None,
    *,
    costs: CostModel | None = None,
    max_batched_tokens: int = 96,
    max_inter_token_latency: float = float("inf"),
) -> PassBudget:
    """The budget of TinyLlama's passes by default."""
    return PassBudget(
        costs or tinyllama(),
        draft_costs,
        max_batched_tokens=max_batched_tokens,
        max_inter_token_latency=max_inter_token_latency,
    )


def make_order(cache: KvCache | None = None) -> Order:
    """Who goes first, by TinyLlama's passes; by default nothing is cached."""
    return Order(cache or KvCache(SHAPE, num_blocks=1, num_slots=1, context=1), tinyllama().reading)


def make_drafting(
    cache: KvCache,
    drafters: Mapping[str, Drafters],
    controller: Controller,
    clock: Clock | None = None,
) -> Drafting:
    """What collects draft tokens for TinyLlama's passes."""
    safeguard, budget = Safeguard(), make_budget()
    slots = SlotManager(cache, make_order(cache), 96, safeguard)
    fields = {"budget": budget, "safeguard": safeguard, "clock": clock or Clock()}
    return Drafting(cache, slots, drafters, controller, **fields)  # type: ignore[arg-type]


def make_scheduler(
    target: SimulatedTarget,
    drafters: Iterable[Drafter] = (),
    *,
    draft_costs: CostModel | None = None,
    end_tokens: frozenset[int] = frozenset(),
    max_inter_token_latency: float = float("inf"),
    max_batched_tokens: int | None = None,
    most_rows: int = MANY_ROWS,
    positions: int = 8,
    order: Order | None = None,
    costs: CostModel | None = None,
) -> Scheduler:
    """A scheduler with the target's clock and costs; each drafter is asked alone."""
    costs = costs or tinyllama()
    return Scheduler(
        target,  # type: ignore[arg-type]
        chains(*drafters),
        Controller(costs, positions),
        costs,
        tokenizer(),
        draft_cost_model=draft_costs,
        end_tokens=end_tokens,
        max_batched_tokens=max_batched_tokens or target.max_tokens,
        most_rows=most_rows,
        max_inter_token_latency=max_inter_token_latency,
        order=order,
        clock=target.clock,
    )


@dataclass
class Served:
    """Outputs of requests, and results of steps."""

    outputs: dict[str, list[Output]] = field(default_factory=dict)
    results: list[Step] = field(default_factory=list)

    def step(self, scheduler: Scheduler) -> Step:
        """Run one step, which ends when its outputs are handed over, and keep them."""
        result = scheduler.step()
        if isinstance(target := scheduler.target, SimulatedTarget):
            target.clock.now += target.rest.seconds(result)
        self.results.append(result)
        for output in result.outputs:
            mine = self.outputs.setdefault(output.request_id, [])
            assert not mine or mine[-1].finish is None, "a request ends once"
            mine.append(output)
        return result

    def tokens(self, request: GenerationRequest) -> list[int]:
        """A request's tokens so far."""
        outputs = self.outputs.get(request.request_id, [])
        return [piece.token for output in outputs for piece in output.pieces]

    def stats(self, request: GenerationRequest) -> GenerationStats:
        """A request's statistics, once it has ended."""
        stats = self.outputs[request.request_id][-1].stats
        assert stats is not None
        return stats

    def finish(self, request: GenerationRequest) -> FinishReason | None:
        """Why a request has ended; None while it runs."""
        outputs = self.outputs.get(request.request_id, [])
        return outputs[-1].finish if outputs else None


def serve(scheduler: Scheduler, *requests: GenerationRequest) -> Served:
    """Run requests that arrive at the same time to their ends."""
    for request in requests:
        scheduler.add(request)
    served = Served()
    while scheduler.busy:
        served.step(scheduler)
    return served


def expected(text: Text, request: GenerationRequest) -> list[int]:
    """The tokens of plain decoding alone, for a request that is greedy or has a seed."""
    return text.continuation(request.prompt_tokens, request.max_new_tokens, request.sampling)
