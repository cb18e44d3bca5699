"""The model card of a table of n-grams: how it was made, and its measured results."""

from collections.abc import Sequence

from specops.ngrams.evaluation import Evaluation
from specops.ngrams.storage import Conversation
from specops.runtime import kernels


def card(
    target: str,
    results: Sequence[Evaluation],
    *,
    conversations: Sequence[Conversation],
    minutes: float,
    before: str,
) -> str:
    """Return the card as Markdown.

    Args:
        target: name of the model.
        results: the measured speeds, one per temperature.
        conversations: all conversations that the model wrote.
        minutes: time spent on writing them.
        before: description of the table that the new one is compared with.
    """
    written = sum(len(item.tokens) for item in conversations)
    prompts = {item.prompt.tobytes() for item in conversations}
    texts = "answers to messages that it wrote itself, at temperatures from 0 to 1"
    if len(prompts) == 1:  # not a chat model
        texts = "text from an empty prompt, at temperature 1"
    speeds = "\n".join(
        f"| {way} | {result.temperature} | {speed:.2f} | {result.tokens_per_pass[way]:.2f} |"
        for result in results
        for way, speed in result.speedup.items()
    )
    first, verdicts = results[0], "\n".join(f"- {result.verdict}" for result in results)
    return f"""# N-grams of {target}

The most frequent successor of one to three tokens, in texts that {target} wrote itself. The drafter
`suffix` takes draft tokens from here when neither the request nor earlier ones promise more. The
model verifies every draft token, so the output does not change. `specops draft make` made this
table; to use it, set `SPECOPS_DRAFT` to this folder.

## How it was made

The model wrote {written:,} tokens of {texts},
in {minutes:.0f} minutes; no other text was used. One conversation in nineteen was held out for the
measurements below.

## Results

| table | temperature | speed over plain decoding, median | tokens per pass |
| --- | ---: | ---: | ---: |
{speeds}

Measured on held-out conversations ({first.prompts}), one at a time, on {first.threads} threads with
{kernels.kernel()} kernels. The rows "without" have {before}. A table pays if it raises both the
speed and the tokens per pass by more than 2 %, in more conversations than chance explains (sign
test, 5 %). On this machine:

{verdicts}

## Limits

The table covers only texts that the model wrote. In other texts, such as other languages, more
draft tokens are wrong, and the service asks for fewer.
"""
