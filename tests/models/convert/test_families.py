"""Every family computes what transformers computes, in all kinds of passes of the engine.

Checkpoints are small, with random weights and the proportions of published models.
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from specops.models.convert import ExportedModel, Quantization, export_checkpoint
from specops.models.convert.families import family_of
from specops.models.convert.families.gated_decoder import GatedDecoder
from specops.models.convert.model_config import ModelConfig
from specops.runtime.batch import Batch
from specops.runtime.kernels import NORM
from tests.checkpoints import RELATIVES, YARN, make_checkpoint, make_llama_checkpoint
from tests.models.convert.runner import Runner, edit_config
from tests.models.graph.test_tiles import operators
from tests.passes import Passes, prepared, random_chunks

VOCAB = 320
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, VOCAB, 150)]
SPANS = {0: 1, 1: 4, 2: 1}  # tokens of each slot in a pass
OTHER_TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 80)]

Float = NDArray[np.float32]


class Case(NamedTuple):
    """A kind of checkpoint and its options.

    `rounding` multiplies the allowed error of rounded weights: norms after a part scale its error
    up. `norms`: how many but for the last are no part of a product.
    """

    kind: str
    options: dict[str, Any]
    rounding: float
    norms: int


def case_of(kind: str, rounding: float = 1.0, norms: int = 0, **options: Any) -> Case:
    return Case(kind, options, rounding, norms)


def long_rope(pairs: int) -> dict[str, Any]:
    """Keys with other frequencies for more than 64 positions."""
    scaling = {
        "type": "longrope",
        "short_factor": [1, *np.linspace(1.0, 1.4, pairs - 1).tolist()],
        "long_factor": np.linspace(1.1, 6.0, pairs).tolist(),
    }
    return {"original_max_position_embeddings": 64, "rope_scaling": scaling}


CASES = {
    **{kind: case_of(kind) for kind in RELATIVES},
    "llama attention biases": case_of("llama", config={"attention_bias": True}),
    "llama all biases": case_of(
        "llama", dtype="bfloat16", config={"attention_bias": True, "mlp_bias": True}
    ),
    "llama heads of 8": case_of("llama", hidden=64, heads=8, kv_heads=2),
    "llama heads of 24": case_of("llama", hidden=96, heads=4, kv_heads=2),
    "qwen2": case_of("qwen2"),
    "qwen2 0.5b": case_of("qwen2", hidden=112, heads=7, kv_heads=1, ffn=152),
    "phi3 mini": case_of("phi3", hidden=96, heads=1, kv_heads=1, ffn=256),
    "phi3 medium": case_of("phi3", heads=4, kv_heads=2, dtype="bfloat16"),
    "phi3 no window": case_of("phi3", config={"sliding_window": None}),
    "phi3 window of 40": case_of("phi3", config={"sliding_window": 40}),
    "phi3 window of 1": case_of("phi3", config={"sliding_window": 1}),
    "phi3 partial rotary": case_of(
        "phi3", hidden=128, heads=2, kv_heads=2, config={"partial_rotary_factor": 0.75}
    ),
    "phi3 partial rotary of 8": case_of(
        "phi3", hidden=64, heads=4, kv_heads=2, config={"partial_rotary_factor": 0.5}
    ),
    "phi3.5": case_of("phi3", config=long_rope(8)),
    "phi4 mini": case_of(
        "phi3",
        **{"hidden": 128, "heads": 2, "kv_heads": 1, "tie": True},
        config={**long_rope(24), "partial_rotary_factor": 0.75},
    ),
    "qwen3": case_of("qwen3", dtype="bfloat16"),
    "olmo2": case_of("olmo2", 1.8, norms=8),
    "olmo3": case_of("olmo3", 1.8, norms=8),
    "exaone4": case_of("exaone4", 1.8, norms=4),
    "exaone4 no window": case_of(
        *("exaone4", 1.8, 4), config={"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "glm4": case_of("glm4", 1.8, norms=4),
    "phi": case_of("phi", kv_heads=4),
    "gemma2": case_of("gemma2", 1.8, norms=5),
    "gemma3_text": case_of("gemma3_text", 1.8, norms=6, layers=3),
    "gemma3 heads of 256": case_of(
        *("gemma3_text", 1.8, 4),
        heads=2,
        kv_heads=1,
        config={
            "head_dim": 256,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "lfm2": case_of("lfm2", 1.8, layers=4, attention=(0, 2)),
    "lfm2 ends with attention": case_of("lfm2", 1.8, attention=(2,), dtype="bfloat16"),
    "gemma4": case_of("gemma4_text", 1.8, norms=17),
    "gemma4 e2b": case_of(
        *("gemma4_text", 1.8, 20), kinds="SSFSSF", kv_heads=1, config={"use_double_wide_mlp": True}
    ),
    "gemma4 31b": case_of(
        *("gemma4_text", 1.8, 7),
        kinds="SSF",
        config={
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4 heads of 512": case_of(
        *("gemma4_text", 2.5, 17), config={"head_dim": 256, "global_head_dim": 512}
    ),
    "qwen3.5": case_of("qwen3_5_text", 2.2),
    "qwen3.5 ends without attention": case_of(
        "qwen3_5_text",
        2.2,
        **{"layers": 3, "dtype": "bfloat16", "tie": False},
        config={"linear_num_key_heads": 4},
    ),
    "granite hybrid": case_of("granitemoehybrid", 1.8),
    "granite hybrid that rotates": case_of(
        "granitemoehybrid",
        1.8,
        attention=(0, 2),
        config={"position_embedding_type": "rope", "mamba_conv_bias": False},
    ),
    "granite 4 without states": case_of(
        "granitemoehybrid",
        1.8,
        **{"layers": 2, "attention": (0, 1)},
        config={"position_embedding_type": "rope"},
    ),
    "opt 125m": case_of("opt"),
    "opt 350m": case_of("opt", projection=32, norm_before=False),
    "opt 1.3b": case_of("opt", hidden=96, heads=3, ffn=384, dtype="float16"),
    "opt untied": case_of("opt", tie=False),
    "opt without prefix": case_of("opt", prefix=""),
    "gpt2 untied": case_of("gpt2", tie=False, prefix="transformer."),
    "gpt2": case_of("gpt2"),
    "gpt2 odd widths": case_of("gpt2", hidden=80, heads=5, config={"n_inner": 147}),
}


_exports: dict[Path, ExportedModel] = {}


def export(folder: Path, quantization: str) -> ExportedModel:
    """Exports the checkpoint `source` in a folder to its neighbour, unless that is there."""
    path, quant = folder / quantization, Quantization.parse(quantization)
    if not path.exists():  # a test's folder may have had the same name and be gone
        _exports[path] = export_checkpoint(folder / "source", path, quantization=quant)
    return _exports[path]


def opened(model: ExportedModel, *, context: int = 256) -> Passes:
    """The export as the service runs it."""
    return Passes(prepared(model.graph_file, model.path.parent / "cache"), context=context)


def transformers_logits(source: Path, tokens: list[int]) -> Float:
    """Logits [tokens, vocab] of transformers in float32."""
    return transformers_outputs(source, tokens)[0]


def transformers_outputs(source: Path, tokens: list[int]) -> tuple[Float, Float]:
    """The logits, and what enters the first two layers: [2, tokens, hidden]."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    import transformers  # noqa: PLC0415  (takes seconds to import)

    named = json.loads((source / "config.json").read_text())["architectures"][0]
    with_images = named.endswith("ForConditionalGeneration")
    auto = "AutoModelForImageTextToText" if with_images else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([tokens]), output_hidden_states=True)
    states = torch.cat(found.hidden_states[:2]).numpy()
    return found.logits[0].numpy(), states


