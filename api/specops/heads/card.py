"""The model card of a head: how it was made, and its measured results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specops.heads.evaluation import Evaluation
from specops.runtime import kernels

_HOURS = 2  # from which on the time is given in hours


class Making(NamedTuple):
    """How a head was made.

    Attributes:
        target: name of its target.
        chat: whether the target answered messages; else it wrote texts from an empty prompt.
        written: number of answer tokens that the target has written, held-out ones included.
        seen: number of tokens that it was trained on; those that were read twice count twice.
        minutes: for both.
        ngrams: whether the n-grams are the texts' own, and not its preset's.
        rows: number of tokens that it can guess.
        reached: shares of right guesses behind right ones, by kind of text.
    """

    target: str
    chat: bool
    written: int
    seen: int
    minutes: float
    ngrams: bool
    rows: int
    reached: Mapping[str, Sequence[float]]


def card(made: Making, results: Sequence[Evaluation]) -> str:
    """Return the card as Markdown.

    Args:
        made: how the head was made.
        results: the measured speeds, by temperature.
    """
    reached = "\n".join(
        f"| {kind} | {' | '.join(f'{share:.0%}' for share in shares)} |"
        for kind, shares in made.reached.items()
    )
    guesses = range(1, 1 + max(map(len, made.reached.values())))
    rows = "\n".join(
        f"| `{name}` | {result.temperature} | {speed:.2f} | {result.tokens_per_jump[name]:.2f} |"
        for result in results
        for name, speed in result.speedup.items()
    )
    first, verdicts = results[0], "\n".join(f"- {result.verdict}" for result in results)
    long = made.minutes >= _HOURS * 60
    took = f"{made.minutes / 60:.1f} hours" if long else f"{made.minutes:.1f} minutes"
    texts = "answers to messages that it wrote itself" if made.chat else "text from an empty prompt"
    table = "those of the same texts" if made.ngrams else "the preset's, which counts more texts"
    return f"""# Draft head for {made.target}

An EAGLE-3.1 head: one decoder layer that guesses the next tokens of {made.target} from the hidden
states of three of its layers. The target verifies every guess, so the output does not change; a
guess can only save time. Made by `specops draft make`; to use it, set `SPECOPS_DRAFT` to this
folder. Weights are in 8 bits; output rows and embedding are the target's own. `ngrams.npy` is a
table of n-grams for the suffix lookup.

## How it was made

The target wrote {made.written:,} tokens of {texts}, at temperatures
from 0 to 1; no other text was used. From {made.seen:,} tokens of these texts (read twice counts
twice) the head learned the target's distributions over its {made.rows:,} most frequent tokens.
Writing and training took {took}. The n-grams are {table}. One
conversation in nineteen was held out for the measurements below.

## Results

Share of guesses that the target chose, too, where all guesses before them were right, by position:

| answers | {" | ".join(map(str, guesses))} |
| --- |{" ---: |" * len(guesses)}
{reached}

| drafter | temperature | speed over plain decoding, median | tokens per pass |
| --- | ---: | ---: | ---: |
{rows}

Measured on held-out conversations ({first.prompts}), one at a time, on {first.threads} threads with
{kernels.kernel()} kernels. `head` runs alone; the other drafters look up the n-grams, too. A head
pays where it raises both the speed and the tokens per pass by at least 2 %. On this machine:

{verdicts}

## Limits

The head learned only from texts that the target wrote. In other texts, such as other languages,
more guesses are wrong, and the service asks for fewer.
"""
