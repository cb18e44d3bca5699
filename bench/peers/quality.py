"""What weights of every kind cost in quality and in time, ours and those of others.

The reference is transformers in float32 on the same checkpoint; of a GGUF, on its weights as they
are. It answers chat prompts, and every other side is shown the same prompts and answers: KL is that
of the next token's distribution from the reference's, in nats, over every position of the answers.
Bits per byte are those that the model needs for held-out code. Times are taken afterwards, all
sides in turns.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from bench.models import CACHE, Progress, configured
from bench.peers.compare import (
    OURS,
    Case,
    Measured,
    Plan,
    SideProcess,
    loaded,
    measure,
    ours,
    peer,
)
from bench.peers.environment import install
from bench.peers.models import LLAMA_CPP, run_module
from bench.runtime.forward import Divergence, divergence, log_softmax
from bench.tools.report import Chart, Outcome, Series, Table, spread
from bench.tools.stats import Summary, ratios
from specops.engine.engine import NO_DRAFTER
from specops.models.convert.calibration import draw_samples
from specops.models.convert.gguf import GgufCheckpoint
from specops.models.gguf_files import is_gguf
from specops.models.prepare import prepare
from specops.text.chat_template import ChatTemplate
from training.corpus import read_held_out

NNCF, REFERENCE = "NNCF int4-32", "transformers"
WEIGHTS = ("fp32", "int8-32", "int8-128", "int4-32", "int4-128")
_THREADS = 2
_ANSWER, _DOCUMENTS, _DOCUMENT = 96, 4, 128  # tokens, texts, tokens
_DECODE, _PREFILL = Case("1 token"), Case("prompt of 512", tokens=512, prefill=True)
_CASES = (_DECODE, _PREFILL)
FULL = Plan(loads=1, rounds=6, passes=3, cases=_CASES)
QUICK = Plan(loads=1, rounds=1, passes=1, cases=_CASES)
_PROMPTS = (
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three tips for learning a new language.",
    "Write a Python function that reverses a string.",
    "Translate 'Good morning, how are you?' into Spanish.",
    "Summarize the story of Romeo and Juliet in three sentences.",
    "What are the main differences between cats and dogs?",
    "How do I make pancakes?",
    "Who was Albert Einstein?",
    "What is 17 plus 25? Show your steps.",
    "Write an email asking my landlord to fix the heating.",
    "List five animals that live in the ocean.",
    "Explain photosynthesis to a child.",
    "Schreibe einen Satz über das Wetter in Berlin.",
    "What should I pack for a weekend in the mountains?",
)


class Text(NamedTuple):
    """Tokens, and the first whose logits count: the one before what is predicted first."""

    tokens: list[int]
    first: int


class Quality(NamedTuple):
    """Of one kind of weights: nats, a share, bits."""

    kl: float
    agreement: float
    bits_per_byte: float


def run(model: Path, plan: Plan, progress: Progress, cache: Path = CACHE) -> Outcome:
    """Measure a GGUF, or a checkpoint's folder, in all kinds of weights."""
    gguf = model if is_gguf(model) else None
    home = cache / f"quality-{model.resolve().stem}"
    home.mkdir(parents=True, exist_ok=True)
    checkpoint = stand_in(model, home / "checkpoint") if gguf else model
    sides = _sides(checkpoint, gguf, home, progress)
    reference = SideProcess((sys.executable, "-m", "bench.peers.reference_worker"), str(checkpoint))
    with TemporaryDirectory(dir=home) as scratch:
        found = _scored(
            reference, sides, checkpoint, plan=plan, scratch=Path(scratch), progress=progress
        )
    vocab = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    measured = measure(sides, plan, threads=_THREADS, vocab=vocab, progress=progress)
    return outcome(model.stem, found, measured)


def stand_in(gguf: Path, folder: Path) -> Path:
    """A GGUF's weights as a checkpoint in float32: what it was before nobody knows."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = GgufCheckpoint(gguf)
    tensors = {
        name: source.vector(name)
        if len(stored.shape) == 1
        else np.ascontiguousarray(source.matrix(name).parts[0], np.float32)
        for name, stored in source.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source.write_texts(folder)
    kind = source.config["architectures"][0].removesuffix("ForCausalLM").lower()
    config = {**source.config, "model_type": kind}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _sides(
    checkpoint: Path, gguf: Path | None, home: Path, progress: Progress
) -> dict[str, SideProcess]:
    """Every kind of weights, ready to be started; the first is what the others are held against."""
    base = configured().settings

    def of(target: Path, quant: str) -> SideProcess:
        own = {"target": str(target), "quant": quant, "draft": NO_DRAFTER, "cache_dir": home}
        return ours(replace(base, **own), _THREADS)

    found = {OURS: of(gguf, "") if gguf else of(checkpoint, "int8-32")}
    found |= {f"{OURS} {quant}": of(checkpoint, quant) for quant in WEIGHTS}
    python = install(progress)
    if gguf:
        found[LLAMA_CPP] = peer(python, "llama_worker", gguf)
    found[NNCF] = peer(python, "openvino_worker", _nncf(python, checkpoint, home, progress))
    return found


def _nncf(python: Path, checkpoint: Path, home: Path, progress: Progress) -> Path:
    """NNCF's model, rounded over the samples that ours is rounded over."""
    file = home / "nncf.xml"
    if file.is_file():
        return file
    eight = prepare(checkpoint, "int8-32", name="quality", cache_dir=home, report=progress)
    progress("having the model write what NNCF looks at")
    texts = home / "texts.json"
    samples = draw_samples(eight.path, home, lambda done, total: None)
    texts.write_text(json.dumps(samples.tolist()), encoding="utf-8")
    progress("having NNCF round it, with AWQ and scale estimation")
    part = file.with_name("nncf.part.xml")
    run_module(python, "openvino_model", checkpoint, part, texts)
    part.with_suffix(".bin").rename(file.with_suffix(".bin"))
    part.rename(file)
    return file


