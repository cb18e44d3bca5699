"""The documentation says what is true: settings, commands, files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from specops.schemas.generate import GenerateRequest, GenerateResponse
from tests.stack.support import ROOT, VENV_BIN, run
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
def test_every_path_in_a_command_exists(page: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for path in re.findall(r"(?:^|\s)((?:\./|scripts/|grafana/|prometheus/)\S+)", "".join(blocks)):
        assert list(ROOT.glob(path.removeprefix("./"))), path


@every_page
def test_every_subcommand_exists(page: Path) -> None:
    offered = run(VENV_BIN / "specops", "--help").stdout
    for name in re.findall(r"`?specops ([a-z]+)\b", page.read_text()):
        assert f"\n    {name} " in offered, name


@every_page
def test_every_request_is_one_that_the_api_takes(page: Path) -> None:
    for body in re.findall(r"-d '(\{.*?\})'", page.read_text(), flags=re.DOTALL):
        GenerateRequest.model_validate_json(body)


@every_page
def test_every_answer_has_the_fields_of_an_answer(page: Path) -> None:
    for body in re.findall(r"```json\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert set(json.loads(body)) == set(GenerateResponse.model_fields) - {"details"}


@every_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
