"""Presets from the hub to an answer: small models of their architectures, under their names.

The models lie on the hub as the published ones do: GPT-2 without the prefix of its class and with
its mask as a buffer, OPT as PyTorch weights with a vocabulary and merges, Phi-3 as a graph.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specops.config import Settings
from specops.engine.engine import ModelState
from specops.http.app import create_app
from specops.metrics.metrics import Metrics
from specops.models.hub import HubModel
from specops.presets import presets
from specops.serving.async_engine import AsyncEngine
from tests.checkpoints import make_llama_checkpoint
from tests.conftest import THREADS
from tests.models.hub_server import Hub, download_from, folder_files, serving

pytestmark = pytest.mark.reference

VOCAB = 300
COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA_LIKE = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OPT = {
    **COMMON,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GPT2 = {**COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
LLAMA = ("llama", LLAMA_LIKE)
QWEN3 = ("qwen3", {**LLAMA_LIKE, "head_dim": 32, "tie_word_embeddings": True})
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = (
    "llama",
    {**LLAMA_LIKE, "tie_word_embeddings": True, "rope_parameters": LLAMA3_SCALING},
)
GEMMA3 = ("gemma3_text", {**LLAMA_LIKE, "head_dim": 32, "sliding_window": 48})
LONG_ROPE = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 2.0, 4.0, 8.0] * 2,
    },
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LLAMA,
    "JackFram/llama-160m": LLAMA,
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("llama", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("llama", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-1.7B": QWEN3,
    "Qwen/Qwen3-4B": QWEN3,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA3,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA3,
    "google/gemma-3-270m-it": GEMMA3,
    "google/gemma-3-1b-it": GEMMA3,
    "microsoft/Phi-4-mini-instruct": ("phi3", {**LLAMA_LIKE, **LONG_ROPE}),
    "microsoft/Phi-3-mini-4k-instruct": ("phi3", {**LLAMA_LIKE, "sliding_window": 2047}),
    "facebook/opt-1.3b": ("opt", OPT),
    "facebook/opt-2.7b": ("opt", OPT),
    "facebook/opt-125m": ("opt", OPT),
    "facebook/opt-350m": (
        "opt", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "openai-community/gpt2": ("gpt2", GPT2),
    "openai-community/gpt2-medium": ("gpt2", GPT2),
    "openai-community/gpt2-large": ("gpt2", GPT2),
    "distilbert/distilgpt2": ("gpt2", {**GPT2, "n_layer": 1}),
}  # fmt: skip


def _distinct() -> list[str]:
    """Presets from the hub, one of those whose models are of the same kinds."""
    first: dict[str, str] = {}
    for name, preset in presets().items():
        if (target := HubModel.parse(preset.target)) is not None:
            draft = HubModel.parse(preset.draft)
            kinds = KINDS.get(target.repo), draft and KINDS[draft.repo]
            first.setdefault(repr(kinds), name)
    return list(first.values())


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Every repository that presets name, with a small model."""
    pytest.importorskip("torch", reason="needs the extra `reference`")
    folder = tmp_path_factory.mktemp("repositories")
    made = {}
    for repo, (kind, config) in KINDS.items():
        path = folder / repo.replace("/", "--")
        make_llama_checkpoint(path, vocab=VOCAB)  # for its tokenizer
        _save(path, kind, config)
        made[repo] = folder_files(path)
    return made


def _save(folder: Path, kind: str, config: dict[str, Any]) -> None:
    """Put a random model of an architecture there, as it is published."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    (folder / "model.safetensors").unlink()
    if kind == "gpt2":
        _save_gpt2(folder, model)
    elif kind == "opt":
        _save_opt(folder, model)
    else:
        model.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _save_gpt2(folder: Path, model: Any) -> None:
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    state = dict(model.transformer.state_dict())
    for layer in range(model.config.n_layer):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _save_opt(folder: Path, model: Any) -> None:
    import torch  # noqa: PLC0415

    torch.save(model.model.half().state_dict(), folder / "pytorch_model.bin")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **special}))


def _published_graph(tiny_pair: Path, folder: str) -> dict[str, bytes]:
    """The tiny target as Microsoft lays Phi-3 out, among other files."""
    export = folder_files(tiny_pair / "target" / "onnx" / "int4-32-rtn", f"{folder}/")
    graph = f"{folder}/model.onnx"
    decoder = {"filename": "model.onnx", "num_hidden_layers": 2}
    model = {"bos_token_id": 1, "eos_token_id": [0], "context_length": 128, "vocab_size": 320}
    config = json.dumps({"model": {**model, "type": "phi3", "decoder": decoder}}).encode()
    needed = {name: export[name] for name in (graph, f"{graph}.data", f"{folder}/tokenizer.json")}
    return {**needed, f"{folder}/genai_config.json": config, "README.md": b"many graphs"}


@pytest.fixture
def hub(
    repositories: dict[str, dict[str, bytes]], tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    published = HubModel.parse(presets()["phi3"].target)
    repos = {**repositories, published.repo: _published_graph(tiny_pair, published.subfolder)}
    texts = [text for preset in presets().values() for text in (preset.target, preset.draft)]
    revisions = {model.revision for model in map(HubModel.parse, texts) if model is not None}
    with serving(Hub(repos, tuple(revisions))) as running:
        download_from(running, monkeypatch)
        yield running


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all presets: a draft that two of them have is converted once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", _distinct())
def test_a_preset_answers(name: str, hub: Hub, cache: Path) -> None:
    settings = Settings.from_env(
        {"SPECOPS_MODEL": name, "SPECOPS_CACHE_DIR": str(cache), "SPECOPS_THREADS": str(THREADS)}
    )

    async def scenario() -> None:
        metrics = Metrics()
        service = AsyncEngine(settings, metrics)
        app = create_app(settings, service, metrics)
        service.start()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        async with client, asyncio.timeout(120):
            while service.state not in (ModelState.READY, ModelState.FAILED):
                await asyncio.sleep(0.01)
            assert service.error is None
            body = {"prompt": "def add(a, b):", "max_new_tokens": 8, "ignore_eos": True}
            body |= {"adaptive": False, "details": True}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            details = answer.json()["details"]
            assert details["generated_tokens"] == 8
            has_draft = presets()[name].draft != "none"
            assert details["drafter"] == ("draft" if has_draft else "suffix")
            assert details["draft_tokens"] > 0 or not has_draft
            health = (await client.get("/health")).json()
            assert (health["state"], health["model"]) == ("ready", name)
            assert ("draft" in service.info.drafters) is has_draft
            assert service.info.slots == 8
        await service.stop()

    asyncio.run(scenario())
