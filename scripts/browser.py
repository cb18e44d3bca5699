"""A headless Chromium for scripts and tests: the machine's own, which is never downloaded here.

Playwright drives it; it is in the extra `dev`. Debian has the browser as `chromium`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Only pages of our own are opened: as root in a container Chromium can set up no sandbox, and a
# container's /dev/shm is too small for it.
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")


class BrowserError(RuntimeError):
    """There is no Chromium, or nothing to drive it with; the message says what to install."""


@contextmanager
def launched() -> Iterator[Browser]:
    """Run a headless Chromium.

    Raises:
        BrowserError: there is none, or Playwright is missing.
    """
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not every machine has it
    except ImportError as error:
        raise BrowserError("no playwright (`scripts/venv dev` installs it)") from error
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    if binary is None:
        raise BrowserError("no Chromium (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
