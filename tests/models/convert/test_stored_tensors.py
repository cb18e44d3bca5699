"""Checkpoints whose tensors say something else than config.json, or have other names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from specops.models.convert import export_checkpoint
from specops.models.convert.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint, make_llama_checkpoint
from tests.models.convert.gguf.files import SIZES, stored_tensors, write_gguf
from tests.models.convert.runner import edit_config
from tests.models.convert.test_families import (
    TOKENS,
    VOCAB,
    assert_same,
    export,
    opened,
    transformers_logits,
)
from tests.passes import Passes, prepared
from tests.random_weights import write_safetensors


def rewrite(source: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a checkpoint's tensors anew after a change."""
    kept = {name: values.copy() for name, values in stored_tensors(source).items()}  # not mapped
    tensors = change(kept)
    shapes = {name: values.shape for name, values in tensors.items()}
    arrays = (np.ascontiguousarray(values, np.float32) for values in tensors.values())
    write_safetensors(source / "model.safetensors", shapes, "float32", arrays)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "opt"])
def test_another_head_than_the_embedding_is_the_head(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Although config.json ties both: transformers 5 warns and reads the stored head."""
    source = make_checkpoint(tmp_path / "source", kind, vocab=VOCAB)
    edit_config(source, tie_word_embeddings=True)

    def with_head(tensors: dict[str, Any]) -> dict[str, Any]:
        (embedding,) = (
            v for k, v in tensors.items() if k.endswith(("embed_tokens.weight", "wte.weight"))
        )
        return {**tensors, "lm_head.weight": embedding[::-1] * np.float32(1.5)}

    rewrite(source, with_head)
    model, expected = export(tmp_path, "fp32"), transformers_logits(source, TOKENS)
    assert_same(opened(model).step(0, TOKENS), expected)
    assert "'tie_word_embeddings' is ignored: lm_head.weight and" in caplog.text


def test_a_head_with_the_embeddings_values_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie=True)
    rewrite(source, lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"]})
    assert Checkpoint(source).config["tie_word_embeddings"] is True
    assert not caplog.records


@pytest.mark.reference
def test_biases_of_queries_without_one_of_outputs(tmp_path: Path) -> None:
    """Transformers fills the missing biases with zeros; a GGUF has no setting for them."""
    source = make_llama_checkpoint(tmp_path / "source", **SIZES, config={"attention_bias": True})
    rewrite(source, lambda found: {k: v for k, v in found.items() if not k.endswith("o_proj.bias")})
    model, expected = export(tmp_path, "fp32"), transformers_logits(source, TOKENS[:100])
    assert_same(opened(model).step(0, TOKENS[:100]), expected)

    same = tmp_path / "same"
    file = write_gguf(source, tmp_path / "m.gguf", lambda _: Kind.Q8_0, dequantized=same)
    own = export_checkpoint(file, tmp_path / "own", quantization=None)
    expected = transformers_logits(same, TOKENS[:100])
    found = Passes(prepared(own.graph_file, tmp_path)).step(0, TOKENS[:100])
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_multimodal_one_is_exported(prefix: str, tmp_path: Path) -> None:
    """transformers has changed the names of tensors; files on the hub leave out usual settings."""
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4}
    usual |= {"head_dim": 256, "query_pre_attn_scalar": 256}
    alone = make_checkpoint(
        tmp_path / "alone" / "source", "gemma3_text", heads=8, kv_heads=4, config=usual
    )
    source = tmp_path / "source"
    shutil.copytree(alone, source)
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in usual}
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (source / "config.json").write_text(json.dumps(settings))
    vision = prefix.removesuffix("language_model.").removesuffix("language_model.model.")
    extra = {
        f"{vision}vision_tower.vision_model.post_layernorm.weight": np.ones(8, np.float32),
        f"{vision}multi_modal_projector.mm_soft_emb_norm.weight": np.ones(8, np.float32),
    }
    rewrite(
        source,
        lambda found: extra | {name.replace("model.", prefix, 1): v for name, v in found.items()},
    )
    model, expected = export(tmp_path, "int8-128"), export(alone.parent, "int8-128")
    for file in ("model.onnx", "model.onnx.data"):
        assert (model.path / file).read_bytes() == (expected.path / file).read_bytes()


def test_an_index_beside_a_whole_file_is_of_other_files(tmp_path: Path) -> None:
    """Whoever merges shards may leave their index behind."""
    source = make_llama_checkpoint(tmp_path / "source", shards=3)
    merged = {name: values.copy() for name, values in stored_tensors(source).items()}
    for shard in source.glob("model-*.safetensors"):
        shard.unlink()
    shapes = {name: values.shape for name, values in merged.items()}
    write_safetensors(source / "model.safetensors", shapes, "float32", iter(merged.values()))
    assert (source / "model.safetensors.index.json").is_file()
    checkpoint = Checkpoint(source)
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert checkpoint.tensors.keys() == merged.keys()
