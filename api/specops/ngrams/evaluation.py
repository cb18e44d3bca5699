"""Measures the suffix lookup with a table of n-grams, on conversations that it does not count.

Beside it stand plain decoding and the lookup without the table, or with the one that a preset comes
with. One request runs at a time. The ways alternate prompt by prompt, so that other load on the
machine affects all of them alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.ngrams.storage import Conversation
from specops.request import GenerationRequest, GenerationStats, SamplingParams

_PROMPTS = 24  # most prompts that are measured
_MIN_PROMPTS = 5  # that are measured however long it takes: fewer cannot tell chance apart
_TOKENS = 128  # most tokens of an answer
_TEMPERATURES = (0.0, 0.7)
_PAYS = 1.02  # a smaller speedup is not worth a table
_CHANCE = 0.05  # a result that chance gives so often is not believed
_LOOKUP = "suffix"
_PLAIN, _BEFORE, _TABLE = _WAYS = ("plain", "without", "with")  # the table

_Figures = dict[float, dict[str, list[GenerationStats]]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a measurement.

    Attributes:
        temperature: at which the answers were sampled.
        prompts: number of prompts.
        threads: number of threads that computed.
        faster: number of prompts that were answered faster with the table than in both other ways.
        speedup: median speedup over plain decoding, by whether the lookup is with the table.
        tokens_per_pass: the same, tokens per forward pass.
    """

    temperature: float
    prompts: int
    threads: int
    faster: int
    speedup: dict[str, float]
    tokens_per_pass: dict[str, float]

    @property
    def pays(self) -> bool | None:
        """Whether the table makes more answers faster than chance explains, or fewer (sign test).

        None: neither.
        """
        if _by_chance(self.prompts - self.faster, self.prompts) < _CHANCE:
            return False
        return True if _by_chance(self.faster, self.prompts) < _CHANCE else None

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        drawn = f"at temperature {self.temperature}" if self.temperature else "greedily"
        judged = {
            True: "the table pays",
            False: "the table does not pay",
            None: "it cannot be told from chance whether the table pays",
        }[self.pays]
        passes = self.tokens_per_pass
        return (
            f"{drawn} {judged} (faster in {self.faster} of {self.prompts} conversations): "
            f"{self.speedup[_TABLE]:.2f} times plain decoding's speed with it, "
            f"{self.speedup[_BEFORE]:.2f} without "
            f"({passes[_TABLE]:.2f} and {passes[_BEFORE]:.2f} tokens per pass)"
        )


def _by_chance(count: int, prompts: int) -> float:
    """The probability that a coin tossed for each prompt shows heads this often, or more."""
    return 0.5**prompts * sum(math.comb(prompts, n) for n in range(count, prompts + 1))


def evaluate(
    settings: Settings,
    before: str,
    conversations: Sequence[Conversation],
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Evaluation]:
    """Measure the table of `settings.draft`, greedily and at temperature 0.7, with seeds.

    Args:
        settings: the settings.
        before: the setting `draft` without it.
        conversations: conversations that it does not count, at least one.
        seconds: after which no further conversation is begun.
        clock: returns seconds.
    """
    # Answers of one way must not help those of another.
    settings = replace(settings, slots=1, prefix_cache="client")
    table, other = (
        Engine.load(replace(settings, draft=draft)) for draft in (settings.draft, before)
    )
    engines, end = {_PLAIN: other, _BEFORE: other, _TABLE: table}, clock() + seconds
    figures: _Figures = {at: {way: [] for way in _WAYS} for at in _TEMPERATURES}
    for measured, conversation in enumerate(conversations[:_PROMPTS]):
        if clock() > end and measured >= _MIN_PROMPTS:
            break
        turn = measured % len(_WAYS)
        for temperature, by_way in figures.items():
            for way in (*_WAYS[turn:], *_WAYS[:turn]):
                by_way[way].append(_answer(engines[way], settings, conversation, way, temperature))
    return [
        _summary(temperature, table.info.threads, by_way) for temperature, by_way in figures.items()
    ]


def _summary(
    temperature: float, threads: int, figures: dict[str, list[GenerationStats]]
) -> Evaluation:
    speeds = {way: [stats.tokens_per_second for stats in figures[way]] for way in _WAYS}
    plain = speeds[_PLAIN]
    answers = zip(*(figures[way] for way in _WAYS), strict=True)
    return Evaluation(
        temperature,
        len(plain),
        threads,
        sum(_helped(*ways) for ways in answers),
        {
            way: statistics.median(
                speed / base if base else 1.0
                for speed, base in zip(speeds[way], plain, strict=True)
            )
            for way in _WAYS[1:]
        },
        {
            way: sum(stats.generated_tokens - 1 for stats in figures[way])
            / max(1, sum(stats.sequence_steps for stats in figures[way]))
            for way in _WAYS[1:]
        },
    )


def _helped(plain: GenerationStats, before: GenerationStats, table: GenerationStats) -> bool:
    """Whether the table made an answer faster, in passes too: time alone may be a disturbance."""
    best = max(plain.tokens_per_second, before.tokens_per_second)
    saved = before.sequence_steps > _PAYS * table.sequence_steps
    return saved and table.tokens_per_second > _PAYS * best


def _answer(
    engine: Engine,
    settings: Settings,
    conversation: Conversation,
    way: str,
    temperature: float,
) -> GenerationStats:
    """Return the figures of the answer in one of the ways."""
    request = GenerationRequest(
        request_id=f"{conversation.number}-{way}",
        prompt_tokens=tuple(conversation.prompt.tolist()),
        max_new_tokens=_TOKENS,
        sampling=SamplingParams(temperature, seed=conversation.number),
        drafter=NO_DRAFTER if way == _PLAIN else _LOOKUP,
        k_draft=settings.max_k_draft,
        adaptive=True,
        client=f"{way} at {temperature}",
    )
    *_, last = engine.generate(request)
    if last.stats is None:
        raise AssertionError("a finished request always has figures")
    return last.stats
