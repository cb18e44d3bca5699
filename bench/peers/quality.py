"""Quality and speed of all kinds of quantized weights, ours and those of other engines.

The reference is transformers in float32 on the same checkpoint; for a GGUF, on its dequantized
weights. It answers chat prompts, and every other side scores the same prompts and answers. KL is
the divergence of the next token's distribution from the reference's, in nats, over every position
of the answers. Bits per byte are measured on held-out code. Times are taken afterwards, all sides
in turns.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from bench.models import configured
from bench.peers.compare import (
    THREADS,
    Measured,
    Plan,
    SideProcess,
    decoding,
    loaded,
    measure,
    prefill,
)
from bench.peers.environment import install
from bench.peers.models import LLAMA_CPP, OURS, run_module
from bench.runtime.forward import Divergence, divergence, log_softmax
from bench.speculation.chat import questions
from bench.tools.report import Chart, Outcome, Summary, Table, progress, ratios
from specops.config import ConfigError
from specops.engine.engine import NO_DRAFTER
from specops.models.convert.calibration.samples import draw_samples
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.gguf.rows import GgufRows
from specops.models.gguf_files import is_gguf
from specops.models.prepare import prepare
from specops.text.chat_template import ChatTemplate
from training.corpus import read_held_out

NNCF, REFERENCE = "NNCF int4-32", "transformers"
WEIGHTS = ("fp32", "int8-32", "int8-128", "int4-32-mixed", "int4-32", "int4-128-mixed", "int4-128")
_ANSWER, _DOCUMENTS, _DOCUMENT = 96, 4, 128  # tokens, texts, tokens
_DECODE, _PREFILL = "1 token", "prompt of 512"
FULL = Plan(loads=1, rounds=6, passes=3)
QUICK = Plan(loads=1, rounds=1, passes=1)
_PROMPTS = [question.text for question in questions("quality")]


class Text(NamedTuple):
    """Tokens of a text. Logits count from the token `first` on."""

    tokens: list[int]
    first: int


class Quality(NamedTuple):
    """One kind of weights: mean KL in nats, share of equal first choices, bits per byte."""

    kl: float
    agreement: float
    bits_per_byte: float


def run(model: Path | None, plan: Plan, cache: Path) -> Outcome:
    """Measure a GGUF, or a checkpoint's folder, in all kinds of weights."""
    if model is None:
        raise ConfigError(
            "quality needs a model: python -m bench quality MODEL, a GGUF or a folder"
        )
    file = model if is_gguf(model) else None
    home = cache / f"quality-{model.resolve().stem}"
    home.mkdir(parents=True, exist_ok=True)
    checkpoint = stand_in(model, home / "checkpoint") if file else model
    sides = _sides(checkpoint, file, home, install(cache / "environment"))
    reference = SideProcess((sys.executable, "-m", "bench.peers.reference_worker"), str(checkpoint))
    with TemporaryDirectory(dir=home) as scratch:
        count = len(_PROMPTS) if plan is FULL else 2
        found = _scored(reference, sides, checkpoint, count, Path(scratch))
    vocab = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    cases = [decoding(_DECODE, plan.passes), prefill(_PREFILL, 512, vocab)]
    compared = {model.stem: {name: name for name in sides}}
    return outcome(model.stem, found, measure(sides, compared, cases, plan, vocab))


def stand_in(file: Path, folder: Path) -> Path:
    """A GGUF's dequantized weights as a checkpoint in float32, since the original is unknown."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = GgufCheckpoint(file)
    tensors = {
        name: source.vector(name)
        if len(stored.shape) == 1
        else _numbers(source.matrix(name).parts[0])
        for name, stored in source.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source.write_texts(folder)
    kind = source.config["architectures"][0].removesuffix("ForCausalLM").lower()
    config = {**source.config, "model_type": kind}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _numbers(rows: GgufRows) -> NDArray[np.float32]:
    """A matrix in float32, dequantized by llama.cpp's library."""
    if not rows.has_blocks:
        return np.asarray(rows, np.float32)
    return gguf.dequantize(rows.blocks(), gguf.GGMLQuantizationType(rows.kind))


