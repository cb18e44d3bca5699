"""Renders the model card from the measured figures in the JSON files next to the models."""

import json
from pathlib import Path
from typing import Any

from training.corpus import DEMO_DIR, HELD_OUT
from training.files import CARD, EVALUATION, LICENCE, RECORD, options

TEMPLATE = """\
---
license: other
license_name: psf-2.0
license_link: {licence}
language: [en, code]
pipeline_tag: text-generation
---
# The demo pair

A target and a draft model, small enough for the repository, so that speculative decoding can be
tried and tested without a download. Both are Llama models (RMSNorm, rotary embedding,
grouped-query attention, SwiGLU, tied embeddings) with one byte-level BPE tokenizer of
{vocab_size:,} entries. They complete Python code in the manner of the standard library. They know
no dialogue and no facts, and are not aligned: use them to try the service, not for answers.

| | parameters | layers | hidden | heads (KV) | feed-forward | context |
|---|---|---|---|---|---|---|
{shapes}

## How good it is

Bits per byte on {held_out_bytes:,} bytes of {held_out_documents} held-out files (lower is better);
windows of 1,024 tokens, each token with at least 512 before it where its file has them; run by
onnxruntime on the exported graphs.

| | {names} |
|---|{rules}|
{bits}

`xz -9e` (the same as Python's `lzma` with preset 9 and `PRESET_EXTREME`) needs
{xz_bits_per_byte:.3f} bits per byte for the same bytes in one stream. The target in fp32 needs
{gain:.1%} less, as shipped ({shipped}) {shipped_gain:.1%} less.

## How well the draft guesses

{prompts} held-out prompts (`heldout.jsonl`), {answer_tokens} greedy tokens each, both models in
{quantization}. Tokens per pass: tokens emitted per pass of the target, misses counted.

| drafted tokens per pass | accepted | tokens per pass |
|---|---|---|
{acceptance}

## Data

Python's own standard library (Python {python}): {library_bytes:,} bytes of modules and
{test_bytes:,} bytes of its tests, whose share falls to nothing towards the end. Generated tables
are left out. Never trained on, nor their tests: {held_out_modules}. Of the held-out lines of 40 or
more characters {held_out_verbatim_share:.1%} also occur, word for word, somewhere in the training
text. The held-out text is shipped: `heldout.txt.xz` (whose size is the figure for xz), with the
files' names and sizes in `heldout.json`.

## Training

- Target: next-token prediction. {target_run}.
- Draft: distilled, the divergence from the target's distribution on the same text and on
  {sampled_tokens:,} tokens that the target continued. {draft_run}.

Muon for the matrices, AdamW for the embedding and the norms, warm-up and cosine to zero, bfloat16
autocast. `make train` repeats all of it, resumably; on an accelerator it trains a larger pair.
`python -m training.evaluate` measures the figures again, `python -m training.card` writes this
page from `evaluation.json` and `training.json`.

## Licence

The training text is under the PSF License Agreement, version 2 ({licence}), and so is the held-out
text shipped here; copyright Python Software Foundation. The weights are offered under the same
terms.

## Limits

- It imitates: what it writes usually looks like code and usually does not run.
- It was trained on Python and English alone.
- It has seen no position beyond {context:,}; requests must stay within that.
- The acceptance above is that of greedy output on code. Sampled output and other text were not
  measured here; expect less of both.
"""


def run_line(record: dict[str, Any]) -> str:
    """One training run in one line."""
    return (
        f"{record['steps']:,} steps, {record['tokens'] / 1e6:.1f} million tokens, "
        f"{record['seconds'] / 60:.0f} minutes on {record['processor']}, "
        f"{record['threads']} threads, seed {record['seed']}, torch {record['torch']}"
    )


def shape_row(role: str, parameters: int, config: dict[str, Any]) -> str:
    """A model's line in the table of sizes."""
    heads = f"{config['num_attention_heads']} ({config['num_key_value_heads']})"
    return (
        f"| {role} | {parameters:,} | {config['num_hidden_layers']} | {config['hidden_size']} | "
        f"{heads} | {config['intermediate_size']} | {config['max_position_embeddings']:,} |"
    )


def render(folder: Path = DEMO_DIR) -> str:
    """The card's text, from the JSON files in `folder`."""

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        return content

    figures, runs = read(EVALUATION), read(RECORD)
    configs = {role: read(f"{role}/config.json") for role in ("target", "draft")}
    bits, accepted = figures["bits_per_byte"], figures["acceptance"]
    names, shipped, xz = list(bits["target"]), accepted["quantization"], figures["xz_bits_per_byte"]
    return TEMPLATE.format(
        **{key: figures[key] for key in figures if key.startswith(("held_out", "xz"))},
        **{key: figures[key] for key in ("library_bytes", "test_bytes")},
        **{key: accepted[key] for key in ("prompts", "answer_tokens", "quantization")},
        licence=LICENCE,
        vocab_size=configs["target"]["vocab_size"],
        context=configs["target"]["max_position_embeddings"],
        python=runs["target"]["python"],
        held_out_modules=", ".join(f"`{name}`" for name in HELD_OUT),
        shapes="\n".join(
            shape_row(role, figures["parameters"][role], config) for role, config in configs.items()
        ),
        names=" | ".join(names),
        rules="|".join("---" for _ in names),
        bits="\n".join(
            f"| {role} | " + " | ".join(f"{bits[role][name]['all']:.3f}" for name in names) + " |"
            for role in bits
        ),
        shipped=shipped,
        gain=1 - bits["target"]["fp32"]["all"] / xz,
        shipped_gain=1 - bits["target"][shipped]["all"] / xz,
        acceptance="\n".join(
            f"| {row['draft_length']} | {row['acceptance']:.1%} | {row['tokens_per_jump']:.2f} |"
            for row in accepted["draft_lengths"]
        ),
        sampled_tokens=runs["draft"]["sampled_tokens"],
        target_run=run_line(runs["target"]),
        draft_run=run_line(runs["draft"]),
    )


def main() -> None:
    """Read the command line and write the card."""
    folder = options(__doc__, folder=DEMO_DIR).folder
    (folder / CARD).write_text(render(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
