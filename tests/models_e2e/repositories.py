"""The repositories on the hub that presets and benchmarks name, with random weights.

They are of models and draft heads. `configurations.json` has the config.json of each. The weights
lie in the same kinds of files: safetensors (one or several), with or without the prefix of the
class, or torch's own. Layers can be left out; the rest of a configuration stays true.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import (
    gemma4_shapes,
    gpt2_shapes,
    granite_hybrid_shapes,
    lfm2_shapes,
    opt_shapes,
    phi3_shapes,
    qwen2_shapes,
    qwen35_shapes,
    relative_shapes,
    write_checkpoint,
)
from tests.eagle_heads import eagle_shapes
from tests.models.graph.published_graph import write_published
from tests.random_weights import RandomWeights, Shapes, write_safetensors
from tests.text import published_tokenizers as tokenizers

Config = dict[str, Any]
_WHOLE_ATTENTION = ("full_attention", "attention")
PHI3_GRAPH = "phi3-mini-4k-instruct-cpu-int4-rtn-block-32-acc-level-4.onnx"


class Published(ABC):
    """A repository.

    Attributes:
        config: its config.json.
        shapes: the shapes of a configuration's tensors, by their stored names.
    """

    config: Config
    shapes: Callable[[Config], Shapes]

    @abstractmethod
    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the repository into `folder`; a model has so many layers, or all its own.

        `multimodal`: a multimodal model whole, and not its text part alone.
        """


@dataclass(frozen=True)
class Head(Published):
    """An EAGLE-3 head of some bfloat16 tensors and two of integers."""

    config: Config
    shapes: Callable[[Config], Shapes] = eagle_shapes

    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the head, which always has one layer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        shapes, rows = self.shapes(self.config), self.config["draft_vocab_size"]
        chosen = np.arange(rows) * self.config["vocab_size"] // rows
        integers = {
            "d2t": chosen - np.arange(rows),
            "t2d": np.isin(np.arange(self.config["vocab_size"]), chosen),
        }
        tensors = RandomWeights(0, "bfloat16").of(shapes)
        write_safetensors(folder / "model.safetensors", shapes, "bfloat16", tensors, integers)


@dataclass(frozen=True)
class Repository(Published):
    """A model.

    Attributes:
        config: its config.json.
        shapes: the shapes of a configuration's tensors, by their stored names.
        tokenizer: writes its tokenizer's files.
        shards: number of safetensors files; 0: one file of torch, pytorch_model.bin.
        generation: its generation_config.json.
        within: the class of the multimodal model whose text part `config` and `shapes` are.
    """

    config: Config
    shapes: Callable[[Config], Shapes]
    tokenizer: Callable[[Path, int], None]
    shards: int = 1
    generation: Config | None = None
    within: str = ""

    def write(self, folder: Path, layers: int | None, *, multimodal: bool = False) -> None:
        """Write the model into `folder`, with this number of layers; None: all layers."""
        config = dict(self.config)
        if layers is not None:
            if kinds := config.get("layer_types"):  # up to the first with attention to all tokens
                first = next(i for i, kind in enumerate(kinds) if kind in _WHOLE_ATTENTION)
                layers = max(layers, first + 1)
                config["layer_types"] = kinds[:layers]
                config |= {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in config else {}
            config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
        shapes = self.shapes(config)
        if multimodal and self.within:
            config, shapes = _multimodal(self.within, config, shapes)
        if self.shards:
            write_checkpoint(
                folder, config, shapes, seed=0, shards=self.shards, tokenizer=self.tokenizer
            )
        else:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
            self.tokenizer(folder, config["vocab_size"])
            save_state_dict(folder / "pytorch_model.bin", shapes, config["torch_dtype"])
        if self.generation:
            (folder / "generation_config.json").write_text(json.dumps(self.generation))


def _multimodal(architecture: str, text: Config, shapes: Shapes) -> tuple[Config, Shapes]:
    """The model around a text part: with one layer of all that reads images and sound.

    Names and shapes of its tensors are transformers' own.
    """
    import torch  # noqa: PLC0415 - heavy
    import transformers  # noqa: PLC0415 - heavy

    kind = text["model_type"].removesuffix("_text")
    vision = {"num_hidden_layers": 1, "depth": 1, "out_hidden_size": text["hidden_size"]}
    sections = {"text_config": text, "vision_config": vision, "audio_config": {}}
    if kind == "gemma4":
        sections["audio_config"] = {"num_hidden_layers": 1}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **deepcopy(sections))
        model = getattr(transformers, architecture)(config)
    part, dtype = "model.language_model.", text["torch_dtype"]
    around = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith((part, "lm_head."))
    }
    renamed = {
        name.replace("model.", part, 1) if name.startswith("model.") else name: shape
        for name, shape in shapes.items()
    }
    tied = text["tie_word_embeddings"]
    settings = {"architectures": [architecture], "torch_dtype": dtype, "tie_word_embeddings": tied}
    return {**settings, "model_type": kind, **sections}, {**around, **renamed}


def save_state_dict(file: Path, shapes: Shapes, dtype: str) -> None:
    """Have torch save random weights of these shapes."""
    import torch  # noqa: PLC0415 - heavy

    drawn = RandomWeights(0, dtype).of(shapes)
    tensors = {name: torch.from_numpy(array) for name, array in zip(shapes, drawn, strict=True)}
    torch.save(tensors, file)


