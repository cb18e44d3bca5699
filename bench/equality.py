"""Is speculative output plain output? Every drafter, fixed and adaptive, on many prompts.

In exact mode every answer must be token by token that of plain greedy decoding; in default mode it
is counted how often a near-tie fell otherwise. What is done is kept after each chunk of prompts,
so that a run that was cut off, or that may only take some seconds at a time, goes on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.report import Table, yes
from bench.speculation import PLAIN, Config, Run, Runner

_CHUNK = 10  # prompts between two looks at the clock
_SHARED_NGRAMS = 65_536
MODES = ("exact", "default")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is compared, and the seconds that this run may take.

    Exact mode is compared on all prompts, default mode, where only a rate is sought, on the first
    `default_prompts`.
    """

    prompts: int
    new_tokens: int
    default_prompts: int
    seconds: float = float("inf")


FULL = Plan(prompts=500, new_tokens=128, default_prompts=100)
QUICK = Plan(prompts=3, new_tokens=16, default_prompts=3)


@dataclass(slots=True)
class Count:
    """Of one configuration in one mode.

    `first_differences[i]` is the place of the first differing token in the i-th unequal answer.
    """

    prompts: int = 0
    equal: int = 0
    tokens: int = 0
    steps: int = 0
    first_differences: list[int] = field(default_factory=list)


Counts = dict[str, dict[str, Count]]  # mode, label


def run(
    model: BenchModel,
    prompts: Sequence[Prompt],
    plan: Plan,
    checkpoint: Path,
    progress: Progress,
) -> Outcome:
    """Go on where the checkpoint stands, for as long as the plan allows.

    The outcome says how many prompts are done. The checkpoint is removed when all are.
    """
    # The drafter that shares n-grams between requests is off by default; here it takes part.
    shared = replace(model.settings, shared_ngrams=_SHARED_NGRAMS)
    runner = Runner.load(replace(model, settings=shared))
    ways = runner.ways(model.settings.k_draft)
    modes = MODES if runner.engine.info.exact_align is not None else MODES[1:]
    prompts = prompts[: plan.prompts if len(modes) == len(MODES) else plan.default_prompts]
    key = _key(model, prompts, plan, ways)
    counts = _read(checkpoint, key) or {
        mode: {way.label: Count() for way in ways} for mode in modes
    }
    begun = time.monotonic()
    done = counts[modes[0]][ways[0].label].prompts
    while done < len(prompts):
        chunk = prompts[done : done + _CHUNK]
        for number, prompt in enumerate(chunk, start=done):
            wanted = [mode for mode in modes if mode == "exact" or number < plan.default_prompts]
            for mode in wanted:
                _compare(runner, prompt, ways, plan.new_tokens, counts[mode], exact=mode == "exact")
        done += len(chunk)
        _write(checkpoint, key, counts)
        progress(f"{done} of {len(prompts)} prompts")
        if time.monotonic() - begun > plan.seconds:
            break
    if done == len(prompts):
        checkpoint.unlink(missing_ok=True)
    return outcome(model, counts, plan, len(prompts))


def _compare(
    runner: Runner,
    prompt: Prompt,
    ways: Sequence[Config],
    new_tokens: int,
    counts: dict[str, Count],
    *,
    exact: bool,
) -> None:
    """Count one prompt in one mode."""
    plain = runner.run(prompt, PLAIN, new_tokens, exact=exact).tokens
    for way in ways:
        _count(counts[way.label], runner.run(prompt, way, new_tokens, exact=exact), plain)


def _count(count: Count, done: Run, plain: Sequence[int]) -> None:
    count.prompts += 1
    count.tokens += len(done.tokens)
    count.steps += done.stats.sequence_steps
    if done.tokens == plain:
        count.equal += 1
        return
    differing = [a != b for a, b in zip(done.tokens, plain, strict=True)]
    count.first_differences.append(differing.index(True))


def outcome(model: BenchModel, counts: Counts, plan: Plan, wanted: int) -> Outcome:
    """The table; in exact mode everything must be equal."""
    done = max(count.prompts for found in counts.values() for count in found.values())
    exact = counts.get("exact", {})
    sound = all(count.equal == count.prompts for count in exact.values())
    rows = []
    for label in counts["default"]:
        cells = [label]
        for mode in MODES:
            if (count := counts.get(mode, {}).get(label)) is None:
                cells += ["", ""]
                continue
            cells.append(f"{count.equal}/{count.prompts}")
            cells.append(f"{count.tokens / (count.prompts + count.steps):.2f}")
        default = counts["default"][label]
        compared = default.equal * plan.new_tokens + sum(default.first_differences)
        compared += len(default.first_differences)
        cells.append(f"{len(default.first_differences) / default.prompts:.1%}")
        cells.append(f"{1e4 * len(default.first_differences) / compared:.1f}")
        rows.append(tuple(cells))
    verdict = yes(sound) if exact else "not promised on this processor"
    table = Table(
        f"Equality with plain greedy decoding: {model.title}",
        ("guesses", "exact: equal", "tok/pass", "default: equal", "tok/pass",
         "default: diverging", "per 10,000 tokens"),
        rows,
        (
            f"{done} of {wanted} held-out prompts, default mode on the first "
            f"{plan.default_prompts} of them, {plan.new_tokens} new tokens each, one stream; "
            "every answer compared token by token with plain decoding's in the same mode",
            f"exact mode lossless: {verdict}; default mode: answers that differ somewhere, and "
            "first differences per 10,000 tokens before them (a near-tie that another width's "
            "rounding decides otherwise)",
            "tok/pass: tokens over the target's passes, the prompt's taken for one",
        ),
    )  # fmt: skip
    result: dict[str, Any] = {
        "model": model.key,
        "prompts": done,
        "complete": done == wanted,
        "new_tokens": plan.new_tokens,
        "lossless": sound if exact else None,
        "counts": {
            mode: {label: asdict(count) for label, count in found.items()}
            for mode, found in counts.items()
        },
    }
    return Outcome(result, [table], sound=sound)


def _key(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, ways: Sequence[Config]) -> str:
    """Whatever differs here makes a checkpoint another experiment's."""
    told = [str(model.settings), str(plan.new_tokens), str(plan.default_prompts), *map(str, ways)]
    told += [prompt.text for prompt in prompts]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _read(path: Path, key: str) -> Counts | None:
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["key"] != key:
        return None
    return {
        mode: {label: Count(**count) for label, count in found.items()}
        for mode, found in kept["counts"].items()
    }


def _write(path: Path, key: str, counts: Counts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {
        mode: {label: asdict(count) for label, count in found.items()}
        for mode, found in counts.items()
    }
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({"key": key, "counts": plain}), encoding="utf-8")
    draft.replace(path)