def assert_same(actual: Float, expected: Float) -> None:
    """Equal within 1e-4 of the largest logit."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


class Reference(NamedTuple):
    """An fp32 export, the logits of transformers for both texts, and the first one's states."""

    model: ExportedModel
    logits: Float
    other_logits: Float
    states: Float


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `source` is the case's checkpoint."""
    path = tmp_path_factory.mktemp("family")
    make_checkpoint(path / "source", case.kind, vocab=VOCAB, **case.options)
    return path


@pytest.fixture(scope="module")
def fp32(folder: Path) -> ExportedModel:
    return export(folder, "fp32")


@pytest.fixture(scope="module")
def reference(fp32: ExportedModel, folder: Path) -> Reference:
    logits, states = transformers_outputs(folder / "source", TOKENS)
    return Reference(fp32, logits, transformers_logits(folder / "source", OTHER_TOKENS), states)


@pytest.mark.reference
def test_one_pass_gives_transformers_logits(reference: Reference) -> None:
    assert_same(opened(reference.model).step(0, TOKENS), reference.logits)


@pytest.mark.reference
def test_a_draft_head_gets_what_enters_layers(reference: Reference) -> None:
    model = reference.model
    passes = Passes(prepared(model.graph_file, model.path.parent / "cache", (0, 1)))
    states, given = passes.runner.states, list[Float]()
    assert states is not None
    states.followed.add(1)
    states.receive = lambda slot, start, rows: given.append(rows.copy())
    passes.together({0: OTHER_TOKENS[:5], 1: TOKENS}, num_logits=1)
    passes.runner.publish_hidden_states(1, len(TOKENS))
    assert_same(given[0], np.concatenate(reference.states, -1))


