"""Against the transformers library: its assisted generation and its prompt lookup, same pair.

Both start from the same checkpoints, prompts and number of tokens, with the same number of
threads, in turns within one run. Theirs runs the checkpoint in float32, as it is loaded; ours in
the weights that the service uses. Needs torch (extra `reference`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.quiet import settle
from bench.report import Chart, Series, Table, Wanted, spread, wanted_table
from bench.speculation import PLAIN, Config, Runner
from bench.stats import Summary, ratios, rotated
from specops.config import ConfigError
from specops.models.prepare import choose

_LOOKUPS = (3, 10)  # prompt_lookup_num_tokens: as many as we draft, and what their guide shows
_OURS, _THEIRS = "Spec-Ops", "transformers"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts per category."""

    each: int
    sizes: speculation.Plan


FULL = Plan(4, speculation.Plan(new_tokens=128))
QUICK = Plan(1, speculation.Plan(new_tokens=16))


@dataclass(frozen=True, slots=True)
class Side:
    """A library's way to generate; `generate` takes a prompt and returns its new tokens."""

    library: str
    way: str
    generate: Callable[[Prompt], Sequence[int]]

    @property
    def plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.way == "plain"


@dataclass(slots=True)
class Times:
    """Of one side: seconds per request, and each one's new tokens."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)


def run(
    model: BenchModel, prompts: Sequence[Prompt], sizes: speculation.Plan, progress: Progress
) -> Outcome:
    """Measure all sides on all prompts.

    Raises:
        ConfigError: the model has no draft, or torch is missing.
    """
    runner = Runner.load(model)
    sides = [*_ours(runner, sizes), *_theirs(runner, model, sizes)]
    found = {side: Times() for side in sides}
    for side in sides:
        side.generate(prompts[0])
    for turn in range(sizes.rounds):
        for number, prompt in enumerate(prompts):
            for side in rotated(sides, turn + number):
                settle()  # neither's idle threads may spin beside the other
                start = time.perf_counter()
                tokens = side.generate(prompt)
                found[side].seconds.append(time.perf_counter() - start)
                found[side].tokens.append(tuple(tokens))
        progress(f"round {turn + 1} of {sizes.rounds}: {len(prompts)} prompts")
    categories = [prompt.category for prompt in prompts] * sizes.rounds
    return outcome(model, found, categories, sizes, runner.engine.info.threads)


def _ours(runner: Runner, sizes: speculation.Plan) -> list[Side]:
    def side(way: Config) -> Side:
        return Side(
            _OURS, way.label, lambda prompt: runner.run(prompt, way, sizes.new_tokens).tokens
        )

    return [side(way) for way in (PLAIN, *runner.ways())]


def _theirs(runner: Runner, model: BenchModel, sizes: speculation.Plan) -> list[Side]:
    try:
        import torch  # noqa: PLC0415 - an extra, and seconds to import
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"transformers' own generation needs torch: {error}") from None
    torch.set_num_threads(runner.engine.info.threads)
    choice = choose(model.settings)
    if not (isinstance(choice.target, Path) and isinstance(choice.draft, Path)):
        raise ConfigError(f"{model.title}: both checkpoints must lie on this machine")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (choice.target, choice.draft)
    )

    def side(way: str, **options: Any) -> Side:
        def generate(prompt: Prompt) -> Sequence[int]:
            ids = torch.tensor([runner.engine.encode(prompt.text)])
            with torch.inference_mode():
                output = target.generate(  # type: ignore[misc]  # its own stubs cannot say it
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=sizes.new_tokens,
                    min_new_tokens=sizes.new_tokens,
                    **options,
                )
            tokens: list[int] = output[0, ids.shape[1] :].tolist()
            return tokens

        return Side(_THEIRS, way, generate)

    lookups = [side(f"prompt lookup, {n}", prompt_lookup_num_tokens=n) for n in _LOOKUPS]
    return [side("plain"), side("assisted by the draft", assistant_model=draft), *lookups]


def outcome(
    model: BenchModel,
    found: dict[Side, Times],
    categories: Sequence[str],
    sizes: speculation.Plan,
    threads: int,
) -> Outcome:
    """The table, and whether we gain more and are faster."""
    rows, result, gains, rates = [], [], {}, {}
    for side, times in found.items():
        plain = next(other for other in found if other.library == side.library and other.plain)
        gain = Summary.of(ratios(found[plain].seconds, times.seconds))
        rate = Summary.of([sizes.new_tokens / seconds for seconds in times.seconds])
        equal = sum(a == b for a, b in zip(times.tokens, found[plain].tokens, strict=True))
        by_text = {
            text: Summary.of(
                ratios(_of(text, categories, found[plain]), _of(text, categories, times))
            )
            for text in dict.fromkeys(categories)
        }
        gains[side], rates[side] = gain, rate
        rows.append(
            (
                side.library, side.way, f"{rate.median:.0f}",
                "" if side.plain else spread(gain),
                *("" if side.plain else spread(part) for part in by_text.values()),
                f"{equal}/{len(times.tokens)}",
            )
        )  # fmt: skip
        result.append(
            {
                "library": side.library,
                "way": side.way,
                "tokens_per_second": asdict(rate),
                "speedup": asdict(gain),
                "speedup_by_category": {text: asdict(part) for text, part in by_text.items()},
                "equal": equal,
            }
        )
    texts = list(dict.fromkeys(categories))
    table = Table(
        f"Against transformers: {model.title}",
        ("library", "way", "tok/s", "speedup over its plain", *texts, "equal to its plain"),
        rows,
        (
            f"{len(categories) // sizes.rounds} prompts, {sizes.new_tokens} new tokens each, "
            f"{sizes.rounds} rounds, one stream, greedy, {threads} threads, ways in turns for "
            "every prompt; whole requests, prompt included; medians with quartiles",
            "transformers: torch float32, `generate` with `assistant_model` or "
            "`prompt_lookup_num_tokens`, else its defaults",
        ),
    )
    wanted = _wanted(gains, rates)
    names = [f"{side.library},\n{side.way}" for side in found]
    chart = Chart(
        f"Tokens per second: {model.title}", "bars", "", "tokens per second", names,
        [Series("median", [rates[side].median for side in found],
                [rates[side].low for side in found], [rates[side].high for side in found])],
    )  # fmt: skip
    record = {
        "model": model.key,
        "new_tokens": sizes.new_tokens,
        "rounds": sizes.rounds,
        "threads": threads,
        "sides": result,
        "wanted": [asdict(line) for line in wanted],
    }
    tables = [table, wanted_table("Wanted: best of ours over best of theirs", wanted)]
    return Outcome(record, tables, [chart])


def _of(text: str, categories: Sequence[str], times: Times) -> list[float]:
    return [
        seconds
        for seconds, category in zip(times.seconds, categories, strict=True)
        if category == text
    ]


def _wanted(gains: dict[Side, Summary], rates: dict[Side, Summary]) -> list[Wanted]:
    def best(values: dict[Side, Summary], library: str) -> float:
        return max(
            item.median
            for side, item in values.items()
            if side.library == library and not side.plain
        )

    return [
        Wanted("our speedup over theirs", 1.0, best(gains, _OURS) / best(gains, _THEIRS)),
        Wanted("our tokens per second over theirs", 1.0, best(rates, _OURS) / best(rates, _THEIRS)),
    ]
