"""Prepacked graphs compute the same, are checked at every start, and are made again if damaged."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from specops.models.convert import Quantization, export_checkpoint
from specops.models.errors import ModelError
from specops.models.graph import weight_cache
from specops.models.graph.prepack import prepack
from specops.models.graph.weight_cache import prepacked_graph
from specops.system import checksums
from tests.checkpoints import make_llama_checkpoint
from tests.passes import Passes
from tests.waiting import is_locked, printed


def logits(graph: Path) -> np.ndarray:
    passes = Passes(graph)
    return np.concatenate([passes.step(0, list(range(1, 15))), passes.step(0, [9])])


def entries_of(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def test_weights_in_use_come_first_and_originals_of_packed_ones_last(
    tiny_pair: Path, tmp_path: Path
) -> None:
    graph = tiny_pair / "target" / "onnx" / "fp32" / "model.onnx"
    prepacked = prepacked_graph(graph, "tiny", tmp_path, print)
    used = weight_cache.used_bytes(prepacked.parent) - prepacked.stat().st_size
    model = onnx.load(prepacked, load_external_data=False).graph
    packed, unused, tables = 0, 0, {"embedding.weight"}
    for tensor in model.initializer:
        if not (entries := entries_of(tensor)):
            continue
        begin, length = int(entries["offset"]), int(entries["length"])
        blobs = [value for key, value in entries.items() if key.startswith("prepacked_")]
        for blob in blobs:
            offset, size, _ = blob.partition("|")[2].split(";")
            assert int(offset) % 4096 == 0
            assert int(offset) + int(size) <= used
        rare = blobs or tensor.name in tables  # of tables a pass reads the rows of its tokens
        assert begin >= used if rare else begin + length <= used
        packed += len(blobs)
        unused += length if rare else 0
        tables.discard(tensor.name)
    assert not tables
    assert packed == sum(node.op_type == "MatMul" for node in model.node) > 8
    assert used + unused <= prepacked.with_name("model.onnx.data").stat().st_size


@pytest.fixture
def graph(tiny_pair: Path) -> Path:
    return tiny_pair / "draft" / "onnx" / "int8-128" / "model.onnx"


@pytest.fixture(scope="module")
def made(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the prepacked form of `graph`."""
    cache = tmp_path_factory.mktemp("made")
    prepacked_graph(tiny_pair / "draft" / "onnx" / "int8-128" / "model.onnx", "tiny", cache, print)
    return cache


