"""`python -m tests.option_costs`: what each option of a request adds to a step.

For one row of logits, and for the nine of a request that verifies eight draft tokens: microseconds
of one core, the least of several runs. Every option is as costly as a request can make it: 300
biases, 64 bad words, 20 probabilities, penalties for as many different tokens as a prompt has.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from bench.tools.machine import describe
from specops.request import SamplingParams
from specops.runtime.logits_processor import LogitsProcessor
from specops.runtime.sampling import Floats, draw_seeded, filtered_probs, logprob, mask

VOCAB = 262_144  # Gemma 3's, the largest of the presets
PROMPT = 8192  # different tokens
ROUNDS = 15
DRAWN = "drawn"  # what the others are compared with
_WORD = tuple(range(64))
FILTERS = {
    DRAWN: SamplingParams(1.0),
    "top_k": SamplingParams(1.0, top_k=40),
    "top_p": SamplingParams(2.0, top_p=0.999),
    "min_p": SamplingParams(1.0, min_p=0.05),
    "all filters": SamplingParams(2.0, top_k=1 << 17, top_p=0.999, min_p=1e-9),
}
ADJUSTED = {
    "penalties": SamplingParams(
        presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1
    ),
    "logit_bias": SamplingParams(logit_bias=tuple((token, 1.0) for token in range(300))),
    "allowed_tokens": SamplingParams(allowed_tokens=tuple(range(1000))),
    # A word may be two sequences of tokens: with a space before it, and without.
    "bad_words": SamplingParams(bad_words=((*_WORD, 64),) * 128),
}
# What has no part of its own in the time: the temperature scales, and a grammar is its masks.
_OTHERS = {"temperature", "seed", "grammar"}
_ALL_PENALTIES = {name for name in SamplingParams.__dataclass_fields__ if "penalty" in name}
assert {*FILTERS, *ADJUSTED} | _OTHERS | _ALL_PENALTIES >= {
    field.name for field in fields(SamplingParams)
}


def costs(vocab: int, rows: int) -> dict[str, float]:
    """By option the seconds that it takes."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 2.5
    logits[:, rng.integers(0, vocab, 40)] += 10
    probs = filtered_probs(logits, FILTERS[DRAWN])
    masks = np.full((rows, -(-vocab // 32)), 0x55555555, np.uint32)
    draft = tuple(range(rows - 1))
    calls: dict[str, Callable[[], object]] = {
        name: _filtering(logits, params) for name, params in FILTERS.items()
    }
    calls["seed"] = lambda: [draw_seeded(row, 1, 7) for row in probs]
    for name, params in ADJUSTED.items():
        prompt = rng.choice(vocab, min(PROMPT, vocab), replace=False).tolist()
        processor = LogitsProcessor(params, prompt, end_tokens=(), min_tokens=0)
        for token in _WORD:
            processor.append(token)
        calls[name] = _adjusting(processor, logits.copy(), draft)
    calls["grammar's masks"] = lambda: mask(logits.copy(), masks)
    calls["20 probabilities"] = lambda: [logprob(row, 5, 20) for row in logits]
    return {name: min(_seconds(call) for _ in range(ROUNDS)) for name, call in calls.items()}


def _filtering(logits: Floats, params: SamplingParams) -> Callable[[], object]:
    return lambda: filtered_probs(logits, params)


def _adjusting(
    processor: LogitsProcessor, logits: Floats, draft: tuple[int, ...]
) -> Callable[[], object]:
    return lambda: processor.apply(logits, draft)


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.option_costs", description=__doc__)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    options = parser.parse_args()
    print(describe())
    one, nine = (costs(options.vocab, rows) for rows in (1, 9))
    print(f"{'microseconds for':20} 1 row   9 rows   of {options.vocab:,} logits")
    for name, seconds in one.items():
        print(f"{name:20} {seconds * 1e6:5.0f} {nine[name] * 1e6:8.0f}")


if __name__ == "__main__":
    main()
