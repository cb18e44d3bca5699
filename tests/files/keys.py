"""The keys that llama.cpp reads from a GGUF, what it does without them, and what is done here.

Which keys llama.cpp reads comes from its source: for every file, for vocabularies, and for the
architectures that are supported here. Which of them are read here is observed while files of these
architectures are read. A key without a line in `KEYS` is a failure, and so is a line that says
otherwise than what was observed: nothing that has a meaning may be passed over unnoticed.
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gguf import GGMLQuantizationType as Kind

from specops.models.convert import ExportError
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import tokenizer_files
from specops.models.convert.model_config import Entries
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.files.packages import llama_cpp
from tests.files.report import Row
from tests.models.convert.gguf.files import SIZES, write_gguf

NOT_READ = "not read: "
_REFUSED = "refused unless "
_TAKEN = "taken"
_GEMMA4 = f"{_TAKEN} for `gemma4`; else {_REFUSED}"
_GRANITES = f"{_TAKEN} for `granite` and `granitehybrid`; else {_REFUSED}"
_NEEDED = "the file is refused"
_NAMES = "names alone"
_FILL_IN = f"{NOT_READ}fill-in tokens are found by their texts"
_NO_EXPERTS = f"{NOT_READ}files with experts are refused"
_OTHERS = f"{NOT_READ}other architectures'"
_EMBEDDERS = f"{NOT_READ}embedding models' tokenizers are refused"


def _alike(form: str, names: str, without: str, here: str) -> dict[str, tuple[str, str]]:
    """The same line for several keys: `form` with each of the names in place of its `*`."""
    return dict.fromkeys([form.replace("*", name) for name in names.split()], (without, here))


# By key: what llama.cpp does without it, and what is done here.
KEYS: dict[str, tuple[str, str]] = {
    "general.architecture": (_NEEDED, _TAKEN),
    "general.type": ("model", f"{_REFUSED}model"),
    "general.name": ("none", f"{NOT_READ}a model is named after its file"),
    "general.file_type": ("the type of most weights", "taken, for the name of the weights"),
    **_alike("general.sampling.*", "temp top_k top_p min_p penalty_repeat",
             "llama.cpp's own", "taken as a default of requests"),
    **_alike("general.sampling.*", "sequence xtc_probability xtc_threshold penalty_last_n "
             "mirostat mirostat_tau mirostat_eta",
             "llama.cpp's own", f"{NOT_READ}the service has no such sampling"),
    "split.count": ("one file", "must agree with the names of the shards"),
    "split.no": ("0", "must agree with the names of the shards"),
    "split.tensors.count": ("not checked", "must agree with the tensors"),
    "{arch}.context_length": (_NEEDED, _TAKEN),
    "{arch}.embedding_length": (_NEEDED, _TAKEN),
    "{arch}.block_count": (_NEEDED, _TAKEN),
    "{arch}.feed_forward_length": ("0", f"{_TAKEN}; needed; of `gemma4` a list, too"),
    "{arch}.attention.head_count": ("0", f"{_TAKEN}; needed"),
    "{arch}.attention.head_count_kv": ("`head_count`",
        "taken; of `lfm2` and `granitehybrid` a list, in which layers without attention have 0; of "
        "`gemma4` a list, too"),
    **_alike("{arch}.ssm.*", "conv_kernel state_size group_count time_step_rank inner_size",
             _NEEDED, "taken for `qwen35` and `granitehybrid`, which alone have them"),
    "{arch}.full_attention_interval": ("4", "taken for `qwen35`, which alone has it"),
    "{arch}.attention.recurrent_layers": ("all but each `full_attention_interval`th",
        "taken for `qwen35`, which alone has it"),
    "{arch}.shortconv.l_cache": (_NEEDED, "taken for `lfm2`, which alone has it"),
    **_alike("{arch}.*", "attention.shared_kv_layers embedding_length_per_layer_input",
             "0 (`gemma4`)", "taken for `gemma4`"),
    "{arch}.attention.key_length": ("`embedding_length` / `head_count`", _TAKEN),
    "{arch}.attention.value_length": ("`embedding_length` / `head_count`", f"{_REFUSED}the keys'"),
    "{arch}.attention.layer_norm_rms_epsilon": (_NEEDED, _TAKEN),
    "{arch}.attention.layer_norm_epsilon": (_NEEDED, _TAKEN),
    "{arch}.attention.causal": ("true", f"{_REFUSED}true"),
    "{arch}.attention.scale": ("1 / √`key_length`", f"{_GRANITES}0"),
    "{arch}.attention.temperature_scale": ("0 (`mistral3`)", "taken for `mistral3`, with YaRN"),
    "{arch}.logit_scale": (f"{_NEEDED} (`granite`, `cohere2`)",
        "taken for `granite`, `granitehybrid` and `cohere2`; else refused unless 1"),
    "{arch}.residual_scale": ("1", f"{_GRANITES}1"),
    "{arch}.embedding_scale": ("1", f"{_GRANITES}1"),
    "{arch}.final_logit_softcapping": ("30 (`gemma2`), none (others)",
        "taken for `gemma2` and `gemma4`; else refused unless 0"),
    "{arch}.attn_logit_softcapping": ("50 (`gemma2`), none (others)",
        "taken for `gemma2`; else refused unless 0"),
    "{arch}.pooling_type": ("none", f"{_REFUSED}none"),
    "{arch}.expert_count": ("0", f"{_REFUSED}0"),
    "{arch}.nextn_predict_layers": (
        "0",
        "taken, 1 at most, for `qwen3` and `qwen35`: the last layer is the MTP block; else refused "
        "unless 0",
    ),
    "{arch}.embedding_length_out": ("`embedding_length`", f"{_REFUSED}the same"),
    "{arch}.attention.key_length_swa": ("`key_length`", f"{_GEMMA4}the same"),
    "{arch}.attention.value_length_swa": ("`value_length`", f"{_GEMMA4}the same"),
    "{arch}.rope.dimension_count_swa": ("`dimension_count`", f"{_GEMMA4}the same"),
    "{arch}.attention.sliding_window": (
        "no window",
        "taken for `gemma2`, `gemma3`, `gemma4`, `olmo2`, `exaone4`, `cohere2`, `phi3` and, as "
        "Mistral's, for `llama` and `starcoder2`, where llama.cpp has none; else refused",
    ),
    "{arch}.attention.sliding_window_pattern": ("2 (`gemma2`), 6 (`gemma3`), 4 (others)",
        f"{_TAKEN}, a list of layers too"),
    "{arch}.rope.freq_base": ("10,000", _TAKEN),
    "{arch}.rope.freq_base_swa": ("10,000 (`gemma3`, `gemma4`), `freq_base` (others)",
        "taken for `gemma3` and `gemma4`; else refused unless the same"),
    "{arch}.rope.dimension_count": ("`key_length`",
        "taken for `phi2`, `phi3` and `glm4`; else refused unless that"),
    "{arch}.rope.dimension_sections": ("none",
        "`glm4` and `ernie4_5`: refused unless 0; else for images, which are not taken"),
    "{arch}.rope.scaling.type": ("linear",
        "none, linear, yarn, longrope; refused if it is another"),
    "{arch}.rope.scaling.factor": ("`rope.scale_linear`", _TAKEN),
    "{arch}.rope.scale_linear": ("1", _TAKEN),
    "{arch}.rope.scaling.attn_factor": ("1", "taken for longrope; else refused unless 1"),
    "{arch}.rope.scaling.original_context_length": ("`context_length`",
        "taken for longrope, which needs it, and for yarn"),
    **_alike("{arch}.rope.scaling.yarn_*", "beta_fast beta_slow",
             "32 and 1; read for `mistral3`", "taken for yarn"),
    "{arch}.rope.scaling.yarn_log_multiplier": ("0; read for `mistral3`", "taken for yarn"),
    "{arch}.rope.scaling.finetuned": ("true (`granite`, `granitehybrid`)",
        "taken for these: whether they rotate"),
    "{arch}.rope.scaling.alpha": ("none", _OTHERS),
    "{arch}.vocab_size": ("the tokens", f"{NOT_READ}the embedding's rows count"),
    **_alike("{arch}.*", "deepstack_mapping n_deepstack_layers",
             "none", f"{NOT_READ}for images, which are not taken"),
    **_alike("{arch}.*", "expert_used_count expert_group_count expert_group_used_count "
             "expert_shared_feed_forward_length expert_feed_forward_length "
             "interleave_moe_layer_step leading_dense_block_count", "0", _NO_EXPERTS),
    **_alike("{arch}.*", "features_length posnet.embedding_length posnet.block_count "
             "convnext.embedding_length convnext.block_count "
             "classifier.pooling_type classifier.output_labels", "none", _OTHERS),
    "tokenizer.chat_template": ("a guess", _TAKEN),
    "tokenizer.ggml.model": (_NEEDED, "gpt2, llama, gemma4; refused if it is another"),
    "tokenizer.ggml.pre": ("default", "taken, all but `whitespace`"),
    "tokenizer.ggml.tokens": (_NEEDED, _TAKEN),
    "tokenizer.ggml.token_type": ("all ordinary", _TAKEN),
    "tokenizer.ggml.scores": ("all 0", _TAKEN),
    "tokenizer.ggml.merges": (_NEEDED, f"{_TAKEN}; those without their tokens are skipped"),
    "tokenizer.ggml.bos_token_id": ("llama: 1; gpt2: 11, none for glm4",
        "taken; 11 only if it is a special token"),
    "tokenizer.ggml.eos_token_id": ("llama: 2; gpt2: 11",
        "taken; 11 only if it is a special token"),
    "tokenizer.ggml.eot_token_id": ("by its text", "taken; others by their text too"),
    "tokenizer.ggml.eom_token_id": ("by its text", "taken; others by their text too"),
    "tokenizer.ggml.unknown_token_id": ("llama: 0", "taken; else the first of its type"),
    "tokenizer.ggml.padding_token_id": ("none", "taken for the template"),
    **_alike("tokenizer.ggml.fim_*_token_id", "pad rep sep",
             "by its text", "taken as end tokens, as in llama.cpp"),
    **_alike("tokenizer.ggml.*_token_id", "fim_pre fim_suf fim_mid prefix suffix middle",
             "by its text", _FILL_IN),
    "tokenizer.ggml.add_bos_token": ("true for llama, gemma4 and some of `pre`",
        f"{_TAKEN}; always true for gemma4, as there"),
    "tokenizer.ggml.add_eos_token": ("false", _TAKEN),
    "tokenizer.ggml.add_space_prefix": ("true for llama", f"{_TAKEN} for llama, as there"),
    "tokenizer.ggml.suppress_tokens": ("none", f"{NOT_READ}llama.cpp does not use it, either"),
    **_alike("tokenizer.ggml.*", "token_type_count precompiled_charsmap remove_extra_whitespaces "
             "seperator_token_id mask_token_id add_sep_token normalizer.lowercase "
             "normalizer.strip_accents", "none", _EMBEDDERS),
}  # fmt: skip
_ARCHITECTURES = (  # the files of llama.cpp's source
    *("llama", "mistral3", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "gemma2", "gemma3", "smollm3"),
    *("granite", "olmo2", "exaone4", "ernie4-5", "glm4", "cohere2", "starcoder2", "phi2", "phi3"),
    *("gpt2", "gemma4", "granite-hybrid", "lfm2", "qwen35"),
)
_LONG = {"type": "longrope"} | {
    f"{kind}_factor": np.linspace(1.0, 2.0, 32).tolist() for kind in ("short", "long")
}
_WIDE = {"head_dim": 64, "global_head_dim": 128}


def compare() -> list[Row]:
    """One row: keys that llama.cpp reads, and those with a true line."""
    read, observed = _llama_cpps_keys(), set(_observed())
    wrong = [key for key in read if key not in KEYS]
    wrong += [
        key for key, (_, here) in KEYS.items() if here.startswith(NOT_READ) == (key in observed)
    ]
    wrong += [key for key in KEYS if key not in read]
    return [Row("keys", len(read), len(read) - len(wrong), 0, ", ".join(wrong))]


def table(rows: list[Row]) -> str:
    """All keys, as Markdown."""
    del rows
    lines = ["| key | llama.cpp without it | here |", "|---|---|---|"]
    lines += [f"| `{key}` | {without} | {here} |" for key, (without, here) in KEYS.items()]
    return "\n".join(lines) + "\n"


# -- what llama.cpp reads --------------------------------------------------------------------------


def _llama_cpps_keys() -> list[str]:
    source = llama_cpp() / "src"
    names = dict(re.findall(r'{ (LLM_KV_\w+),\s+"([^"]+)"', _text(source / "llama-arch.cpp")))
    models, vocabulary = _text(source / "llama-model.cpp"), _text(source / "llama-vocab.cpp")
    parts = [
        _function(models, "void llama_model_base::load_hparams("),
        _function(models, "void llama_model_base::load_swa_pattern("),
        _function(vocabulary, "void llama_vocab::impl::load("),
        _text(source / "llama-model-loader.cpp"),
        *(_text(source / "models" / f"{name}.cpp") for name in _ARCHITECTURES),
    ]
    found = [
        names[one] for part in parts for one in re.findall(r"LLM_KV_\w+", part) if one in names
    ]
    found += re.findall(r'"(general\.sampling\.\w+)"', models)  # for llama-server
    found += [names[f"LLM_KV_{key}"] for key in ("TOKENIZER_CHAT_TEMPLATE", "GENERAL_TYPE")]
    return list(dict.fromkeys(key.replace("%s", "{arch}") for key in found))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _function(source: str, start: str) -> str:
    at = source.index(start)
    return source[at : source.index("\n}\n", at)]


# -- what is read here -----------------------------------------------------------------------------

_LOOK_UPS = [(Entries, method) for method in ("__contains__", "number", "text", "flag")]
_LOOK_UPS += [(Metadata, method) for method in ("integer", "listed", "raw")]


def _observed() -> Iterator[str]:
    """The keys that are looked up in files of all architectures and of llama.cpp's vocabularies."""
    seen: set[str] = set()

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def look_up(self: Metadata, key: str, *rest: Any, **named: Any) -> Any:
            seen.add(key)
            return method(self, key, *rest, **named)

        return look_up

    with contextlib.ExitStack() as stack:
        for reader, method in _LOOK_UPS:
            look_up = watched(getattr(reader, method))
            stack.enter_context(mock.patch.object(reader, method, look_up))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for file in _made(Path(folder)):
            GgufCheckpoint(file).write_texts(Path(folder))
        for file in (llama_cpp() / "models").glob("ggml-vocab-*.gguf"):
            try:
                tokenizer_files(Metadata(read_header(file).metadata, file))
            except ExportError:
                continue  # a kind that is refused
    yield from seen
    yield "split.no"  # of every shard's own header


def _made(folder: Path) -> Iterator[Path]:
    """A small file of each architecture."""
    long_rope = {"rope_scaling": _LONG, "original_max_position_embeddings": 64}
    options: dict[str, dict[str, Any]] = {
        "phi3": {"config": long_rope},
        "gemma4_text": {"layers": 5, "config": _WIDE},
    }
    for kind, family in FAMILIES.items():
        if family.gguf:
            sizes = {name: SIZES[name] for name in family.keys}
            source = make_checkpoint(folder / kind, kind, **{**sizes, **options.get(kind, {})})
            yield write_gguf(source, folder / f"{kind}.gguf", lambda _: Kind.Q8_0)
