"""Installs the clients into environments of their own below build/clients, as they are pinned.

What is there already stays; a change of a pin installs anew. `make clean` removes all of it.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
PYTHONS = (sys.executable, "python3.12", "python3.11")  # Open WebUI does not run with newer ones
_VERSION = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))"


class MissingError(Exception):
    """Something is missing that is not installed here; the message says what."""


def python(kind: str, pinned: Path = HERE) -> Path:
    """Return the Python of an environment that has what `KIND.txt` in this folder pins."""
    pins = pinned / f"{kind}.txt"
    folder = BUILD / kind
    found = folder / "bin" / "python"
    key = _key(pins)
    if not _is_there(folder, key):
        base = next((path for path in map(shutil.which, PYTHONS) if path and _fits(path)), None)
        if base is None:
            raise MissingError("Python 3.11 or 3.12 is needed: Open WebUI runs with no newer one")
        print(f"Installing {pins.name} into {folder}", flush=True)
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        # The pins are complete. Open WebUI would bring torch, for what is not used here.
        command = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--no-deps", "--requirement", pins], check=True)
        _stamp(folder).write_text(key)
    return found


def npm() -> Path:
    """Return the folder that has drivers.mjs and what package-lock.json pins."""
    folder, source = BUILD / "npm", HERE / "npm"
    key = _key(source / "package-lock.json")
    if not _is_there(folder, key):
        if not (shutil.which("node") and shutil.which("npm")):
            raise MissingError("Node.js 20 or newer with npm is needed (Debian: nodejs npm)")
        print(f"Installing package-lock.json into {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, folder)
        subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
        _stamp(folder).write_text(key)
    shutil.copy(source / "drivers.mjs", folder)  # Node looks for packages beside the file
    return folder


def _fits(path: str) -> bool:
    return subprocess.run([path, "-c", _VERSION], check=False, capture_output=True).returncode == 0


def _key(pins: Path) -> str:
    return f"{BUILD} {hashlib.sha256(pins.read_bytes()).hexdigest()}"


def _stamp(folder: Path) -> Path:
    return folder / ".installed"


def _is_there(folder: Path, key: str) -> bool:
    return _stamp(folder).is_file() and _stamp(folder).read_text() == key
