"""Damages files and reads them: a reader must succeed or raise one of our errors.

A case is a seed, which chooses what is damaged and how. Any other exception of a reader, a warning,
or more than `LONGEST` seconds of CPU is a finding, reported with its seed.
"""

import json
import random
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

from specops.models.convert import Quantization, export_checkpoint
from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.families import family_of
from specops.models.convert.model_config import ModelConfig
from specops.models.errors import ModelError
from specops.models.folder import ModelFolder
from specops.models.graph import prepack as prepacking
from specops.models.layout import normalize
from specops.models.sentencepiece import SentencePieceError, make_tokenizer
from specops.models.state_dict import read_state_dict
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.tokenizer import Tokenizer, TokenizerError
from tests.checkpoints import make_llama_checkpoint
from tests.fuzz import gguf_files
from tests.fuzz.cases import FindingError, seeds
from tests.fuzz.damage import damaged
from tests.models.test_sentencepiece import write_model
from tests.models.test_state_dict import archive, storage, tensor

LONGEST = 20  # seconds
MAX_MEMORY = 4 << 30  # of addresses; the largest tables of positions take 1.5 GB of them
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
<|user|>{{ message.content | trim }}{% elif loop.first %}{{ raise_exception('no') }}{% else %}
{%- set ns = namespace(x=1) %}{% generation %}{{ message['content'][:-1] | tojson(indent=2) }}
{% endgeneration %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}{{ {'a': 1}.items() | list }}"""


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        make: writes whole files into a folder.
        files: names of files, of which a case damages one.
        read: reads the folder.
        errors: allowed exceptions.
        damaged: returns damaged content, of a file's content, random numbers, and whether it is
            JSON.
    """

    make: Callable[[Path], object]
    files: str
    read: Callable[[Path], object]
    errors: type[Exception] | tuple[type[Exception], ...]
    damaged: Callable[[bytes, random.Random, bool], bytes] = damaged


# -- readers ----------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> None:
    make_llama_checkpoint(folder, hidden=32, heads=2, layers=1, ffn=32, vocab=300, shards=2)
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 3]}')


def _read_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    family = family_of(ModelConfig(checkpoint.config, checkpoint.config_file))
    shapes = family.tensors()
    checkpoint.expect(shapes, family.ignored_tensors)
    checkpoint.bos_and_eos(family.shape.vocab_size)
    for name, shape in shapes.items():
        if len(shape) == 1:
            checkpoint.vector(name)
        else:
            checkpoint.matrix(name).columns(0, 2)


def _graph(folder: Path) -> None:
    source = folder.parent / "graph-source"
    make_llama_checkpoint(source, hidden=64, heads=2, layers=1, ffn=64, vocab=300)
    export_checkpoint(source, folder, quantization=Quantization.parse("int4-32"))


def _gguf_graph(folder: Path) -> None:
    made = folder.parent / "made"
    made.mkdir()
    gguf_files.make(made)
    export_checkpoint(made / gguf_files.FILE, folder, quantization=None)


def _read_graph(folder: Path) -> None:
    """Prepare the graph up to the point where ONNX Runtime would load it."""
    with mock.patch.object(prepacking, "load", side_effect=ModelError("far enough")):
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


READERS = {
    "safetensors": Reader(
        _checkpoint,
        "model-00001-of-00002.safetensors model.safetensors.index.json config.json "
        "generation_config.json",
        _read_checkpoint,
        ModelError,
    ),
    "gguf": Reader(
        gguf_files.make, gguf_files.FILE, gguf_files.read, ModelError, gguf_files.damaged
    ),
    "graph": Reader(_graph, "model.onnx", _read_graph, ModelError),
    "gguf's graph": Reader(_gguf_graph, "model.onnx", _read_graph, ModelError),
    "description": Reader(
        _described, "specops.json genai_config.json", _read_descriptions, ModelError
    ),
    "state dict": Reader(
        _state_dict, "net.pt", lambda folder: read_state_dict(folder / "net.pt"), ModelError
    ),
    "layout": Reader(
        _state_dict_folder,
        "pytorch_model.bin.index.json config.json pytorch_model-1.bin",
        lambda folder: normalize(folder, folder.parent / "arranged"),
        ModelError,
    ),
    "tokenizer": Reader(_tokenizer, "tokenizer.json", _read_tokenizer, TokenizerError),
    "sentencepiece": Reader(
        lambda folder: write_model(folder, 700),
        "tokenizer.model",
        make_tokenizer,
        SentencePieceError,
    ),
    "template": Reader(
        _templates, "chat_template.jinja tokenizer_config.json", _read_template, ChatTemplateError
    ),
}


# -- running ---------------------------------------------------------------------------------------


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
    """A reader and its files; each case restores the damaged file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._reader, self._folder = name, READERS[name], folder / "files"
        self._folder.mkdir(parents=True)
        self._reader.make(self._folder)
        with suppress(self._reader.errors):  # the graph's reader stops with an error of ours
            self._reader.read(self._folder)

    def run(self, seed: int) -> bool:
        """Damage a file as the seed says and read; return whether the reader accepted it.

        Raises:
            FindingError: the reader neither read the file nor said what is wrong with it.
        """
        chance = random.Random(f"{self.name} {seed}")
        file = self._folder / chance.choice(self._reader.files.split())
        whole = file.read_bytes()
        file.write_bytes(self._reader.damaged(whole, chance, file.suffix == ".json"))
        try:
            with _within(LONGEST), warnings.catch_warnings(action="error"):
                self._reader.read(self._folder)
        except self._reader.errors:
            return False
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise FindingError(f"{self.name}, seed {seed}: {file.name}: {error!r}") from error
        finally:
            file.write_bytes(whole)
            shutil.rmtree(self._folder.parent / "arranged", ignore_errors=True)
        return True


def run(name: str, cases: int, seconds: float, first: int) -> str:
    """Damage a reader's files; return what was read.

    Raises:
        FindingError: see `Subject.run`; to believe a file's huge sizes is one, too.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, most))
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(name, Path(folder))
        read = [subject.run(seed) for seed in seeds(cases, seconds, first)]
    return f"{len(read):,} damaged files, {sum(read):,} of them read all the same"
