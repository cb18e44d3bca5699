"""Conversions: one for each content, made by one process at a time, never used half-made."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from specops.models import conversions, layout
from specops.models import prepare as preparing
from specops.models.layout import parts_of
from specops.models.prepare import ModelError, prepare
from specops.system.folders import locked
from tests.checkpoints import make_llama_checkpoint
from tests.waiting import is_locked, wait

QUANT = "int8-32"
# Prepares a checkpoint; prints the reports and then the path of the conversion.
SCRIPT = """
import sys
from pathlib import Path
from specops.models import prepare as preparing
preparing._REPORT_SECONDS = 0
source, cache = map(Path, sys.argv[1:])
say = lambda text: print(text, flush=True)
print(preparing.prepare(source, "int8-32", name="x", cache_dir=cache, report=say).path)
"""


# The converter stops itself once, after its first percentage: there is more to do for certain.
STOPS = """
import builtins, os, signal
written = print

def print_and_stop(*text, **options):
    written(*text, **options)
    if str(text[-1]).endswith(" %"):
        builtins.print = written
        os.kill(os.getpid(), signal.SIGSTOP)

builtins.print = print_and_stop
"""


def convert(source: Path, cache: Path, quant: str = QUANT) -> tuple[Path, list[str]]:
    """Return the conversion's path and the reports."""
    said: list[str] = []
    return prepare(source, quant, name="x", cache_dir=cache, report=said.append).path, said


def start(source: Path, cache: Path, own: Path | None = None) -> subprocess.Popen[str]:
    """Convert in another process, which loads the `sitecustomize` of a folder `own`."""
    command = [sys.executable, "-c", SCRIPT, str(source), str(cache)]
    env = {**os.environ, "PYTHONPATH": str(own)} if own else None
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
    )


def stopped_child(process: subprocess.Popen[str]) -> int:
    """Wait for the first percentage, after which the converter stops itself; return its number."""
    assert process.stdout is not None
    assert any(line.endswith(" %\n") for line in process.stdout)  # reads up to the first one
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    (child,) = map(int, children.split())
    status = Path(f"/proc/{child}/status")
    # It writes first: a SIGCONT between the two would leave it stopped for ever.
    wait("it has stopped itself", lambda: "State:\tT" in status.read_text())
    return child


def converted(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "converted").iterdir() if path.is_dir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_llama_checkpoint(tmp_path / "source")


@pytest.fixture
def stops(tmp_path: Path) -> Path:
    """A folder whose `sitecustomize` stops the converter."""
    (folder := tmp_path / "stops").mkdir()
    (folder / "sitecustomize.py").write_text(STOPS)
    return folder


# -- killed ------------------------------------------------------------------------------------


