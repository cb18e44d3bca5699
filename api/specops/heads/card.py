"""The model card of a head: how it was made, and its measured results."""

from __future__ import annotations

from specops.heads.evaluation import Evaluation
from specops.heads.training import Acceptance
from specops.models.head_folder import HeadFolder
from specops.runtime import kernels


def card(head: HeadFolder, result: Evaluation, written: int, reached: Acceptance) -> str:
    """Return the card as Markdown.

    Args:
        head: the head's folder.
        result: the measured speeds.
        written: number of tokens that the target has written, held-out ones included.
        reached: how often the guesses are right.
    """
    rows = "\n".join(
        f"| `{name}` | {speed:.2f} | {result.tokens_per_jump[name]:.2f} |"
        for name, speed in result.speedup.items()
    )
    return f"""# Draft head for {head.target}

Guesses the next one or two tokens of {head.target} from its last hidden state and its last token.
The target verifies every guess, so the output does not change; a guess can only save time. Made by
`specops draft make`, used with `SPECOPS_DRAFT` set to this folder.

## How it was made

The target wrote {written:,} tokens of answers to messages that it wrote itself, in several
languages, at temperatures from 0 to 1; no other text was used. For each of these tokens the head
learned the target's distribution, over its {len(head.tokens):,} most frequent tokens. One
conversation in ten was left out of the training, for the measurements below.

## What it reaches

The first guess is the token that the target chose in {reached.first:.0%} of the places. Where it is
right, the second guess is right in {reached.second:.0%}.

| drafter | speed over plain decoding, median | tokens per pass |
| --- | ---: | ---: |
{rows}

{result.prompts} conversations, greedy, one at a time, on {result.threads} threads with
{kernels.kernel()} kernels; `cascade` looks up suffixes first, and asks the head where they are less
than half sure. On this machine {result.verdict}.

## Limits

The head knows only what the target has written. In texts that the target rarely writes, such as
other languages, more guesses are wrong, and the service asks for fewer.
"""