def write_phi3_graph(folder: Path, layers: int) -> None:
    """Write Microsoft's layout for onnxruntime-genai: one graph, int4 in blocks of 32.

    The weights are those of our converter; operators and their order are the model builder's.
    """
    source, made = folder / "checkpoint", folder / "made"
    REPOSITORIES["microsoft/Phi-3-mini-4k-instruct"].write(source, layers)
    export_checkpoint(source, made, quantization=Quantization.parse("int4-32-rtn"))
    shutil.rmtree(source)
    write_published(made / "model.onnx", folder / PHI3_GRAPH, packed=True)
    for name in ("tokenizer.json", "config.json"):
        if (made / name).exists():
            (made / name).rename(folder / name)
    shutil.rmtree(made)
    decoder = {"filename": PHI3_GRAPH, "num_hidden_layers": layers}
    special = {"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000}
    model = {"type": "phi3", "context_length": 4096, "vocab_size": 32064, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": {**model, **special}}))


# -- the published files ---------------------------------------------------------------------------


def _qwen35_shapes(config: Config) -> Shapes:
    """The text part, and the MTP block: a layer with attention behind two norms and a product."""
    hidden, last = config["hidden_size"], config["full_attention_interval"] - 1
    shapes, layer = qwen35_shapes(config), f"model.layers.{last}."
    block = {
        f"mtp.layers.0.{name.removeprefix(layer)}": shape
        for name, shape in shapes.items()
        if name.startswith(layer)
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    block |= {f"mtp.{norm}.weight": (hidden,) for norm in norms}
    return shapes | block | {"mtp.fc.weight": (hidden, 2 * hidden)}


def _llama_tokenizer(folder: Path, vocab: int) -> None:
    tokenizers.written(tokenizers.llama)(folder, vocab)
    (folder / "tokenizer.model").write_bytes(b"SentencePiece's own, which is not needed")


# By model_type; that of Llama's other relatives is `relative_shapes`.
_SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "gemma4_text": gemma4_shapes,
    "gpt2": gpt2_shapes,
    "granitemoehybrid": granite_hybrid_shapes,
    "lfm2": lfm2_shapes,
    "opt": partial(opt_shapes, prefix=""),  # names lack the class's prefix
    "phi3": phi3_shapes,
    "qwen2": qwen2_shapes,
    "qwen3_5_text": _qwen35_shapes,
}
_WITHIN = {
    "gemma4_text": "Gemma4ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
}
_CODER = {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643}
_GENERATION: dict[str, Config] = {
    "microsoft/Phi-4-mini-instruct": {"bos_token_id": 199999, "eos_token_id": [200020, 199999]},
    "Qwen/Qwen2.5-0.5B-Instruct": {"bos_token_id": 151643, "eos_token_id": [151645, 151643]},
    "Qwen/Qwen2.5-Coder-0.5B": _CODER,
    "Qwen/Qwen2.5-Coder-1.5B": _CODER,
    "microsoft/Phi-3-mini-4k-instruct": {"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007]},
}
_TOKENIZERS = {  # by the beginning of a name
    "TinyLlama/": _llama_tokenizer,
    "JackFram/": _llama_tokenizer,
    "HuggingFaceTB/SmolLM2": tokenizers.written(tokenizers.smollm2),
    "Qwen/Qwen2.5-Coder": tokenizers.written(tokenizers.qwen2_coder),
    "Qwen/": tokenizers.written(tokenizers.qwen2),
    "google/gemma-3": tokenizers.written(tokenizers.llama),
    "google/gemma-4": tokenizers.written(tokenizers.gemma3),
    "ibm-granite/": tokenizers.written(tokenizers.starcoder2),
    "bigcode/": tokenizers.written(tokenizers.starcoder2),
    "microsoft/Phi-3": tokenizers.written(tokenizers.phi3),
    "facebook/opt": lambda folder, vocab: tokenizers.write_opt_files(folder),
    "": tokenizers.written(tokenizers.gpt2),
}
_STATE_DICTS = ("JackFram/", "facebook/")  # torch's own files
_SHARDS = {"qwen3": 3, "gemma3_text": 3, "granite": 2, "qwen3_5_text": 2, "granitemoehybrid": 2}
_SHARDS |= {"gemma4_text": 2, "phi3": 2}


def _published(name: str, config: Config) -> Published:
    if "draft_vocab_size" in config:
        return Head(config)
    kind = config["model_type"]
    shapes = _SHAPES.get(kind, relative_shapes)
    if name.startswith("distilbert/"):
        shapes = partial(gpt2_shapes, prefix="transformer.")
    shards = 0 if name.startswith(_STATE_DICTS) else _SHARDS.get(kind, 1)
    return Repository(
        config,
        shapes,
        next(write for begin, write in _TOKENIZERS.items() if name.startswith(begin)),
        shards=2 if "-Coder-" in name else 3 if name.startswith("meta-llama/") else shards,
        generation=_GENERATION.get(name),
        within=_WITHIN.get(kind, ""),
    )


REPOSITORIES: dict[str, Published] = {
    name: _published(name, config)
    for name, config in json.loads(
        Path(__file__).with_name("configurations.json").read_text("utf-8")
    ).items()
}
