"""Measures the suffix lookup with a table of n-grams, on held-out conversations.

It compares with plain decoding, and with the lookup without the table or with the preset's table.
One request runs at a time. The three variants alternate prompt by prompt, so that other load on the
machine affects them alike.
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

_PROMPTS = 24  # maximum number of measured prompts
_MIN_PROMPTS = 5  # minimum, however long it takes: fewer can never be significant
_TOKENS = 128  # maximum tokens of an answer
_TEMPERATURES = (0.0, 0.7)
_PAYS = 1.02  # a smaller speedup is not worth a table
_CHANCE = 0.05  # significance level
_LOOKUP = "suffix"
_PLAIN, _BEFORE, _TABLE = _WAYS = ("plain", "without", "with")  # the table

_Figures = dict[float, dict[str, list[GenerationStats]]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a measurement.

    Attributes:
        temperature: sampling temperature of the answers.
        prompts: number of prompts.
        threads: number of compute threads.
        faster: number of prompts that the table answered faster than both other variants.
        speedup: median speedup over plain decoding, `with` the table and `without`.
        tokens_per_pass: tokens per forward pass, likewise.
    """

    temperature: float
    prompts: int
    threads: int
    faster: int
    speedup: dict[str, float]
    tokens_per_pass: dict[str, float]

    @property
    def pays(self) -> bool | None:
        """Whether the table made significantly more answers faster (sign test).

        False: significantly fewer. None: neither.
        """
        if _by_chance(self.prompts - self.faster, self.prompts) < _CHANCE:
            return False
        return True if _by_chance(self.faster, self.prompts) < _CHANCE else None

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
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
    """The probability of at least `count` heads if a coin is tossed for each prompt."""
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
        settings: settings that load the model with the new table.
        before: the setting `draft` to compare with.
        conversations: held-out conversations, at least one.
        seconds: time limit for starting another conversation.
        clock: returns seconds.
    """
    # The answers of one variant must not help another.
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
    """Whether the table saved both time and passes: time alone may be noise."""
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
    """Answer a conversation's prompt with one of the variants; return the figures."""
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
