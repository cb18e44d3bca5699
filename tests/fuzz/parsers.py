"""Damages the files that strangers write, and reads them: an error of ours, or a result.

A case is a seed: it chooses what is damaged and how. Whatever else a reader raises, a
warning too, or that it takes more than `LONGEST` seconds of CPU, is a finding; the seed is told.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from specops.models.convert import ExportError, Quantization, export_checkpoint
from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.families import family_of
from specops.models.convert.model_config import ModelConfig
from specops.models.folder import ModelError, ModelFolder
from specops.models.graph import prepack as prepacking
from specops.models.layout import LayoutError, arrange
from specops.models.sentencepiece import SentencePieceError, make_tokenizer
from specops.models.state_dict import StateDictError, read_state_dict
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.tokenizer import Tokenizer, TokenizerError
from tests.checkpoints import make_llama_checkpoint
from tests.models.test_sentencepiece import write_model
from tests.models.test_state_dict import archive, storage, tensor

LONGEST = 20  # seconds
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        3,
        2**31,
        2**63,
        2**64,
        10**400,
        1e308,
        math.inf,
        math.nan,
        -0.5,
        "",
        "x",
        "../x",
        "\ud800",
        "x" * 5000,
    ),
    *([], {}, [[]], [None], {"": None}, ["x", 1], [-1, 2**62], {"x": {"x": []}}),
]
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
<|user|>{{ message.content | trim }}{% elif loop.first %}{{ raise_exception('no') }}{% else %}
{%- set ns = namespace(x=1) %}{% generation %}{{ message['content'][:-1] | tojson(indent=2) }}
{% endgeneration %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}{{ {'a': 1}.items() | list }}"""


@dataclass(frozen=True)
class Reader:
    """What is read, the files of which one is damaged, and the errors that it may end in."""

    make: Callable[[Path], object]
    files: tuple[str, ...]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]


# -- what is read ----------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> None:
    make_llama_checkpoint(folder, hidden=32, heads=2, layers=1, ffn=32, vocab=300, shards=2)
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 3]}')


def _read_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    family = family_of(ModelConfig(checkpoint.config, checkpoint.config_file))
    shapes = family.tensors()
    checkpoint.expect(shapes, family.ignored_tensors)
    checkpoint.special_tokens()
    for name, shape in shapes.items():
        if len(shape) == 1:
            checkpoint.vector(name)
        else:
            checkpoint.matrix(name).columns(0, 2)


def _graph(folder: Path) -> None:
    source = folder.parent / "graph-source"
    make_llama_checkpoint(source, hidden=64, heads=2, layers=1, ffn=64, vocab=300)
    export_checkpoint(source, folder, quantization=Quantization.parse("int4-32"))


def _read_graph(folder: Path) -> None:
    """Until ONNX Runtime would get it."""
    with mock.patch.object(prepacking, "_optimized", side_effect=ModelError("far enough")):
        prepacking.prepack(folder / "model.onnx", folder.parent / "laid-out")


def _described(folder: Path) -> None:
    _graph(folder)
    decoder = {"filename": "model.onnx", "hidden_size": 64, "num_attention_heads": 2}
    model = {"decoder": decoder, "vocab_size": 300, "context_length": 128, "eos_token_id": [2]}
    (folder / "genai_config.json").write_text(json.dumps({"model": {"bos_token_id": 1, **model}}))


def _read_descriptions(folder: Path) -> None:
    ModelFolder.read(folder, "x")
    ModelFolder.read_genai(folder, "x")


def _state_dict(folder: Path) -> None:
    content = {"a": tensor(storage(), (3, 4), (4, 1)), "b": tensor(storage(), (2, 2), (4, 1), 5)}
    archive(folder / "net.pt", {"model": content, "step": 3})