@pytest.mark.reference
def test_slots_of_other_lengths_beside_each_other_give_transformers_logits(
    reference: Reference,
) -> None:
    """Slots of 100, 3 and 50 tokens go on together: one token, four, one. A draft was rejected."""
    passes = opened(reference.model)
    starts = (100, 3, 50)
    texts = (TOKENS, TOKENS, OTHER_TOKENS)
    expected = (reference.logits, reference.logits, reference.other_logits)
    passes.together({slot: texts[slot][: starts[slot]] for slot in range(3)}, num_logits=0)
    passes.step(0, [(token + 1) % VOCAB for token in TOKENS[100:108]])
    passes.rewind(0, 100)
    at = list(starts)
    for _ in range(8):
        spans = {slot: texts[slot][at[slot] : at[slot] + count] for slot, count in SPANS.items()}
        for slot, logits in passes.together(spans).items():
            assert_same(logits, expected[slot][at[slot] : at[slot] + len(logits)])
            at[slot] += len(logits)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8-128", 0.05), ("int4-32-rtn", 0.4)])
def test_quantized_logits_stay_close_to_fp32(
    fp32: ExportedModel, folder: Path, case: Case, quantization: str, tolerance: float
) -> None:
    expected = opened(fp32).step(0, TOKENS)
    model = export(folder, quantization)
    actual = opened(model).step(0, TOKENS)
    allowed = case.rounding * tolerance
    assert np.linalg.norm(actual - expected) < allowed * np.linalg.norm(expected)
    counts = operators(prepared(model.graph_file, folder / "cache")).items()
    kinds = re.compile("Norm|MatMulNBits|Gelu|Sigmoid|Tanh")
    alone = Counter({kind: count for kind, count in counts if kinds.search(kind)})
    # No product makes the last norm, of which embeddings are made; OPT 350M has none.
    last = case.options.get("norm_before", True)
    assert alone == Counter({NORM: case.norms + last})


def test_a_token_has_the_same_bits_whatever_else_is_in_its_pass(folder: Path) -> None:
    """Alone, in chunks of any width and beside other slots; also beyond a sliding window."""
    passes = opened(export(folder, "int4-32-mixed-rtn"))
    tokens = TOKENS[:96]
    whole = passes.step(0, tokens)
    singles = np.concatenate([passes.step(1, [token]) for token in tokens])
    np.testing.assert_array_equal(singles, whole)
    passes.rewind(0, 0)
    passes.rewind(1, 0)
    others = iter(random_chunks(OTHER_TOKENS * 4, seed=5, longest=7))
    beside = []
    for piece in random_chunks(tokens, seed=4, longest=24):
        beside.append(passes.together({1: next(others), 2: piece, 0: next(others)})[2])
    np.testing.assert_array_equal(np.concatenate(beside), whole)


def test_logits_are_a_product_of_the_last_hidden_state(fp32: ExportedModel) -> None:
    """Soft caps and factors behind the product keep the order of its entries."""
    passes = opened(fp32)
    both = Batch()
    for slot in (0, 1):  # the second one wants the states alone
        assert passes.cache.reserve(slot, 50)
        both.add(slot, 0, TOKENS[:50], 9, 50 - 9, scored=slot == 0)
    logits, hidden = passes.runner.forward(both), passes.runner.hidden_states(0, 18)
    assert (hidden[:9] == hidden[9:]).all()
    weights = {tensor.name: tensor for tensor in onnx.load(fp32.graph_file).graph.initializer}
    capped = "logits.product.weight" in weights
    weight = numpy_helper.to_array(weights["logits.product.weight" if capped else "logits.weight"])
    bias = numpy_helper.to_array(weights["logits.bias"]) if "logits.bias" in weights else 0
    for state, expected in zip(hidden[:9], logits, strict=True):
        found = state @ weight + bias
        assert np.corrcoef(found, expected)[0, 1] > 0.98
        assert found.argmax() == expected.argmax()