@pytest.fixture
def first(graph: Path, made: Path, tmp_path: Path) -> Path:
    """The prepacked graph in the test's own cache, `tmp_path`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "prepacked" / f"tiny-{weight_cache.graph_key(graph)}" / "model.onnx"


def test_it_is_made_once(graph: Path, tmp_path: Path, real_child: None) -> None:
    said: list[str] = []
    first = prepacked_graph(graph, "tiny", tmp_path, said.append)
    changed = first.stat().st_mtime_ns
    assert prepacked_graph(graph, "tiny", tmp_path, said.append) == first
    assert first.stat().st_mtime_ns == changed
    assert said[0] == "laying out the weights of tiny for this processor"
    assert said[1:] == [f"reading {first.parent}: 0 %"]
    assert not list((tmp_path / "prepacked").glob(".*"))


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "prepacked.json", "used"])
def test_a_damaged_cache_is_made_again(
    graph: Path, first: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = logits(first)
    damaged = first.with_name(file)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = prepacked_graph(graph, "tiny", tmp_path, print)
    assert "is damaged" in caplog.text
    digests = json.loads(again.with_name("prepacked.json").read_text())
    assert checksums.checksums(sorted(again.parent.glob("model.onnx*"))) == digests
    assert np.array_equal(logits(again), before)


def test_another_processor_or_runtime_gets_its_own(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {weight_cache.graph_key(graph)}
    monkeypatch.setattr(weight_cache, "_processor", lambda: "another")
    keys.add(weight_cache.graph_key(graph))
    monkeypatch.setattr(weight_cache.session, "VERSION", "0.0")
    keys.add(weight_cache.graph_key(graph))
    assert len(keys) == 3


@pytest.mark.parametrize("room", [0, 150_000, 1 << 40])
def test_what_has_no_room_is_checked_and_let_go(
    graph: Path,
    first: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    monkeypatch.setattr(checksums, "_PIECE", 1 << 14)
    sizes = [path.stat().st_size for path in sorted(first.parent.glob("model.onnx*"))]
    assert sum(sizes) > 200_000
    let_go: list[int] = []

    def advise(handle: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        let_go.append(length)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(weight_cache, "page_cache_room", lambda: room)
    assert prepacked_graph(graph, "tiny", first.parents[2], print) == first
    used = weight_cache.used_bytes(first.parent)
    assert sum(let_go) == sum(sizes) - min(room, used)
    assert ("has room for" in caplog.text) == (room < used)
    with first.with_name("model.onnx.data").open("r+b") as file:  # in the last piece
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))
    assert prepacked_graph(graph, "tiny", first.parents[2], print) == first
    assert "is damaged" in caplog.text


def test_an_export_and_a_copy_or_link_of_it_share_one(
    graph: Path, first: Path, tmp_path: Path
) -> None:
    later: Callable[[str, str], object] = shutil.copy  # with other times
    for name, place in (("link", os.link), ("copy", shutil.copy2), ("later", later)):
        other = tmp_path / name
        shutil.copytree(graph.parent, other, copy_function=place)
        assert prepacked_graph(other / graph.name, name, tmp_path, print) == first
    assert len(list((tmp_path / "prepacked").iterdir())) == 1


def test_other_weights_never_share_one(graph: Path, tmp_path: Path) -> None:
    """Even if graph, sizes and times are equal; a graph without a manifest counts by its path."""
    keys = {weight_cache.graph_key(graph)}
    for name in ("one", "two", "other"):
        shutil.copytree(graph.parent, tmp_path / name)
        manifest = tmp_path / name / "specops.json"
        if name == "other":
            content = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({**content, "source_digest": "sha256:0"}))
        else:
            manifest.unlink()
        keys.add(weight_cache.graph_key(tmp_path / name / graph.name))
    assert len(keys) == 4


def test_outdated_ones_and_leftovers_are_removed(
    graph: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = prepacked_graph(graph, "tiny-draft", tmp_path, print)
    leftover = tmp_path / "prepacked" / ".tiny-0123456789abcdef.partial"
    leftover.mkdir()
    (leftover / "model.onnx").touch()
    made = []
    for days, processor in ((30, "first"), (6, "second"), (20, "third")):
        monkeypatch.setattr(weight_cache, "_processor", lambda text=processor: text)
        path = prepacked_graph(graph, "tiny", tmp_path, print)
        then = time.time() - days * 24 * 3600
        os.utime(path.parent, (then, then))
        made.append(path)
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(weight_cache, "_processor", lambda: "fourth")
        made.append(prepacked_graph(graph, "tiny", tmp_path, print))
        assert [path.exists() for path in made] == [False, True, True, True]
        assert prepacked_graph(graph, "tiny", tmp_path, print) == made[-1]  # makes nothing
    assert [path.exists() for path in made] == [False, True, False, True]
    assert f"removing {made[0].parent}" in caplog.text
    assert other.exists()
    assert not leftover.exists()


def test_where_nothing_can_be_written_the_message_says_what_to_do(
    graph: Path, tmp_path: Path
) -> None:
    (tmp_path / "prepacked").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"prepacked cannot be written .*: set SPECOPS_CACHE_DIR"):
        prepacked_graph(graph, "tiny", tmp_path, print)


@pytest.mark.usefixtures("real_child")
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'x.data')", "x.data cannot be written"),
        ("MemoryError()", "ran out of memory while"),
    ],
)
def test_a_full_disk_or_memory_is_a_line_that_says_what_to_do(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "import specops.models.graph.tiles as tiles\n"
        f"def fail(*args, **options):\n    raise {raised}\n"
        "tiles.write_tiles = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=said) as caught:
        prepacked_graph(graph, "tiny", tmp_path, print)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not list((tmp_path / "prepacked").iterdir())


def test_a_child_that_outlives_its_parent_keeps_the_lock(graph: Path, tmp_path: Path) -> None:
    """The next process waits for it and does not clear what it is writing."""
    child = tmp_path / "child"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        "import specops.models.graph.tiles as tiles\n"
        "def stop(*args, **options):\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(os.getpid()))\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    os._exit(1)\n"
        "tiles.write_tiles = stop\n"
    )
    code = (
        "from pathlib import Path\n"
        "from specops.models.graph.weight_cache import prepacked_graph\n"
        f"prepacked_graph(Path({str(graph)!r}), 'tiny', Path({str(tmp_path)!r}), print)\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    parent = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert parent.returncode == -signal.SIGKILL

    try:
        assert is_locked(tmp_path / "prepacked")
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("killed_children")
def test_a_process_that_is_killed_is_taken_for_too_little_memory(
    graph: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match="SIGKILL ended the process, most likely because memory ran out"
    ):
        prepacked_graph(graph, "tiny", tmp_path, print)


def test_a_file_that_is_no_graph_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelError, match=r"model\.onnx is not an ONNX graph") as caught:
        prepacked_graph(tmp_path / "model.onnx", "odd", tmp_path, print)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "prepacked").iterdir())


def somebodys_operator(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QuickGelu")
    node.op_type, node.domain = "GatedSomething", "somebody"


def weights_at(place: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        next(entry for entry in tensor.external_data if entry.key == "location").value = place

    return change


def packed_form(model: onnx.ModelProto) -> None:
    """ONNX Runtime would use these bytes as a packed weight without a check."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    tensor.external_data.add(key="prepacked_0", value="key|0;64;0")


