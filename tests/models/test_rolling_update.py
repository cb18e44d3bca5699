"""A rolling update: two versions of the service, as real processes, share one cache folder.

Each version is a copy of the package with a conversion format of its own, as a release has that
changes what the converter writes.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import specops
from tests.checkpoints import make_llama_checkpoint
from tests.loopback import HOST, free_port
from tests.waiting import PATIENCE, answers, started

pytestmark = pytest.mark.e2e
FIRST_FORMAT = 1001
KEY = re.compile(r"-[0-9a-f]{16}-")  # in the name of a conversion's folder
BODY = {"prompt": "the same prompt", "max_new_tokens": 8, "temperature": 0}


class Versions:
    """Versions of the service by their numbers; all of them serve one checkpoint from one cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = make_llama_checkpoint(folder / "model")
        self.cache = folder / "cache"

    def _package(self, number: int) -> Path:
        """A folder with this version's copy of the package."""
        path = self._folder / f"v{number}"
        if not path.exists():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(Path(specops.__file__).parent, path / "specops", ignore=leave)
            contract = path / "specops" / "models" / "contract.py"
            text, found = re.subn(
                r"^FORMAT_VERSION = \d+$",
                f"FORMAT_VERSION = {FIRST_FORMAT + number}",
                contract.read_text(encoding="utf-8"),
                flags=re.MULTILINE,
            )
            assert found == 1
            contract.write_text(text, encoding="utf-8")
        return path

    @contextmanager
    def serving(self, number: int) -> Iterator[tuple[str, str]]:
        """Serve with a version; yield its address, and what it logged until it was ready."""
        port = free_port()
        inherited = {
            name: text for name, text in os.environ.items() if not name.startswith("SPECOPS_")
        }
        variables = {
            "PYTHONPATH": str(self._package(number)),
            "SPECOPS_MODEL": "custom",
            "SPECOPS_TARGET": str(self._source),
            "SPECOPS_QUANT": "int8-32",
            "SPECOPS_DRAFTER": "none",
            "SPECOPS_CACHE_DIR": str(self.cache),
            "SPECOPS_PORT": str(port),
        }
        url, path = f"http://{HOST}:{port}", self._folder / "log"
        command, env = [sys.executable, "-m", "specops", "serve"], inherited | variables
        with started(command, path, lambda: answers(f"{url}/health"), env=env, seconds=300):
            yield url, path.read_text(encoding="utf-8")

    def conversions(self) -> dict[str, tuple[int, int]]:
        """By name each conversion that there is, and what changes if it is made again."""
        graphs = self.cache.glob("converted/[!.]*/model.onnx")
        return {
            graph.parent.name: (graph.stat().st_ino, graph.stat().st_mtime_ns) for graph in graphs
        }


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


def answer(url: str) -> str:
    response = httpx.post(f"{url}/generate", json=BODY, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    text: str = response.json()["generated_text"]
    return text


def test_two_versions_share_a_cache(versions: Versions) -> None:
    """Each converts once; what is in use stays, and what nobody used for a week goes."""
    converted = versions.cache / "converted"
    with versions.serving(1) as (first, log):
        assert "converting " in log
        text, made = answer(first), versions.conversions()
        (own,) = made
        for key, days in (("0" * 16, 8), ("1" * 16, 6)):  # of earlier versions
            older = shutil.copytree(converted / own, converted / KEY.sub(f"-{key}-", own))
            os.utime(older, (time.time() - days * 24 * 3600,) * 2)
        with versions.serving(2) as (second, other):
            assert "converting " in other
            assert answer(second) == answer(first) == text  # whichever version laid weights out
        found = versions.conversions()
        assert found.items() >= made.items()
        assert len(found) == 3
        assert KEY.sub(f"-{'0' * 16}-", own) not in found
        with versions.serving(2) as (second, other):
            assert "converting " not in other
            assert answer(second) == answer(first) == text
    with versions.serving(1) as (first, log):
        assert "converting " not in log
        assert answer(first) == text
    assert versions.conversions() == found