def _sides(checkpoint: Path, file: Path | None, home: Path, python: Path) -> dict[str, SideProcess]:
    """The processes of all kinds of weights; the others are compared with the first."""
    base = configured().settings

    def of(target: Path, quant: str) -> SideProcess:
        own = {"target": str(target), "quant": quant, "draft": NO_DRAFTER, "cache_dir": home}
        return SideProcess.ours(replace(base, **own))

    found = {OURS: of(file, "") if file else of(checkpoint, "int8-32")}
    found |= {f"{OURS} {quant}": of(checkpoint, quant) for quant in WEIGHTS}
    if file:
        found[LLAMA_CPP] = SideProcess.peer(python, "llama_worker", file)
    nncf = _nncf(python, checkpoint, home)
    return found | {NNCF: SideProcess.peer(python, "openvino_worker", nncf)}


def _nncf(python: Path, checkpoint: Path, home: Path) -> Path:
    """NNCF's model, calibrated with the same samples as ours."""
    file = home / "nncf.xml"
    if file.is_file():
        return file
    eight = prepare(checkpoint, "int8-32", name="quality", cache_dir=home, report=progress)
    progress("generating the samples for NNCF")
    texts = home / "texts.json"
    samples = draw_samples(eight.path, home, lambda done, total: None)
    texts.write_text(json.dumps(samples.tolist()), encoding="utf-8")
    progress("quantizing it with NNCF, with AWQ and scale estimation")
    part = file.with_name("nncf.part.xml")
    run_module(python, "openvino_model", checkpoint, part, texts)
    part.with_suffix(".bin").rename(file.with_suffix(".bin"))
    part.rename(file)
    return file


def _scored(
    reference: SideProcess,
    sides: Mapping[str, SideProcess],
    checkpoint: Path,
    count: int,
    scratch: Path,
) -> dict[str, Quality]:
    """The quality of every side, with the first `count` questions."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    template = ChatTemplate.load(checkpoint)
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
    with loaded(REFERENCE, reference) as (worker, _):
        answers = []
        for number, prompt in enumerate(prompts, 1):
            progress(f"{REFERENCE} answers question {number} of {count}")
            answers += worker.ask("complete", prompts=[prompt], output=_ANSWER)[1]
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
        with loaded(name, side) as (worker, _):
            worker.ask("score", texts=plain, file=str(file))
        found[name] = quality(expected, file, texts, count, nbytes)
    return found


def quality(
    expected: Path, found: Path, texts: Sequence[Text], answers: int, nbytes: int
) -> Quality:
    """Compare two files of logits.

    Args:
        expected: the reference's logits.
        found: a side's logits.
        texts: first answers, then documents.
        answers: number of answers.
        nbytes: size of all documents in bytes.
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
    """A row for each kind of weights, and a chart of quality against speed."""
    times = measured.turns.ms
    rows, kinds = [], []
    for name, figures in found.items():
        shares = f"{figures.agreement:.1%}", f"{figures.bits_per_byte:.4f}"
        spreads = [Summary.of(times[case][name]).spread() for case in (_DECODE, _PREFILL)]
        rows.append((name, f"{figures.kl:.4f}", *shares, *spreads))
        kinds.append({"name": name, **figures._asdict(), "ms": times[_DECODE][name]})
    columns = ("weights", "mean KL", "same first choice", "bits per byte", "ms per token")
    notes = [
        "KL to transformers' float32 of the same weights, in nats, over answers to chat prompts",
        f"{NNCF}: asymmetric, AWQ and scale estimation, calibrated with the same text as ours",
        *(f"{name}: {text}" for name, text in measured.runs_on.items() if OURS not in name),
    ]
    if LLAMA_CPP in found:
        notes += [
            f"{case}: {Summary.of(ratios(ms[LLAMA_CPP], ms[OURS])).spread()} times as fast as "
            f"{LLAMA_CPP} on the same file"
            for case, ms in times.items()
        ]
    table = Table(f"Quality and speed: {title}", (*columns, "ms, prompt of 512"), rows, notes)
    points = {
        name: (Summary.of(times[_DECODE][name]).median, figures.kl)
        for name, figures in found.items()
    }
    chart = Chart(table.title, "ms per token", "mean KL to fp32", points)
    return Outcome({"threads": THREADS, "kinds": kinds}, [table], chart)