# Settings of a Llama's config.json, and layouts of its weights.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "grouped heads, untied": {"heads": 4, "kv_heads": 2, "tie": False},
    "grouped heads, tied": {"heads": 4, "kv_heads": 1, "tie": True},
    "multi-head": {"heads": 4, "kv_heads": 4, "tie": True},
    "explicit head_dim": {"hidden": 96, "heads": 4, "config": {"head_dim": 32}},
    "bfloat16 in shards": {"dtype": "bfloat16", "shards": 3, "layers": 3},
    "float16": {"dtype": "float16"},
    "odd widths": {"hidden": 80, "heads": 5, "kv_heads": 5, "ffn": 147, "vocab": 331},
    "old rope_theta": {"config": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6}},
    "new rope_parameters": {
        "config": {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        }
    },
    "linear rope scaling": {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "yarn rope scaling": {"config": {"rope_scaling": YARN}},
    "yarn, given factors": {
        "config": {
            "rope_scaling": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 0.5}
        }
    },
    "yarn, not truncated, mscale": {
        "config": {
            "rope_scaling": {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
        }
    },
    "llama3 rope scaling": {"config": {"rope_scaling": LLAMA3_ROPE}},
    "llama3 rope_parameters": {
        "config": {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}
    },
}


@pytest.mark.reference
@pytest.mark.parametrize("name", LLAMAS)
def test_a_llama_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """Both in the engine and with ONNX Runtime alone."""
    source = make_llama_checkpoint(tmp_path / "source", **LLAMAS[name])
    edit_config(source)
    model, expected = export(tmp_path, "fp32"), transformers_logits(source, TOKENS)
    assert_same(opened(model).step(0, TOKENS), expected)
    assert_same(Runner(model).step(TOKENS), expected)


@pytest.mark.reference
def test_a_context_within_the_trained_one_rotates_by_its_own_frequencies(tmp_path: Path) -> None:
    """A longer context rotates by the long frequencies, from the first position on."""
    source = make_checkpoint(tmp_path / "source", "phi3", vocab=VOCAB, config=long_rope(8))
    model, tokens = export(tmp_path, "fp32"), TOKENS[:64]
    within = transformers_logits(source, tokens)
    beyond = transformers_logits(source, TOKENS)
    assert np.abs(beyond[:64] - within).max() > 0.1 * np.abs(within).max()
    assert_same(opened(model, context=64).step(0, tokens), within)
    assert_same(opened(model, context=192).step(0, tokens), beyond[:64])
    # With ONNX Runtime alone, the number of tokens decides, as in transformers.
    assert_same(Runner(model).step(tokens), within)
    assert_same(Runner(model).step(TOKENS), beyond)


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
}
SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
GEMMA4_VISION = {**SIGLIP, "num_key_value_heads": 2, "head_dim": 32, "standardize": True}
GEMMA4_AUDIO = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 64,
    "subsampling_conv_channels": [8, 4],
}
QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 64}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
MULTIMODAL: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "qwen2",
        {"config": {"rope_scaling": MROPE}, "tie": False},
        {"depth": 1, "num_heads": 2, "embed_dim": 64, "hidden_size": 64},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2",
        {"config": {"rope_scaling": MROPE}},
        {**QWEN_VISION, "intermediate_size": 64, "out_hidden_size": 64},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"config": {"rope_scaling": {**MROPE, "type": "default", "mrope_section": [6, 5, 5]}}},
        {**QWEN_VISION, "intermediate_size": 64, "out_hidden_size": 64},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5_text",
        {},
        {**QWEN_VISION, "intermediate_size": 64, "out_hidden_size": 64},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        {},
        {**SIGLIP, "image_size": 32, "patch_size": 4},
    ),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text", {}, GEMMA4_VISION),
    "gemma4 31b": (
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        CASES["gemma4 31b"].options,
        GEMMA4_VISION,
    ),
    "mistral3 small": (
        "Mistral3ForConditionalGeneration",
        "mistral",
        {},
        PIXTRAL,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "ministral3",
        {"tie": True},
        PIXTRAL,
    ),
}


