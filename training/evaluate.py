"""Measures the shipped pair and writes the figures of the model card.

Everything is measured on the exported ONNX graphs with onnxruntime, without torch, on the held-out
text next to the models. So anybody can repeat the measurements.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specops.models.convert import Quantization, export_checkpoint
from training.corpus import DEMO_DIR, Document, load_corpus, read_held_out, read_prompts
from training.files import EVALUATION, options
from training.onnx_model import OnnxModel
from training.tokenizer import END_OF_TEXT

WINDOW, STRIDE = 1024, 512  # tokens
QUANTIZATIONS = ("fp32", "int8-128", "int4-32", "int4-128")
SHIPPED = "int8-128"
ANSWER = 64  # tokens per prompt when acceptance is measured
MAX_DRAFT = 8

Forward = Callable[[Sequence[int]], NDArray[np.float32]]


def document_bits(forward: Forward, tokens: Sequence[int]) -> float:
    """Bits that a model needs for `tokens[1:]`, with a context of 512 to 1,024 tokens.

    Windows of 1,024 tokens advance by 512; only the second half counts, except in the first window.

    Args:
        forward: returns the logits [S, V] of at most 1,024 tokens [S] of a new sequence.
        tokens: the document, after its start mark.
    """
    bits = 0.0
    for start in range(0, max(1, len(tokens) - 1 - (WINDOW - STRIDE)), STRIDE):
        window = tokens[start : start + WINDOW + 1]
        logits = forward(window[:-1])
        scored = slice(0 if start == 0 else WINDOW - STRIDE, None)
        logits, following = logits[scored].astype(np.float64), np.array(window[1:])[scored]
        shifted = logits - logits.max(-1, keepdims=True)
        log_sums = np.log(np.exp(shifted).sum(-1))
        chosen = shifted[np.arange(len(following)), following]
        bits += float((log_sums - chosen).sum()) / math.log(2)
    return bits


def bits_per_byte(
    forward: Forward, tokenizer: Tokenizer, documents: Sequence[Document]
) -> dict[str, Any]:
    """Bits per byte of the documents, together and individually."""
    mark = tokenizer.token_to_id(END_OF_TEXT)
    bits, sizes = {}, {}
    for document in documents:
        ids = tokenizer.encode(document.text).ids
        bits[document.path] = document_bits(forward, [mark, *ids])
        sizes[document.path] = len(document.text.encode("utf-8"))
    return {
        "all": round(sum(bits.values()) / sum(sizes.values()), 5),
        "documents": {path: round(bits[path] / sizes[path], 5) for path in bits},
    }


def greedy(target: OnnxModel, prompt: Sequence[int], tokens: int, end: int) -> list[int]:
    """The target's greedy continuation.

    Args:
        target: the target.
        prompt: token ids.
        tokens: maximum number of tokens.
        end: the end token, which is not part of the result.
    """
    answer = [int(target.afresh(prompt)[-1].argmax())]
    while len(answer) < tokens and answer[-1] != end:
        answer.append(int(target(answer[-1:])[0].argmax()))
    return answer[:-1] if answer[-1] == end else answer


def matched_lengths(draft: OnnxModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The number of correct draft tokens, at most 8, at every position after the first.

    Greedy speculative decoding returns exactly the target's greedy answer, so comparing with that
    answer is the verification.
    """
    draft.afresh(prompt)
    matched = []
    for position in range(1, len(answer)):
        guess = int(draft([answer[position - 1]])[0].argmax())
        kept = draft.length
        wanted = answer[position : position + MAX_DRAFT]
        right = 0
        while right < len(wanted) and guess == wanted[right]:
            right += 1
            if right < len(wanted):
                guess = int(draft([guess])[0].argmax())
        draft.length = kept
        matched.append(right)
    return matched


def jumps(matched: Sequence[int], draft_length: int) -> tuple[int, int, int]:
    """Numbers of target passes, draft tokens and accepted tokens for one draft length."""
    position, passes, drafted, accepted = 0, 0, 0, 0
    while position < len(matched):
        length = min(draft_length, len(matched) - position)
        right = min(matched[position], length)
        passes, drafted, accepted = passes + 1, drafted + length, accepted + right
        position += right + 1
    return passes, drafted, accepted


def acceptance(
    target: OnnxModel, draft: OnnxModel, tokenizer: Tokenizer, prompts: Sequence[str]
) -> dict[str, Any]:
    """The share of draft tokens that the target accepts, for draft lengths 1 to 8."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    runs = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt).ids[-(WINDOW - ANSWER) :]
        runs.append(matched_lengths(draft, tokens, greedy(target, tokens, ANSWER, end)))
    table = []
    for length in range(1, MAX_DRAFT + 1):
        totals = np.array([jumps(matched, length) for matched in runs]).sum(0)
        passes, drafted, accepted = (int(total) for total in totals)
        table.append(
            {
                "draft_length": length,
                "acceptance": round(accepted / drafted, 4),
                "tokens_per_jump": round(sum(len(m) for m in runs) / passes, 3),
            }
        )
    return {
        "prompts": len(prompts),
        "answer_tokens": ANSWER,
        "quantization": SHIPPED,
        "draft_lengths": table,
    }


def verbatim_share(held_out: Sequence[Document], trained: Sequence[Document]) -> float:
    """Share of held-out lines of 40 or more characters that also occur in the training text."""
    seen = {line.strip() for document in trained for line in document.text.splitlines()}
    lines = [line.strip() for document in held_out for line in document.text.splitlines()]
    long = [line for line in lines if len(line) >= 40]
    return sum(line in seen for line in long) / len(long)


def evaluate(folder: Path, scratch: Path, threads: int) -> dict[str, Any]:
    """All figures of the pair in `folder`; `scratch` receives other quantizations."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    documents = read_held_out(folder)
    figures: dict[str, dict[str, Any]] = {"target": {}, "draft": {}}
    parameters, shipped = {}, {}
    for role, bits in figures.items():
        for name in QUANTIZATIONS:
            model = export_checkpoint(
                folder / role, scratch / role / name, quantization=Quantization.parse(name)
            )
            runner = OnnxModel(model, threads=threads, capacity=WINDOW)
            bits[name] = bits_per_byte(runner.afresh, tokenizer, documents)
            parameters[role] = model.num_parameters
            if name == SHIPPED:
                shipped[role] = runner
            print(f"{role} {name}: {bits[name]['all']} bits per byte", flush=True)
    corpus = load_corpus()
    size = sum(len(document.text.encode("utf-8")) for document in documents)
    return {
        "held_out_bytes": size,
        "held_out_documents": len(documents),
        "held_out_verbatim_share": round(
            verbatim_share(documents, corpus.library + corpus.tests), 4
        ),
        "library_bytes": sum(len(d.text.encode("utf-8")) for d in corpus.library),
        "test_bytes": sum(len(d.text.encode("utf-8")) for d in corpus.tests),
        "xz_bits_per_byte": round(8 * (folder / "heldout.txt.xz").stat().st_size / size, 5),
        "parameters": parameters,
        "bits_per_byte": figures,
        "acceptance": acceptance(
            shipped["target"], shipped["draft"], tokenizer, read_prompts(folder)
        ),
    }


def main() -> None:
    """Read the command line, measure, write evaluation.json."""
    given = options(__doc__, folder=DEMO_DIR, threads=2)
    with TemporaryDirectory() as scratch:
        figures = evaluate(given.folder, Path(scratch), given.threads)
    file = given.folder / EVALUATION
    file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"figures written to {file}")


if __name__ == "__main__":
    main()
