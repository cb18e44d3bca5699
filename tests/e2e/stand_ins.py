"""Stand-ins for images that cannot be pulled: Debian's own programs in the same places.

The Python image becomes Debian bookworm, whose Python is 3.11 as well; Prometheus' image becomes
Debian's Prometheus, with BusyBox for `wget` as in the original. Grafana has no stand-in, since
Debian does not package it. Downloads stay in .cache/e2e.

    python -m tests.e2e.stand_ins     downloads only: two minutes, which mostly wait for the disk
"""

import ast
import fcntl
import os
import shutil
import ssl
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.engine import Engine
from tests.stack.support import ROOT, run, succeed, tool

PREFIX = "specops-e2e"  # of all names in the engine, so that everything can be removed
PYTHON = f"{PREFIX}/python"
PROMETHEUS = f"{PREFIX}/prometheus"
_DEBIAN = f"{PREFIX}/debian"
_CACHE = ROOT / ".cache" / "e2e"
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


def is_available(engine: Engine, image: str) -> bool:
    """Whether the engine has an image or can pull it."""
    present = engine.docker("image", "inspect", image, check=False).returncode == 0
    return present or engine.docker("pull", "--quiet", image, check=False).returncode == 0


def make_python(engine: Engine) -> None:
    """Make `PYTHON`; its pip uses the package index of this machine."""
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
    archive = download()
    if engine.docker("image", "inspect", _DEBIAN, check=False).returncode:
        engine.docker("import", archive, _DEBIAN)


def download() -> Path:
    """Download the content of both images, unless it is here: Debian, beside it both programs."""
    archive = _CACHE / "bookworm.tar"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # .ci/run has begun to download it
        if not archive.exists():
            _bootstrap(archive)
    return archive


def _bootstrap(archive: Path) -> None:
    if os.geteuid() != 0 or tool("apt-get") is None:
        pytest.skip("NO CONTAINER WAS TESTED: images cannot be pulled; stand-ins need root and apt")

    def command(*words: object) -> None:
        succeed(*words, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=_DOWNLOAD_SECONDS)

    if tool("debootstrap") is None:
        command("apt-get", "update", "-qq")
        command("apt-get", "install", "-qq", "-y", "--no-install-recommends", "debootstrap")
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        root, extracted = Path(folder) / "root", Path(folder) / "extracted"
        options = ("--variant=minbase", "--include=ca-certificates,python3,python3-venv")
        command("debootstrap", *options, archive.stem, root, *_mirror())
        command("chroot", root, "apt-get", "update", "-qq")
        get = "cd /opt && apt-get download -qq prometheus busybox-static"
        command("chroot", root, "sh", "-c", get)
        for package in (root / "opt").glob("*.deb"):
            command("dpkg-deb", "--extract", package, extracted)
            package.unlink()
        (_CACHE / "prometheus").mkdir(exist_ok=True)
        for program in ("usr/bin/prometheus", "bin/busybox"):
            shutil.copy(extracted / program, _CACHE / "prometheus")
        for name in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / name)
        partial = Path(folder) / "archive.tar"
        command("tar", "--create", "--file", partial, "--directory", root, ".")
        partial.rename(archive)


def _mirror() -> list[str]:
    """The Debian mirror that this machine's apt uses; empty if it uses none."""
    query = ("--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian")
    return run("apt-get", "indextargets", *query).stdout.split()[:1]


def _pip_settings() -> tuple[str, str]:
    """This machine's pip configuration for use in an image, and its file of trusted certificates.

    Without folders of this machine, which the image does not have.
    """
    listed = succeed(sys.executable, "-m", "pip", "config", "list")
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value)).split()
    bundle = settings.pop("cert", [ssl.get_default_verify_paths().cafile or _CA_BUNDLE])
    lines = ["[global]", f"cert = {_CA_BUNDLE}"]
    for name, values in settings.items():
        if kept := [value for value in values if not value.startswith(("/", "file:", "~", "."))]:
            lines.append(f"{name} = {' '.join(kept)}")
    return "\n".join(lines) + "\n", bundle[0]


if __name__ == "__main__":
    download()