@pytest.mark.reference
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_language_model_beside_an_image_encoder_gives_transformers_logits(
    kind: str, tmp_path: Path
) -> None:
    """As transformers writes them, with all tensors of what reads images or sound.

    Text settings are in a section or, in older files of Qwen2-VL and 2.5, at the top.
    """
    transformers = pytest.importorskip("transformers", reason="needs the extra `reference`")
    architecture, made, options, vision = MULTIMODAL[kind]
    alone = make_checkpoint(tmp_path / "alone", made, vocab=VOCAB, **options)
    text = json.loads((alone / "config.json").read_text())
    kind = kind.partition(" ")[0]
    settings = {"architectures": [architecture], "model_type": kind, "vision_config": vision}
    if kind == "gemma4":
        settings["audio_config"] = GEMMA4_AUDIO
    if kind.startswith("qwen2"):
        settings = {**text, **settings}
    else:
        text["model_type"] = {"qwen3_vl": "qwen3_vl_text"}.get(kind, text["model_type"])
        tied = text.pop("tie_word_embeddings")  # the whole model's key decides, whatever the text's
        text["tie_word_embeddings"] = not tied
        settings |= {"text_config": text, "tie_word_embeddings": tied}
    text_part, whole = tmp_path / "text", tmp_path / "source"
    shutil.copytree(alone, text_part)
    (text_part / "config.json").write_text(json.dumps(settings))
    weights = load_file(alone / "model.safetensors")
    stored = {
        name
        if kind.startswith("qwen2")
        else name.replace("model.", "model.language_model.", 1): values
        for name, values in weights.items()
    }
    save_file(stored, text_part / "model.safetensors")
    shutil.copytree(text_part, whole)
    getattr(transformers, architecture).from_pretrained(text_part).save_pretrained(whole)
    assert len(load_file(whole / "model.safetensors")) > len(stored) + 10
    expected = transformers_logits(whole, TOKENS)
    assert_same(opened(export(tmp_path, "fp32")).step(0, TOKENS), expected)
    if kind.startswith("qwen2"):
        (whole / "config.json").write_text(json.dumps(settings))
        again = export_checkpoint(
            whole, tmp_path / "older", quantization=Quantization.parse("fp32")
        )
        assert_same(opened(again).step(0, TOKENS), expected)


SAVED_AGAIN = {
    **{kind: CASES[kind] for kind in ("granite hybrid", "lfm2", "qwen3.5")},
    # transformers pads the layers' numbers: 04, 10.
    "gemma4 of 11 layers": case_of("gemma4_text", kinds="SSSSFSSSSSF"),
    "gemma4, heads of one size": case_of("gemma4_text", config={"global_head_dim": 16}),
}


@pytest.mark.reference
@pytest.mark.parametrize("kind", SAVED_AGAIN)
def test_a_checkpoint_that_transformers_has_saved_again_is_read(kind: str, tmp_path: Path) -> None:
    """As fine-tunes are: it writes other keys and values than published files have."""
    transformers = pytest.importorskip("transformers", reason="needs the extra `reference`")
    saved = SAVED_AGAIN[kind]
    source = make_checkpoint(tmp_path / "source", saved.kind, vocab=VOCAB, **saved.options)
    published = json.loads((source / "config.json").read_text())
    model = getattr(transformers, published["architectures"][0]).from_pretrained(source)
    model.save_pretrained(source)
    assert json.loads((source / "config.json").read_text()).keys() - published.keys()
    expected = transformers_logits(source, TOKENS)
    assert_same(opened(export(tmp_path, "fp32")).step(0, TOKENS), expected)


def test_one_rotation_for_all_layers_scales_those_without_a_window(tmp_path: Path) -> None:
    """In `rope_parameters` as in the older `rope_scaling`."""
    file = make_checkpoint(tmp_path, "olmo3", vocab=VOCAB) / "config.json"
    older = json.loads(file.read_text())
    one = {key: value for key, value in older.items() if key not in ("rope_scaling", "rope_theta")}
    one["rope_parameters"] = {**older["rope_scaling"], "rope_theta": older["rope_theta"]}
    tables = []
    for config in (older, one):
        family = family_of(ModelConfig(config, file))
        assert isinstance(family, GatedDecoder)
        tables.append(family.rotaries)
    assert tables[0].keys() == tables[1].keys()
    for name, expected in tables[0].items():
        np.testing.assert_array_equal(tables[1][name].table.frequencies, expected.table.frequencies)


@pytest.mark.reference
def test_olmo_3_is_read_as_transformers_5_writes_it(tmp_path: Path) -> None:
    """With a rotation for each kind of layer, and the usual layers where none are named."""
    rotations = {
        "full_attention": {**YARN, "rope_theta": 2e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"rope_theta": None, "rope_scaling": None, "layer_types": None}
    source = make_checkpoint(tmp_path / "source", "olmo3", layers=4, vocab=VOCAB)
    edit_config(source, **config, rope_parameters=rotations)
    model = export(tmp_path, "fp32")
    assert_same(opened(model).step(0, TOKENS), transformers_logits(source, TOKENS))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_learned_positions_are_an_input(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "source", kind)
    graph = onnx.load(export(tmp_path, "int8-32").graph_file, load_external_data=False).graph
    inputs = [value.name for value in graph.input if not value.name.startswith("past_")]
    assert inputs == ["input_ids", "attention_mask", "position_ids"]
