"""The documentation says what is true: settings, commands, files, fields, layers, figures."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from specops.config import Settings
from specops.http.schemas.chat import ChatRequest
from specops.http.schemas.completions import CompletionRequest
from specops.http.schemas.generate import GenerateRequest, GenerateResponse
from specops.http.schemas.openai import Timings
from tests.stack.support import ROOT, VENV_BIN, run
from tests.stack.test_commands import TARGETS
from tests.test_imports import LAYERS, modules, part

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
API = (ROOT / "docs" / "api.md").read_text()
BODIES = {"/generate": GenerateRequest, "/v1/chat/completions": ChatRequest}
OTHERS = {"SPECOPS_EXACT"}  # accepted, and no setting


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


def test_every_subcommand_exists() -> None:
    offered = run(VENV_BIN / "specops", "--help").stdout
    for page in PAGES:
        for name in re.findall(r"`?specops ([a-z]+)\b", page.read_text()):
            assert f"\n    {name} " in offered, f"{page.name}: {name}"


@every_page
def test_every_request_is_one_that_the_api_takes(page: Path) -> None:
    requests = re.findall(r":8000(/\S+)[^{]*?-d '(\{.*?\})'", page.read_text(), flags=re.DOTALL)
    assert len(requests) == page.read_text().count("-d '{")
    for path, body in requests:
        BODIES[path].model_validate_json(body)


@every_page
def test_every_answer_has_the_fields_of_an_answer(page: Path) -> None:
    for body in re.findall(r"```json\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert set(json.loads(body)) == set(GenerateResponse.model_fields) - {"details"}


@every_page
def test_every_source_file_exists(page: Path) -> None:
    """By its path from the repository's root, or below api/specops."""
    if page.name == "metrics.md":  # scripts/metrics_page.py writes it
        return
    folders = (ROOT, ROOT / "api" / "specops")
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|toml|ya?ml|html|css|js))`", page.read_text())
    named = [name for name in named if "NAME" not in name]
    assert [name for name in named if not any((base / name).exists() for base in folders)] == []


@every_page
def test_every_module_in_a_command_exists(page: Path) -> None:
    for name in re.findall(
        r"python -m ((?:specops|bench|tests|training)[a-z_.]*)", page.read_text()
    ):
        path = name.replace(".", "/")
        found = [ROOT / f"{path}.py", ROOT / path, ROOT / "api" / f"{path}.py"]
        assert any(item.exists() for item in found), name


@every_page
def test_every_setting_of_the_service_is_one(page: Path) -> None:
    known = {f"SPECOPS_{item.name.upper()}" for item in fields(Settings)} | OTHERS
    assert set(re.findall(r"\bSPECOPS_[A-Z_]+[A-Z]", page.read_text())) <= known


def test_the_api_page_has_every_field_of_generate() -> None:
    table = API.partition("## POST /generate")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", table, flags=re.MULTILINE))
    assert set(rows) == set(GenerateRequest.model_fields)
    for name, item in GenerateRequest.model_fields.items():
        default = rows[name].strip()
        if item.is_required() or item.default in (None, []):
            assert default in ("", "the server's", "true"), name  # true: adaptive, filled in later
        else:
            assert json.loads(default) == item.default, name
    assert set(GenerateResponse.model_fields) <= set(re.findall(r"`(\w+)`", API))


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest, Timings])
def test_the_api_page_has_every_field_of_openais(schema: type[BaseModel]) -> None:
    assert set(schema.model_fields) <= set(re.findall(r"`(\w+)`", API))


def test_the_picture_of_the_layers_is_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"```mermaid\n(.*?)```", page, flags=re.DOTALL)
    shared = LAYERS[-1]
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", picture, flags=re.MULTILINE))
    imported = {
        (own, other)
        for own, other in (
            (module.split("/")[0], part(name))
            for module, names in modules().items()
            for name in names
        )
        if other is not None and other != own and own not in shared | {"__main__", "__init__"}
    }
    assert {pair for pair in drawn if pair[1] != "shared"} == {
        pair for pair in imported if pair[1] not in shared
    }
    assert {own for own, _ in drawn} | shared | {"__main__"} == set().union(*LAYERS)
    for package in set().union(*LAYERS) - {"__main__"}:
        assert re.search(rf"^\|[^|]*`{package}`", page, flags=re.MULTILINE), package


def heading_ids(page: Path) -> set[str]:
    """What `#` may lead to on a page, as GitHub names it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@every_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        assert (page.parent / target).exists(), target
        if heading:
            assert heading in heading_ids(page.parent / target if target else page), heading


def test_the_readmes_figures_are_what_was_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    speculation = (ROOT / "bench" / "results" / "compare.md").read_text()
    (row,) = re.findall(r"^\| code \| suffix, adaptive \|(.*)$", speculation, flags=re.MULTILINE)
    (speedup,) = re.findall(r"([\d.]+) \[", row)
    assert f"{float(speedup):.1f} times" in readme
    results = (ROOT / "bench" / "results" / "serving.md").read_text()
    (row,) = re.findall(r"^\| 4 \|(.*)$", results, flags=re.MULTILINE)
    ours, llama, openvino = re.findall(r"([\d.]+) \[", row)[:3]
    told = re.findall(
        r"^\| .*(Spec-Ops|OpenVINO|llama).*\| \**([\d.]+)\** \|$", readme, re.MULTILINE
    )
    assert dict(told) == {"Spec-Ops": ours, "llama": llama, "OpenVINO": openvino}