def test_a_conversion_that_is_killed_is_made_again_whole(
    source: Path, stops: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    with start(source, cache, stops) as process:
        stopped_child(process)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    (leftover,) = converted(cache)
    assert leftover.endswith(".partial")
    with caplog.at_level(logging.INFO):
        path, said = convert(source, cache)
    assert f"converting {source} to {QUANT}" in said
    assert converted(cache) == [path.name]
    assert f"{leftover}, which an interrupted process left" in caplog.text
    undisturbed, _ = convert(source, tmp_path / "other")
    for file in {*undisturbed.iterdir()} - {undisturbed / "verified"}:
        assert (path / file.name).read_bytes() == file.read_bytes()


def test_a_converter_that_outlives_its_parent_keeps_the_lock(
    source: Path, stops: Path, tmp_path: Path
) -> None:
    """The next process waits for it and does not clear what it is writing."""
    cache = tmp_path / "cache"
    with start(source, cache, stops) as process:
        child = stopped_child(process)
        os.kill(process.pid, signal.SIGKILL)

    try:
        assert is_locked(cache / "converted")
    finally:
        os.kill(child, signal.SIGCONT)
    path, _ = convert(source, cache)
    assert converted(cache) == [path.name]


# -- at the same time --------------------------------------------------------------------------


def test_of_two_processes_one_converts_and_the_other_waits(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ExitStack() as stack:
        with locked(cache / "converted"):
            processes = [stack.enter_context(start(source, cache)) for _ in range(2)]
            for process in processes:
                assert process.stdout.readline().startswith("waiting for another process")
        said = [process.communicate()[0].splitlines() for process in processes]
    converting = [any(line.startswith("converting") for line in lines) for lines in said]
    assert sorted(converting) == [False, True]
    (name,) = converted(cache)
    assert [lines[-1] for lines in said] == [str(cache / "converted" / name)] * 2


# -- outdated ----------------------------------------------------------------------------------


def change(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def version(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Go on as another version of the service, with another format."""
    monkeypatch.setattr(conversions, "FORMAT_VERSION", number)


def age(path: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


@pytest.mark.parametrize("second", ["format", "checkpoint"])
def test_two_versions_in_turns_on_one_cache_convert_once_each(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """A rolling update, of the service or of the model in its image."""
    cache, made = tmp_path / "cache", []
    config = (source / "config.json").read_text()
    for turn in range(4):
        if second == "format":
            version(monkeypatch, 100 + turn % 2)
        else:
            (source / "config.json").write_text(config)
            if turn % 2:
                change(source)
        made += [text for text in convert(source, cache)[1] if text.startswith("converting")]
        for folder in (cache / "converted").glob("*-int8-32"):
            age(folder, 8)
    assert len(made) == 2
    assert len(converted(cache)) == 2


def test_a_comment_in_the_converter_converts_nothing_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = convert(source, tmp_path / "cache")
    package = tmp_path / "specops"
    shutil.copytree(Path(conversions.__file__).parents[1] / "models", package / "models")
    for file in package.rglob("*.py"):
        file.write_text(file.read_text() + "# a comment")
    monkeypatch.setattr(conversions, "__file__", str(package / "models" / "conversions.py"))
    assert convert(source, tmp_path / "cache") == (first, [])


def test_older_generations_go_once_nobody_has_used_them_for_a_week(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "cache"
    namesake = make_llama_checkpoint(tmp_path / "elsewhere" / "source", seed=1)
    (cache / "converted" / "notes").mkdir(parents=True)  # a folder of another kind
    generations = []
    for number in range(100, 105):
        version(monkeypatch, number)
        generations.append(convert(source, cache)[0])
    other, _ = convert(namesake, cache)
    assert all(path.exists() for path in generations)  # used within a week
    for days, path in zip((60, 40, 6, 20, 30), generations, strict=True):
        age(path, days)
    age(other, 90)  # the only one of its checkpoint: no generation of the others
    with caplog.at_level(logging.INFO):
        assert convert(source, cache) == (generations[-1], [])  # a start that makes nothing
    kept = [generations[2], generations[4], other]
    assert converted(cache) == sorted(["notes", *(path.name for path in kept)])
    assert f"removing {generations[0]}: it is outdated" in caplog.text


# -- once --------------------------------------------------------------------------------------


def test_the_same_content_under_another_path_is_converted_once(
    source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first, _ = convert(source, cache)
    shutil.copytree(source, tmp_path / "linked", copy_function=os.link)
    shutil.copytree(source, tmp_path / "copied", copy_function=shutil.copyfile)
    (tmp_path / "symbolic").symlink_to(source)
    for again in ("linked", "copied", "symbolic"):
        assert convert(tmp_path / again, cache) == (first, [])
        # Linking has changed the first one's times, but not its content.
        assert convert(source, cache) == (first, [])


def test_the_digest_follows_every_byte_of_weights_and_configuration(source: Path) -> None:
    found = [parts_of(source).digest(), parts_of(source).digest()]
    for name in ("model.safetensors", "config.json"):
        content = bytearray((source / name).read_bytes())
        content[len(content) // 2] ^= 1
        (source / name).write_bytes(content)
        found.append(parts_of(source).digest())
    assert len(set(found)) == len(found) - 1


def test_a_checkpoint_is_read_once_and_that_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_REPORT_SECONDS", 0.0)
    cache = tmp_path / "cache"
    first, said = convert(source, cache)
    read = [text for text in said if text.startswith(f"reading {source}: ")]
    assert read[-1] == f"reading {source}: 100 %"
    assert convert(source, cache) == (first, [])
    monkeypatch.setattr(layout, "_REPORT_SECONDS", 60.0)
    for damage in ("", "[]", '{"a": {"b": 1}}'):
        (cache / "converted" / "sources.json").write_text(damage)
        assert convert(source, cache) == (first, [])


@pytest.mark.parametrize("name", ["model.onnx.data", "checksums.json"])
def test_a_flipped_bit_is_never_served(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    first, _ = convert(source, tmp_path)
    file, times = first / name, (first / name).stat()
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second, said = convert(source, tmp_path)
    assert f"converting {source} to {QUANT}" in said
    assert f"{first} is damaged: making it again" in caplog.text
    assert (second, file.read_bytes()) == (first, content)


def test_a_conversion_is_read_again_after_a_boot(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a crash has damaged may have its old size and time."""
    first, _ = convert(source, tmp_path)
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(conversions, "_BOOT", tmp_path / "boot")
    assert convert(source, tmp_path) == (first, [f"checking {first}"])
    assert convert(source, tmp_path) == (first, [])
    (first / "verified").unlink()
    (first / "verified").mkdir()  # a read-only cache serves what it holds
    assert convert(source, tmp_path) == (first, [f"checking {first}"])


def test_a_tokenizer_is_on_disk_once(source: Path, tmp_path: Path) -> None:
    """And the link to it does not let the next start read the checkpoint again."""
    made, _ = convert(source, tmp_path)
    assert (made / "tokenizer.json").samefile(source / "tokenizer.json")
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout.Parts, "digest", lambda *given: read.append("again"))
        assert convert(source, tmp_path)[0] == made
    assert not read


def test_a_folder_that_cannot_be_written_is_an_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="set SPECOPS_CACHE_DIR to a writable folder"):
        convert(source, tmp_path / "cache")


def test_files_that_only_their_owner_may_read_are_named_with_what_helps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:  # root, as whom the tests may run, reads all
        raise PermissionError(errno.EACCES, "Permission denied", str(source / "model.safetensors"))

    monkeypatch.setattr(preparing, "converted", refuse)
    said = rf"cannot read .*model\.safetensors: run `chmod -R a\+rX {source}`"
    with pytest.raises(ModelError, match=said):
        convert(source, tmp_path)


@pytest.mark.usefixtures("killed_children")
def test_a_killed_converter_means_too_little_memory(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="SIGKILL ended the process, most likely because memory ran out"
    ):
        convert(source, tmp_path / "cache")
