"""Odd requests for suggestions: each field of `/infill` and `/completion` with a value that fits or
not. Each gets an answer, or a status below 500 with a word why, and none waits for long."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from specops.config import Settings
from specops.serving.async_engine import AsyncEngine
from tests.http.real_engine import in_process

_SECONDS = 60.0  # for an answer of a few tokens, with seven others beside it
_AT_ONCE = 8
_TEXTS = ("", "a", "def f(x):\n", "\x00\ud7ff", "<|fim_middle|>", "é" * 200, "x = 1\n" * 999)
_NUMBERS = (0, 1, -1, -2, -3, 4, 7.5, 1e9, -1e300, 1 << 31, 1 << 70, True, None, "4", [], {})
_CHUNKS = ([], [{"text": "a"}], [{"filename": "b", "text": "c" * 999}] * 9, [{}], "no", [None], {})
_STOPS = ("", "a", [], ["", "b"], ["c"] * 65, ["d" * 257], [5], None)
_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_prefix": (*_TEXTS, None, 5),
    "input_suffix": (*_TEXTS, "y" * (1 << 21), [], None),
    "prompt": (*_TEXTS, [1, 2], [], [999_999], ["a", "b"], [["a"]], 5, None),
    "input_extra": (*_CHUNKS, None),
    "samplers": ([], ["infill"], ["top_k", "nonsense"], "kfypmt", [5], None, ["temperature"]),
    "response_fields": ([], [""], ["content", "timings/x/y", "/"], ["timings"], [5], "content"),
    "stop": _STOPS,
    "stream": (True, False, None, "yes"),
    "model": ("", None, "nothing", 5),
    "logit_bias": ({"5": -100}, {"a": 1}, {"x": "y"}, [[5, 1.0]]),
    "json_schema": ({"type": "object"}, {"type": 5}, "{", None),
    **dict.fromkeys(
        (
            *("n_predict", "n_cmpl", "n_indent", "n_probs", "t_max_prompt_ms", "t_max_predict_ms"),
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repeat_penalty"),
            *("id_slot", "cache_prompt", "min_tokens", "k_draft", "lora", "nonsense"),
        ),
        _NUMBERS,
    ),
}


# The model may draw a mark of a gap, which ends an answer: not before its second token.
_USUAL: tuple[dict[str, Any], ...] = (
    {"prompt": "ab", "n_predict": 2, "min_tokens": 2},
    {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 2, "min_tokens": 2},
)


def request(seed: int) -> tuple[str, dict[str, Any]]:
    """A path and a body: most of its fields fit."""
    rng = random.Random(seed)
    path = rng.choice(("/infill", "/infill", "/completion", "/completions"))
    body = dict(_USUAL[path == "/infill"])
    for name in rng.sample(sorted(_FIELDS), rng.choice((0, 1, 1, 2, 3))):
        if path == "/infill" or not name.startswith("input_"):
            body[name] = rng.choice(_FIELDS[name])
    if rng.random() < 0.05:
        body.pop(rng.choice(sorted(body)))
    return path, body


async def send(http: httpx.AsyncClient, seeds: Iterable[int]) -> Counter[int]:
    """Send the requests of these seeds, eight at a time.

    Returns:
        How often each status came.

    Raises:
        AssertionError: an answer is the server's failure, or has no word; the message has the seed.
        TimeoutError: there was none for a minute.
    """
    counts: Counter[int] = Counter()
    left = iter(seeds)

    async def client() -> None:
        for seed in left:
            path, body = request(seed)
            async with asyncio.timeout(_SECONDS):
                answer = await http.post(path, json=body)
            status = answer.status_code
            assert status < 500, f"seed {seed}: {status} {answer.text[:200]}"
            if status >= 400:
                assert answer.json()["error"]["message"], f"seed {seed}: {status} without a word"
                assert body not in _USUAL, f"seed {seed}: {answer.text[:200]}"
            elif body in _USUAL:
                assert answer.json()["tokens_predicted"] == 2, f"seed {seed}: {answer.text[:200]}"
            counts[status] += 1

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
    return counts


@asynccontextmanager
async def filling_in(settings: Settings) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """A model that was not trained to fill in a gap, with tokens for it."""
    async with in_process(settings) as (service, http):
        marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
        known = {mark: 300 + index for index, mark in enumerate(marks)}
        service.engine.tokenizer.token = known.get  # type: ignore[method-assign]
        yield service, http


def run(cases: int, seconds: float, first: int) -> int:
    """Send random requests to the demo pair; returns the exit status."""
    end = time.monotonic() + seconds

    def seeds() -> Iterator[int]:
        for seed in itertools.count(first):
            if seed - first == cases if cases else time.monotonic() >= end:
                return
            yield seed

    async def attack() -> Counter[int]:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                model="demo", cache_dir=Path(folder), max_new_tokens=8, queue_size=64
            )
            async with filling_in(settings) as (_, http):
                return await send(http, seeds())

    try:
        counts = asyncio.run(attack())
    except (AssertionError, TimeoutError) as finding:
        print(f"suggestions: {finding!r}", file=sys.stderr)
        return 1
    told = ", ".join(f"{count:,} times {status}" for status, count in sorted(counts.items()))
    print(f"suggestions: {counts.total():,} requests, {told}")
    return 0
