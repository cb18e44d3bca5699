"""The model card of a head: how it was made, what it reaches, on what that was measured."""

from __future__ import annotations

from specops.heads.evaluation import Evaluation
from specops.heads.training import Acceptance
from specops.models.head_folder import HeadFolder
from specops.runtime import kernels
from specops.system.cpus import available_threads


def card(head: HeadFolder, found: Evaluation, written: int, reached: Acceptance) -> str:
    """Markdown.

    Args:
        written: tokens of the answers that the target has written, those for measuring among them.
        reached: how often its guesses are right.
    """
    rows = "\n".join(
        f"| `{name}` | {speed:.2f} | {found.tokens_per_jump[name]:.2f} |"
        for name, speed in found.speedup.items()
    )
    return f"""# Draft head for {head.target}

Guesses the next token or two of {head.target} from its last hidden state and its last token. The
target verifies every guess, so its output stays its own; a guess can only save time. Made by
`specops draft make`, used with `SPECOPS_DRAFT` set to this folder.

## How it was made

The target wrote {written:,} tokens of answers to messages that it wrote itself, in several
languages, at temperatures from 0 to 1; no other text was used. The head learned the target's
distribution of the next token at each of them, over its {len(head.tokens):,} most frequent tokens.
One conversation in ten was left out of training, and what is measured below is measured on those.

## What it reaches

Its first guess is the token that the target chose in {reached.first:.0%} of places; its second,
where the first was right, in {reached.second:.0%}.

| drafter | speed over plain decoding, median | tokens per pass |
| --- | ---: | ---: |
{rows}

{found.prompts} conversations, greedy, one at a time, on {available_threads()} threads with
{kernels.kernel()} kernels; `cascade` looks up first and asks the head where that is
less than half sure. On this machine {found.verdict}.

## What it is not

It knows nothing that the target does not. Where the target writes what it rarely writes, such as a
language that it was not made for, the guesses are wrong more often, and the service asks for fewer.
"""