def _state_dict_folder(folder: Path) -> None:
    make_llama_checkpoint(folder, hidden=16, heads=2, layers=1, ffn=16, vocab=300)
    (folder / "model.safetensors").unlink()
    archive(folder / "pytorch_model-1.bin", {"a": tensor(storage(), (3, 4), (4, 1))})
    index = {"weight_map": {"a": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _tokenizer(folder: Path) -> None:
    make_llama_checkpoint(folder, hidden=16, heads=2, layers=1, ffn=16, vocab=300)


def _read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("The fox, \u00e4 \U0001f98a"))
    for token in range(0, 300, 7):
        tokenizer.spelling(token)


def _templates(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _read_template(folder: Path) -> None:
    template = ChatTemplate.load(folder)
    if template is not None:
        roles = ("user", "assistant", "user")
        template.render([{"role": role, "content": " text "} for role in roles])


READERS: dict[str, Reader] = {
    "safetensors": Reader(
        _checkpoint,
        (
            *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"),
            "generation_config.json",
        ),
        _read_checkpoint,
        (ExportError,),
    ),
    "graph": Reader(_graph, ("model.onnx",), _read_graph, (ModelError,)),
    "description": Reader(
        _described, ("specops.json", "genai_config.json"), _read_descriptions, (ModelError,)
    ),
    "state dict": Reader(
        _state_dict,
        ("net.pt",),
        lambda folder: read_state_dict(folder / "net.pt"),
        (StateDictError,),
    ),
    "layout": Reader(
        _state_dict_folder,
        ("pytorch_model.bin.index.json", "config.json", "pytorch_model-1.bin"),
        lambda folder: arrange(folder, folder.parent / "arranged"),
        (LayoutError, StateDictError),
    ),
    "tokenizer": Reader(_tokenizer, ("tokenizer.json",), _read_tokenizer, (TokenizerError,)),
    "sentencepiece": Reader(
        lambda folder: write_model(folder, 700),
        ("tokenizer.model",),
        make_tokenizer,
        (SentencePieceError,),
    ),
    "template": Reader(
        _templates,
        ("chat_template.jinja", "tokenizer_config.json"),
        _read_template,
        (ChatTemplateError,),
    ),
}


# -- damage ----------------------------------------------------------------------------------------


def damaged(content: bytes, chance: random.Random, *, is_json: bool) -> bytes:
    """The content of a file with something wrong in it, mostly little."""
    if is_json and chance.random() < 0.7:
        value = json.loads(content)
        for _ in range(chance.choice([1, 1, 2, 5])):
            value = _replaced(value, chance)
        if chance.random() < 0.02:
            return b'{"a":' * 100_000
        return json.dumps(value).encode()
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        _damage(found, chance)
    return bytes(found)


def _damage(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    if chance.random() < 0.6:  # the front, where headers are
        at = min(at, chance.choice([4, 16, 64, 512, 4096]))
    length = chance.choice([1, 1, 2, 4, 8, 64])
    match chance.randrange(6):
        case 0:
            content[at : at + 1] = bytes([chance.randrange(256)])
        case 1:
            del content[at : at + length]
        case 2:
            content[at:at] = chance.randbytes(length)
        case 3:
            number = chance.choice([0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)])
            content[at : at + 8] = number.to_bytes(8, "little", signed=True)
        case 4:
            start = chance.randrange(len(content) + 1)
            content[at : at + length] = content[start : start + length]
        case 5 if chance.random() < 0.2:
            del content[at:]
        case _ if content:
            at = min(at, len(content) - 1)
            content[at] ^= 1 << chance.randrange(8)


def _replaced(value: Any, chance: random.Random) -> Any:
    """A value with one inside it replaced, doubled or gone."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _replaced(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        if chance.random() < 0.15:
            return value[:place] + value[place + 1 :]
        return [*value[:place], _replaced(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)


# -- running ---------------------------------------------------------------------------------------


class FindingError(AssertionError):
    """A reader did something else than to read or to say what is wrong."""


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} seconds of CPU")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Subject:
    """One reader with its files, which are whole again after each case."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._reader, self._folder = name, READERS[name], folder / "files"
        self._folder.mkdir(parents=True)
        self._reader.make(self._folder)
        with suppress(*self._reader.errors):  # whole files: no finding, or none will be one
            self._reader.read(self._folder)

    def run(self, seed: int) -> bool:
        """Read files that the seed damages; returns whether they could be read.

        Raises:
            FindingError: see there.
        """
        chance = random.Random(f"{self.name} {seed}")
        file = self._folder / chance.choice(self._reader.files)
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, chance, is_json=file.suffix == ".json"))
        try:
            with _within(LONGEST), warnings.catch_warnings(action="error"):
                self._reader.read(self._folder)
        except self._reader.errors:
            return False
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise FindingError(f"{self.name}, seed {seed}: {file.name}: {error!r}") from error
        finally:
            file.write_bytes(whole)
            shutil.rmtree(self._folder.parent / "arranged", ignore_errors=True)
        return True
