"""A headless Chromium for scripts and tests: the machine's own, which is never downloaded here.

Playwright drives it; it is in the extra `dev`. Debian has the browser as `chromium`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

# The browser opens only our own pages. As root in a container Chromium cannot set up its sandbox,
# and a container's /dev/shm is too small for it.
_LAUNCHER = Path(__file__).with_name("no_netlink.py")
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
_drivers: list[Playwright] = []  # the one that runs


class BrowserError(RuntimeError):
    """Chromium or Playwright is missing; the message says what to install."""


def executable() -> str:
    """The path of Chromium.

    Raises:
        BrowserError: Chromium or Playwright is missing.
    """
    if find_spec("playwright") is None:
        raise BrowserError("no playwright (`scripts/venv dev` installs it)")
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise BrowserError("no Chromium (Debian: apt-get install chromium)")


@contextmanager
def _driving() -> Iterator[Playwright]:
    """Playwright, which a thread can start only once: a browser beside another one shares it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not every machine has it

    if _drivers:
        yield _drivers[0]
        return
    with sync_playwright() as driver:
        _drivers.append(driver)
        try:
            yield driver
        finally:
            _drivers.clear()


@contextmanager
def launched(*arguments: str) -> Iterator[Browser]:
    """Run a headless Chromium, with more options of its command line; raises as `executable`."""
    path = executable()
    with _driving() as driver:
        browser = driver.chromium.launch(
            executable_path=_LAUNCHER,
            args=[*_ARGUMENTS, *arguments],
            env={**os.environ, "PROGRAM": path},
        )
        try:
            yield browser
        finally:
            browser.close()
