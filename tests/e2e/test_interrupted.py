"""After loading was killed at any moment, or met a full disk, the next start is as the first.

A process loads a model from the hub and generates tokens. Its changes to the cache folder are
counted; before one of them all its processes are killed. `KILLS=all` tries each change.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.checkpoints import make_llama_checkpoint
from tests.models.disks import small_disk
from tests.models.hub_server import Hub, folder_files, serving
from tests.models.tiny_repo import REPO

pytestmark = pytest.mark.e2e
# Loads and generates; with KILL_SERVING it is killed between two tokens.
LOAD = """
import os, signal, sys
from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.models.errors import ModelError
from specops.request import GenerationRequest, SamplingParams
try:
    engine = Engine.load(Settings.from_env(os.environ))
except (ModelError, ConfigError) as error:
    sys.exit(f"error: {error}")
request = GenerationRequest(
    request_id="x", prompt_tokens=engine.encode("the fox"), max_new_tokens=8,
    sampling=SamplingParams(), ignore_eos=True,
)
for output in engine.generate(request):
    for piece in output.pieces:
        print(piece.token, flush=True)
        if os.environ.get("KILL_SERVING"):
            os.kill(os.getpid(), signal.SIGKILL)
"""
# Notes each change to the cache folder, in every process; kills all of them before one.
WATCH = """
import os, signal, sys
cache, notes = os.environ["SPECOPS_CACHE_DIR"], os.environ["NOTES"]
last = int(os.environ.get("KILL_AT", "-1"))
changes = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        changed = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    elif changed := event in changes:
        path = arguments[0]
    if changed and isinstance(path, str | bytes | os.PathLike) and os.fspath(path) != notes:
        path = os.fsdecode(path)
        if path.startswith(cache):
            handle = os.open(notes, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            count = os.read(handle, 1 << 20).count(b"\\n")
            if count == last:
                os.killpg(0, signal.SIGKILL)
            os.write(handle, f"{event} {path.removeprefix(cache)}\\n".encode())
            os.close(handle)
sys.addaudithook(watch)
"""


# Folders of the cache in the order in which they fill, and the bytes left on a full disk.
ROOM = {"hub": 4 << 20, "converted": 1 << 20, "prepacked": 1 << 20, "costs": 0}
# Contents that differ from one start to the next: times of files, and measured times of passes.
VARYING = {"sources.json", "verified", "costs"}


@dataclass(frozen=True)
class Start:
    """A process that loaded: its exit status, its generated tokens and its stderr."""

    status: int
    tokens: list[str]
    said: str


class Loader:
    """Loads the model of a hub into cache folders."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self._hub, self._folder = hub, folder

    def start(self, cache: Path, **variables: str) -> Start:
        """Load and generate in a process group of its own, which the variables may kill."""
        self._notes(cache).unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", LOAD],
            env={
                **{name: text for name, text in os.environ.items() if "SPECOPS" not in name},
                "SPECOPS_TARGET": REPO,
                "SPECOPS_QUANT": "int4-32",
                "SPECOPS_CACHE_DIR": str(cache),
                "SPECOPS_KV_TOKENS": "256",
                "HF_ENDPOINT": self._hub.url,
                "HF_TOKEN_PATH": os.devnull,
                "PYTHONPATH": str(self._folder),
                "NOTES": str(self._notes(cache)),
                **variables,
            },
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )
        return Start(done.returncode, done.stdout.split(), done.stderr)

    def _notes(self, cache: Path) -> Path:
        return self._folder / f"{cache.name}.notes"

    @cached_property
    def whole(self) -> tuple[Start, list[str], dict[str, bytes]]:
        """An undisturbed start, the folder of each of its changes, and the files that it leaves."""
        cache = self._folder / "whole"
        start = self.start(cache)
        assert start.status == 0, start.said
        assert len(start.tokens) == 8
        changes = self._notes(cache).read_text().splitlines()
        return start, [change.partition("/")[2].split("/")[0] for change in changes], kept(cache)

    def require_whole(self, cache: Path) -> None:
        """A start gives the same tokens and files as an undisturbed one."""
        start, _, files = self.whole
        again = self.start(cache)
        assert (again.status, again.tokens) == (0, start.tokens), again.said
        assert kept(cache) == files


def kept(cache: Path) -> dict[str, bytes]:
    """The files in a cache folder, without varying contents and without keys in their names.

    The keys of prepacked graphs come from the times of the files that they are made of. An empty
    lock stays where its owner was killed, until somebody needs it again.
    """
    return {
        re.sub("[0-9a-f]{16}", "KEY", "/".join(path.parts)): b""
        if {*path.parts} & VARYING
        else file.read_bytes()
        for file in sorted(cache.rglob("*"))
        if file.is_file() and not (file.suffix == ".lock" and not file.stat().st_size)
        for path in (file.relative_to(cache),)
    }


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    folder = tmp_path_factory.mktemp("loader")
    (folder / "sitecustomize.py").write_text(WATCH)
    model = make_llama_checkpoint(
        folder / "tiny", hidden=256, heads=4, layers=2, ffn=512, vocab=2000, shards=2
    )
    with serving(Hub({REPO: folder_files(model)})) as hub:
        yield Loader(hub, folder)


@pytest.mark.parametrize("phase", ROOM)
def test_a_start_that_is_killed_leaves_nothing_half_made(
    loader: Loader, tmp_path: Path, phase: str
) -> None:
    _, changes, _ = loader.whole
    points = [number for number, changed in enumerate(changes) if changed == phase]
    chosen = points if os.environ.get("KILLS") == "all" else [points[-1], points[len(points) // 2]]
    for point in chosen:
        cache = tmp_path / str(point)
        killed = loader.start(cache, KILL_AT=str(point))
        assert (killed.status, killed.tokens) == (-signal.SIGKILL, [])
        loader.require_whole(cache)


def test_a_process_that_is_killed_while_it_generates_leaves_all_whole(
    loader: Loader, tmp_path: Path
) -> None:
    killed = loader.start(tmp_path / "cache", KILL_SERVING="1")
    assert (killed.status, len(killed.tokens)) == (-signal.SIGKILL, 1)
    loader.require_whole(tmp_path / "cache")


@pytest.mark.parametrize("phase", ROOM)
def test_a_full_disk_is_reported_and_leaves_nothing_half_made(
    loader: Loader, tmp_path: Path, phase: str
) -> None:
    start, changes, _ = loader.whole
    with small_disk(tmp_path / "disk", "64m") as disk:
        cache = disk / "cache"
        loader.start(cache, KILL_AT=str(changes.index(phase)))
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as stream:
            free = shutil.disk_usage(disk).free
            os.posix_fallocate(stream.fileno(), 0, max(1, free - ROOM[phase]))
        failed = loader.start(cache)
        assert "Traceback" not in failed.said
        if phase == "costs":  # the next start measures passes again
            assert (failed.status, failed.tokens) == (0, start.tokens), failed.said
        else:
            assert failed.status == 1
            *_, last = failed.said.splitlines()
            assert last.startswith("error: ")
            assert "SPECOPS_CACHE_DIR" in last
        filler.unlink()
        loader.require_whole(cache)
