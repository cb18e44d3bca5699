"""The documentation says what is true: settings, commands, files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.stack.support import ROOT, run
from tests.stack.test_commands import TARGETS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_settings_are_described_as_they_are() -> None:
    result = run(sys.executable, "scripts/settings.py", "--check")
    assert result.returncode == 0, result.stderr


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_every_make_command_exists(page: Path) -> None:
    found = re.findall(r"`make ([a-z]+)|^make ([a-z]+)", page.read_text(), flags=re.MULTILINE)
    assert {inline or block for inline, block in found} <= set(TARGETS)


@every_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