def _scored(
    reference: SideProcess, sides: Mapping[str, SideProcess], checkpoint: Path,
    *, plan: Plan, scratch: Path, progress: Progress,
) -> dict[str, Quality]:  # fmt: skip
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    template = ChatTemplate.load(checkpoint)
    count = len(_PROMPTS) if plan is FULL else 2
    asked = [
        template.render([{"role": "user", "content": text}]) if template else text
        for text in _PROMPTS[:count]
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
    documents = [
        tokenizer.encode(document.text, add_special_tokens=False).ids[:_DOCUMENT]
        for document in read_held_out()[:_DOCUMENTS]
    ]
    expected, file = scratch / "reference", scratch / "logits"
    with loaded(REFERENCE, reference, _THREADS) as (worker, _):
        answers = []
        for number, prompt in enumerate(prompts, 1):
            progress(f"{REFERENCE} answers question {number} of {count}")
            answers += worker.ask("complete", prompts=[prompt], output=_ANSWER)["tokens"]
        texts = [
            Text(prompt + answer, len(prompt) - 1)
            for prompt, answer in zip(prompts, answers, strict=True)
        ] + [Text(document, 0) for document in documents]
        plain = [tuple(text) for text in texts]  # other environments do not know `Text`
        worker.ask("score", texts=plain, file=str(expected))
    nbytes = sum(len(tokenizer.decode(document[1:]).encode()) for document in documents)
    found = {}
    for name, side in sides.items():
        progress(f"quality of {name}")
        with loaded(name, side, _THREADS) as (worker, _):
            worker.ask("score", texts=plain, file=str(file))
        found[name] = quality(expected, file, texts, count, nbytes)
    return found


def quality(
    expected: Path, found: Path, texts: Sequence[Text], answers: int, nbytes: int
) -> Quality:
    """Compare two files of logits; the first `answers` texts are answers, the others documents.

    `nbytes` is what the documents have in all.
    """
    positions = [len(text.tokens) - text.first for text in texts]
    whole = [np.memmap(file, np.float32, "r") for file in (expected, found)]
    theirs, ours = (logits.reshape(sum(positions), -1) for logits in whole)
    apart: list[Divergence] = []
    bits, start = 0.0, 0
    for number, (text, count) in enumerate(zip(texts, positions, strict=True)):
        rows = slice(start, start + count - 1)  # after the last token nothing follows
        start += count
        logs = log_softmax(ours[rows])
        if number < answers:
            apart.append(divergence(log_softmax(theirs[rows]), logs))
        else:
            following = text.tokens[text.first + 1 :]
            bits -= float(logs[np.arange(len(following)), following].sum()) / math.log(2)
    kl, flipped = (float(np.concatenate(values).mean()) for values in zip(*apart, strict=True))
    return Quality(kl, 1 - flipped, bits / nbytes)


def outcome(title: str, found: Mapping[str, Quality], measured: Measured) -> Outcome:
    """A row for each kind of weights, and where they lie between quality and speed."""
    decode, prefill = (measured.ms[case.title] for case in _CASES)
    rows, kinds = [], []
    for name, figures in found.items():
        times = [spread(Summary.of(ms[name])) for ms in (decode, prefill)]
        shares = f"{figures.agreement:.1%}", f"{figures.bits_per_byte:.4f}"
        rows.append((name, f"{figures.kl:.4f}", *shares, *times))
        kinds.append({"name": name, **figures._asdict(), "ms": decode[name]})
    columns = ("weights", "mean KL", "same first choice", "bits per byte", "ms per token")
    notes = [
        "KL to transformers' float32 of the same weights, in nats, over answers to chat prompts",
        f"{NNCF}: asymmetric, AWQ and scale estimation, over the text that ours is rounded over",
        *(f"{name}: {text}" for name, text in measured.runs_on.items() if OURS not in name),
    ]
    if LLAMA_CPP in found:
        times = {case.title: measured.ms[case.title] for case in _CASES}
        notes += [
            f"{case}: {spread(Summary.of(ratios(ms[LLAMA_CPP], ms[OURS])))} times as fast as "
            f"{LLAMA_CPP} on the same file"
            for case, ms in times.items()
        ]
    table = Table(f"Quality and speed: {title}", (*columns, "ms, prompt of 512"), rows, notes)
    series = [
        Series(name, [figures.kl], across=[Summary.of(decode[name]).median])
        for name, figures in found.items()
    ]
    chart = Chart(table.title, "points", "ms per token", "mean KL to fp32", (), series)
    return Outcome({"threads": _THREADS, "kinds": kinds}, [table], [chart])
