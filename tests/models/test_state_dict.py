"""State dicts are read as torch reads them, and no code in the file ever runs."""

import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from specops.models.convert.checkpoint import Checkpoint
from specops.models.layout import normalize, parts_of
from specops.models.prepare import ModelError, prepare
from specops.models.state_dict import read_state_dict
from specops.text.tokenizer import Tokenizer
from tests.checkpoints import make_llama_checkpoint

WEIGHTS = np.arange(12, dtype=np.float32)


class Named:
    """Pickled as a call of `module.name`, which need not exist here."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        self.arguments = arguments


class Global:
    """Pickled as the name alone."""

    def __init__(self, name: str) -> None:
        self.name = name


class Pickler(pickle._Pickler):  # type: ignore[name-defined]  # the one in Python can be extended
    """Writes the description of an archive as torch does, without torch."""

    dispatch = pickle._Pickler.dispatch.copy()  # type: ignore[attr-defined]

    def persistent_id(self, thing: object) -> object:
        return thing.arguments if isinstance(thing, Named) and thing.name == "storage" else None

    def save_name(self, thing: Global) -> None:
        module, _, name = thing.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def save_call(self, thing: Named) -> None:
        self.save_name(Global(thing.name))
        self.save(thing.arguments)
        self.write(pickle.REDUCE)

    dispatch[Global] = save_name
    dispatch[Named] = save_call


def storage(key: str = "0", count: int = 12, kind: str = "torch.FloatStorage") -> Named:
    return Named("storage", "storage", Global(kind), key, "cpu", count)


def tensor(of: Named, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Named:
    nothing: OrderedDict[str, object] = OrderedDict()
    return Named("torch._utils._rebuild_tensor_v2", of, offset, shape, stride, False, nothing)


def archive(
    file: Path,
    content: object,
    data: bytes = WEIGHTS.tobytes(),
    *,
    order: bytes = b"little",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    with zipfile.ZipFile(file, "w", compression) as out:
        with out.open("archive/data.pkl", "w") as stream:
            Pickler(stream, 2).dump(content)
        out.writestr("archive/byteorder", order)
        out.writestr("archive/data/0", data)
    return file


def test_a_tensor_is_a_view_into_its_storage(tmp_path: Path) -> None:
    content = {
        "whole": tensor(storage(), (3, 4), (4, 1)),
        "transposed": tensor(storage(), (4, 3), (1, 4)),
        "part": tensor(storage(), (2, 2), (4, 1), offset=5),
        "number": tensor(storage(), (), (), offset=11),
        "nothing": tensor(storage(), (0, 4), (4, 1)),
        "epoch": 3,
    }
    read = read_state_dict(archive(tmp_path / "a.pt", content))
    matrix = WEIGHTS.reshape(3, 4)
    assert set(read) == {"whole", "transposed", "part", "number", "nothing"}
    np.testing.assert_array_equal(read["whole"], matrix)
    np.testing.assert_array_equal(read["transposed"], matrix.T)
    np.testing.assert_array_equal(read["part"], matrix[1:3, 1:3])
    assert read["number"] == 11
    assert read["nothing"].shape == (0, 4)
    base: Any = read["whole"]
    while not isinstance(base, np.memmap):  # it stays in the file
        base = base.base


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_the_state_dict_of_a_training_checkpoint_is_found(tmp_path: Path, key: str) -> None:
    content = {key: {"module._orig_mod.w": tensor(storage(), (12,), (1,))}, "step": 7}
    assert list(read_state_dict(archive(tmp_path / "a.pt", content))) == ["w"]


@pytest.mark.parametrize(
    "name", ["posix.system", "builtins.eval", "torch.load", "collections.Counter", "os.getcwd"]
)
def test_no_name_but_those_of_tensors_is_resolved(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "run"
    content = {"w": Named(name, f"touch {witness}")}
    with pytest.raises(ModelError, match=f"needs {name}, .*state_dict"):
        read_state_dict(archive(tmp_path / "a.pt", content))
    assert not witness.exists()


@pytest.mark.parametrize(
    "content",
    [
        tensor(storage(), (3, 5), (5, 1)),
        tensor(storage(), (3, 4), (4, 1), offset=1),
        tensor(storage(), (3, 4), (4, -1)),
        tensor(storage(), (3,), (4, 1)),
        tensor(storage(), (2,), (1,), offset=-1),
        tensor(storage(count=13), (13,), (1,)),
        tensor(storage(key="1"), (12,), (1,)),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path, content: Named) -> None:
    with pytest.raises(ModelError, match=r"torch\.save"):
        read_state_dict(archive(tmp_path / "a.pt", {"w": content}))


@pytest.mark.parametrize("content", [{"step": 3}, [1, 2], "text"])
def test_a_file_that_holds_no_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ModelError, match="contains no state dict"):
        read_state_dict(archive(tmp_path / "a.pt", content))


def test_what_is_no_archive_of_torch_is_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "a.pt", {"w": tensor(storage(), (12,), (1,))}
    file.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ModelError, match=r"older than PyTorch 1\.6"):
        read_state_dict(file)
    file.write_bytes(archive(file, content).read_bytes()[:-30])
    with pytest.raises(ModelError, match=r"a\.pt"):
        read_state_dict(file)
    with pytest.raises(ModelError, match="big-endian"):
        read_state_dict(archive(file, {}, order=b"big"))
    with pytest.raises(ModelError, match="compressed"):
        read_state_dict(archive(file, content, compression=zipfile.ZIP_DEFLATED))


# -- layouts -----------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with `net.pt` (of one tensor), its configuration and a tokenizer."""
    source = make_llama_checkpoint(tmp_path / "source")
    folder = tmp_path / "mine"
    folder.mkdir()
    archive(folder / "net.pt", {"w": tensor(storage(), (3, 4), (4, 1))})
    (folder / "net.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


def test_a_state_dict_goes_with_its_configuration(mine: Path) -> None:
    for source in (mine, mine / "net.pt"):
        parts = parts_of(source)
        assert (parts.folder, parts.config) == (mine, mine / "net.json")
        assert parts.state_dicts == (mine / "net.pt",)
    (mine / "net.json").rename(mine / "config.json")
    assert parts_of(mine).config == mine / "config.json"


@pytest.mark.parametrize(("name", "what"), [("gone", "does not exist"), ("net.json", "of file")])
def test_what_is_no_folder_and_no_checkpoint_is_refused(mine: Path, name: str, what: str) -> None:
    with pytest.raises(ModelError, match=f"{name} contains no model: .*{what}.*or org/name"):
        parts_of(mine / name)


def test_what_is_missing_is_named(mine: Path) -> None:
    shutil.copyfile(mine / "net.pt", mine / "other.pt")
    with pytest.raises(ModelError, match=r"several state dicts \(net\.pt, other\.pt\)"):
        parts_of(mine)
    (mine / "net.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        parts_of(mine / "net.pt")
    for file in mine.glob("*.pt"):
        file.unlink()
    with pytest.raises(ModelError, match="contains no model"):
        parts_of(mine)
    (mine / "net.Q4_0.gguf").touch()
    with pytest.raises(ModelError, match=f"name the GGUF file itself, {mine}/net.Q4_0.gguf"):
        parts_of(mine)


def test_the_error_of_the_other_process_reaches_the_caller(
    mine: Path, tmp_path: Path, real_child: None
) -> None:
    shutil.copyfile(mine.parent / "source" / "config.json", mine / "net.json")
    archive(mine / "net.pt", {"w": Named("posix.system", "true")})
    with pytest.raises(ModelError, match=r"needs posix\.system"):
        prepare(mine, "int8-32", name="x", cache_dir=tmp_path / "cache", report=lambda text: None)
    assert os.listdir(tmp_path / "cache" / "converted") == ["sources.json"]


def vocabulary_and_merges(folder: Path) -> list[int]:
    """Write OPT's kind of tokenizer without a tokenizer.json; return the tokens of `add a`."""
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        ["add a to b"], vocab_size=300, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(folder))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return [special.index("</s>"), *tokenizer.encode("add a").ids]


def test_a_tokenizer_is_made_of_vocabulary_and_merges(mine: Path, tmp_path: Path) -> None:
    (mine / "tokenizer.json").unlink()
    expected = vocabulary_and_merges(mine)
    normalize(mine, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "hidden_size": 64}
    assert not any((tmp_path / "out").glob("*.pt"))
    made = Tokenizer.load(tmp_path / "out")
    assert list(made.encode("add a")) == expected
    assert made.decode(expected) == "add a"


def test_a_tokenizer_that_cannot_be_made_is_said(mine: Path, tmp_path: Path) -> None:
    (mine / "tokenizer.json").unlink()
    (mine / "vocab.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        normalize(mine, tmp_path / "out")


def test_state_dicts_in_shards_become_one(mine: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    archive(mine / names[0], {"a": tensor(storage(), (3, 4), (4, 1))})
    archive(mine / names[1], {"b": tensor(storage(), (2,), (1,), offset=6)})
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (mine / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (mine / "net.json").rename(mine / "config.json")
    checkpoint = Checkpoint(mine, parts_of(mine).state_dicts)
    np.testing.assert_array_equal(checkpoint.matrix("a").columns(0, 4), WEIGHTS.reshape(3, 4))
    np.testing.assert_array_equal(checkpoint.vector("b"), WEIGHTS[6:8])


@pytest.mark.parametrize("stale", ["pytorch_model.bin", "model.safetensors"])
def test_an_index_beside_a_whole_file_is_of_other_files(stale: str, mine: Path) -> None:
    whole = mine / "pytorch_model.bin"
    (mine / "net.pt").rename(whole)
    (mine / "net.json").rename(mine / "config.json")
    index = {"weight_map": {"a": stale.replace(".", "-00001-of-00002.")}}
    (mine / f"{stale}.index.json").write_text(json.dumps(index))
    assert parts_of(mine).state_dicts == (whole,)


# -- against torch -----------------------------------------------------------------------------


@pytest.mark.reference
def test_what_torch_saved_is_what_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    floats = ["float64", "float32", "float16", "bfloat16"]
    numbers = torch.arange(15).reshape(5, 3)
    state = {
        name: numbers.to(getattr(torch, name))
        for name in (*floats, "int64", "int32", "int16", "int8", "uint8", "bool")
    }
    state |= {f"{name} view": state[name][1:, ::2] for name in floats}
    state["parameter"] = torch.nn.Parameter(torch.randn(5, 3).t())
    torch.save(OrderedDict(state), tmp_path / "net.pt")
    expected = torch.load(tmp_path / "net.pt", weights_only=True)
    read = read_state_dict(tmp_path / "net.pt")
    assert list(read) == list(expected)
    for name, values in expected.items():
        assert read[name].shape == tuple(values.shape)
        as_read = torch.from_numpy(read[name].astype(np.float32))
        assert torch.equal(as_read, values.detach().float()), name


@pytest.mark.reference
def test_a_state_dict_converts_to_the_same_graph(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    from safetensors.torch import load_file  # noqa: PLC0415

    original = make_llama_checkpoint(tmp_path / "original", dtype="bfloat16")
    mine = tmp_path / "mine"
    mine.mkdir()
    state = load_file(original / "model.safetensors")
    state["model.rotary_emb.inv_freq"] = torch.arange(8)  # a buffer of integers
    name = "model.layers.0.mlp.gate_proj.weight"
    state[name] = state[name].t().contiguous().t()  # the same values, other strides
    torch.save(state, mine / "net.pt")
    shutil.copyfile(original / "config.json", mine / "net.json")
    shutil.copyfile(original / "tokenizer.json", mine / "tokenizer.json")
    graphs = []
    for source in (original, mine / "net.pt"):
        folder = prepare(
            source, "int8-32", name="x", cache_dir=tmp_path, report=lambda detail: None
        )
        graphs.append((folder.path / "model.onnx.data").read_bytes())
    assert graphs[0] == graphs[1]
    assert len(list((tmp_path / "converted").glob("*-int8-32"))) == 2
