"""Stand-ins for images that cannot be pulled: Debian's own programs in the same places.

The Python image becomes Debian bookworm, whose Python is 3.11 as well; Prometheus' image becomes
Debian's Prometheus, with BusyBox for `wget` as in the original. There is none for Grafana, which
Debian does not have. What is downloaded is kept in .cache/e2e.
"""

from __future__ import annotations

import ast
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.engine import Engine, apt_install
from tests.stack.support import ROOT, run, tool

PREFIX = "specops-e2e"  # of everything that is made in the engine, so that it can be removed again
PYTHON = f"{PREFIX}/python"
PROMETHEUS = f"{PREFIX}/prometheus"
_DEBIAN = f"{PREFIX}/debian"
_SUITE = "bookworm"
_CACHE = ROOT / ".cache" / "e2e"
_NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale")
_DOWNLOAD_SECONDS = 900
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

_PYTHON_FILE = f"""\
FROM {_DEBIAN}
COPY ca-certificates.crt {_CA_BUNDLE}
COPY pip.conf /etc/pip.conf
# As in the original, `python` and `pip` are in /usr/local and may install there.
RUN python3 -m venv /usr/local
CMD ["python"]
"""
_PROMETHEUS_FILE = f"""\
FROM {_DEBIAN}
COPY prometheus /bin/prometheus
COPY busybox /bin/wget
RUN install -d -o 65534 -g 65534 /prometheus && install -d /etc/prometheus
USER 65534
ENTRYPOINT ["/bin/prometheus"]
"""


def can_be_had(engine: Engine, image: str) -> bool:
    """Whether the engine has an image, or has just pulled it."""
    present = engine.docker("image", "inspect", image, check=False).returncode == 0
    return present or engine.docker("pull", "--quiet", image, check=False).returncode == 0


def make_python(engine: Engine) -> None:
    """Make `PYTHON`, which finds packages where pip finds them on this machine."""
    _import_debian(engine)
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        settings, bundle = _pip_settings()
        (context / "pip.conf").write_text(settings)
        shutil.copyfile(bundle, context / "ca-certificates.crt")
        _build(engine, PYTHON, _PYTHON_FILE, context)


def make_prometheus(engine: Engine) -> None:
    """Make `PROMETHEUS`."""
    _import_debian(engine)
    _build(engine, PROMETHEUS, _PROMETHEUS_FILE, _CACHE / "prometheus")


def _build(engine: Engine, tag: str, text: str, context: Path) -> None:
    (context / "Dockerfile").write_text(text)
    engine.docker("build", "--tag", tag, context)


def _import_debian(engine: Engine) -> None:
    archive = _CACHE / f"{_SUITE}.tar"
    if not archive.exists():
        _bootstrap(archive)
    if engine.docker("image", "inspect", _DEBIAN, check=False).returncode:
        engine.docker("import", archive, _DEBIAN)


def _bootstrap(archive: Path) -> None:
    """Download what both images consist of: `archive`, and beside it Prometheus and BusyBox."""
    if os.geteuid() != 0:
        pytest.skip("NO CONTAINER WAS TESTED: images cannot be pulled, stand-ins take root")
    if tool("debootstrap") is None:
        apt_install("debootstrap")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        root = Path(folder) / "root"
        packages = "ca-certificates,python3,python3-venv"
        options = ("--variant=minbase", f"--include={packages}")
        _checked("debootstrap", *options, _SUITE, root, *_mirror())
        _checked("chroot", root, "apt-get", "update", "-qq")
        get = "cd /opt && apt-get download -qq prometheus busybox-static"
        _checked("chroot", root, "sh", "-c", get)
        extracted = Path(folder) / "extracted"
        for package in (root / "opt").glob("*.deb"):
            _checked("dpkg-deb", "--extract", package, extracted)
            package.unlink()
        (_CACHE / "prometheus").mkdir(exist_ok=True)
        shutil.copy(extracted / "usr/bin/prometheus", _CACHE / "prometheus")
        shutil.copy(extracted / "bin/busybox", _CACHE / "prometheus")
        for name in _NOT_NEEDED:
            shutil.rmtree(root / name)
        partial = Path(folder) / "archive.tar"
        _checked("tar", "--create", "--file", partial, "--directory", root, ".")
        partial.rename(archive)


def _checked(*command: object) -> None:
    finished = run(*command, timeout=_DOWNLOAD_SECONDS)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr


def _mirror() -> list[str]:
    """The mirror that this machine's apt uses; empty where it has none of Debian."""
    query = ("--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian")
    if tool("apt-get") is None:
        return []
    return run("apt-get", "indextargets", *query).stdout.split()[:1]


def _pip_settings() -> tuple[str, str]:
    """This machine's pip configuration for use in an image, and its file of trusted certificates.

    Folders of this machine are left out: there are none of them in the image.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value)).split()
    bundle = settings.pop("cert", [ssl.get_default_verify_paths().cafile or _CA_BUNDLE])
    lines = ["[global]", f"cert = {_CA_BUNDLE}"]
    for name, values in settings.items():
        if kept := [value for value in values if not value.startswith(("/", "file:", "~", "."))]:
            lines.append(f"{name} = {' '.join(kept)}")
    return "\n".join(lines) + "\n", bundle[0]
