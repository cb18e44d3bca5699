"""The model card of a head: how it was made, and its measured results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specops.heads.evaluation import Evaluation
from specops.heads.storage import Conversation
from specops.runtime import kernels


def card(
    target: str,
    results: Sequence[Evaluation],
    *,
    conversations: Sequence[Conversation],
    seen: int,
    minutes: float,
    own_table: bool,
    rows: int,
    reached: Mapping[str, Sequence[float]],
) -> str:
    """Return the card as Markdown.

    Args:
        target: name of the head's target.
        results: the measured speeds, by temperature.
        conversations: all that the target has written.
        seen: number of tokens that the head was trained on; those that were read twice count twice.
        minutes: of writing and training.
        own_table: whether the n-grams are the conversations' own, and not the preset's.
        rows: number of tokens that the head can guess.
        reached: shares of right guesses behind right ones, by kind of token.
    """
    written = sum(len(item.tokens) for item in conversations)
    prompts = {item.prompt.tobytes() for item in conversations}
    texts = "answers to messages that it wrote itself, at temperatures from 0 to 1"
    if len(prompts) == 1:  # it is no chat model
        texts = "text from an empty prompt, at temperature 1"
    table = "those of the same texts" if own_table else "the preset's, which counts more texts"
    shares = "\n".join(
        f"| {kind} | {' | '.join(f'{share:.0%}' for share in shares)} |"
        for kind, shares in reached.items()
    )
    guesses = range(1, 1 + max(map(len, reached.values())))
    speeds = "\n".join(
        f"| `{name}` | {result.temperature} | {speed:.2f} | {result.tokens_per_jump[name]:.2f} |"
        for result in results
        for name, speed in result.speedup.items()
    )
    first, verdicts = results[0], "\n".join(f"- {result.verdict}" for result in results)
    return f"""# Draft head for {target}

An EAGLE-3.1 head: one decoder layer that guesses the next tokens of {target} from the hidden
states of three of its layers. The target verifies every guess, so the output does not change; a
guess can only save time. Made by `specops draft make`; to use it, set `SPECOPS_DRAFT` to this
folder. Weights are in 8 bits; output rows and embedding are the target's own. `ngrams.npy` is a
table of n-grams for the suffix lookup.

## How it was made

The target wrote {written:,} tokens of {texts};
no other text was used. From {seen:,} tokens of these texts (read twice counts
twice) the head learned the target's distributions over its {rows:,} most frequent tokens.
Writing and training took {minutes:.0f} minutes. The n-grams are {table}. One
conversation in nineteen was held out for the measurements below.

## Results

Share of guesses that the target chose, too, where all guesses before them were right, by position:

| tokens | {" | ".join(map(str, guesses))} |
| --- |{" ---: |" * len(guesses)}
{shares}

| drafter | temperature | speed over plain decoding, median | tokens per pass |
| --- | ---: | ---: | ---: |
{speeds}

Measured on held-out conversations ({first.prompts}), one at a time, on {first.threads} threads with
{kernels.kernel()} kernels. `head` runs alone; the other drafters look up the n-grams, too. A head
pays where it raises both the speed and the tokens per pass by more than 2 %, in more conversations
than chance explains (sign test, 5 %). On this machine:

{verdicts}

## Limits

The head learned only from texts that the target wrote. In other texts, such as other languages,
more guesses are wrong, and the service asks for fewer.
"""