def constant_elsewhere(model: onnx.ModelProto) -> None:
    value = TensorProto(data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="../outside")
    model.graph.node.append(helper.make_node("Constant", [], ["odd"], value=value))


def missing_attribute(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    del node.attribute[:]


def cut_short(model: onnx.ModelProto) -> None:
    product = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    tensor = next(item for item in model.graph.initializer if item.name == product.input[1])
    next(entry for entry in tensor.external_data if entry.key == "offset").value = str(1 << 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (somebodys_operator, r"cannot be run: node .*silu \(somebody\.Gat.*; use another export"),
        (weights_at("../outside"), r"weight .*: '\.\./outside' is not a file"),
        (weights_at("/etc/hostname"), r"weight .*: '/etc/hostname' is not a file"),
        (weights_at("missing"), r"missing is missing: copy or download"),
        (packed_form, "its entry prepacked_0 does not say where it lies"),
        (constant_elsewhere, r"'\.\./outside' is not a file in the folder"),
        (missing_attribute, r"model\.onnx is damaged .*; use another export"),
        (cut_short, r"model\.onnx is damaged .*; use another export"),
    ],
)
def test_a_bad_graph_is_refused_with_a_reason(
    graph: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(graph.parent, folder)
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match=message):
        prepack(folder / "model.onnx", tmp_path / "out")


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    graph: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no lock, so replicas that start together read beside each other."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(weight_cache, "locked", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    assert prepacked_graph(graph, "tiny", tmp_path, print) == first


def test_a_process_that_waited_takes_what_the_other_one_made(
    graph: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for the lock, the other process makes the graph."""
    said: list[str] = []
    lock = weight_cache.locked

    @contextmanager
    def after_another(root: Path, waiting: Callable[[], None]) -> Iterator[int]:
        waiting()
        with lock(root) as handle:
            shutil.copytree(first.parent, root / first.parent.name, dirs_exist_ok=True)
            yield handle

    monkeypatch.setattr(weight_cache, "locked", after_another)
    found = prepacked_graph(graph, "tiny", tmp_path / "here", said.append)
    assert found == tmp_path / "here" / "prepacked" / first.parent.name / "model.onnx"
    assert [text.split()[0] for text in said] == ["waiting", "reading"]


def test_weights_do_not_become_anonymous_memory(tmp_path: Path) -> None:
    """A process that loads prepacked weights has far less anonymous memory than their size."""
    source = make_llama_checkpoint(
        tmp_path / "wide", hidden=1024, layers=4, heads=8, kv_heads=2, ffn=4096, vocab=320
    )
    # Where ONNX Runtime computes it lays weights out once more before it takes what is saved: one
    # product at a time has a copy, and the allocator may keep the room of some. Of few layers that
    # would be half of all weights.
    for quant, share in (("int8-128", 0.25), ("fp32", 0.5)):
        quantization = Quantization.parse(quant)
        model = export_checkpoint(source, tmp_path / quant, quantization=quantization)
        prepacked = prepacked_graph(model.graph_file, f"wide-{quant}", tmp_path, print)
        weights = model.graph_file.with_name("model.onnx.data").stat().st_size
        code = f"""
from pathlib import Path
from specops.runtime.session import open_session, share_threads
share_threads(2)
def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))
before = anonymous()
session = open_session(Path({str(prepacked)!r}))
print(anonymous() - before)
"""
        assert weights > 25e6
        assert int(printed(code)) * 1024 < share * weights
