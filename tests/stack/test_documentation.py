"""The documentation agrees with the code: settings, commands, files, fields, layers, figures."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from specops.config import Settings
from specops.http.protocols.llama_server import InfillRequest
from specops.http.protocols.native import GenerateRequest, GenerateResponse
from specops.http.protocols.openai.chat import ChatRequest
from tests.stack.support import ROOT, VENV_BIN, succeed
from tests.stack.test_commands import TARGETS
from tests.test_imports import LAYERS, modules, part

NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "training/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
BODIES = {
    "/generate": GenerateRequest,
    "/infill": InfillRequest,
    "/v1/chat/completions": ChatRequest,
}
SETTINGS = {f"SPECOPS_{item.name.upper()}" for item in fields(Settings)}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def heading_ids(page: Path) -> set[str]:
    """The anchors of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@every_page
def test_every_name_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"\bSPECOPS_[A-Z_]+[A-Z]", text)) <= SETTINGS
    targets = re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE)
    assert set(targets) <= set(TARGETS)
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    for path in re.findall(r"(?:^|\s)((?:\./|scripts/|grafana/|prometheus/)\S+)", blocks):
        assert list(ROOT.glob(path.removeprefix("./"))), path
    for name in re.findall(r"python -m ((?:specops|bench|tests|training)[a-z_.]*)", text):
        path = name.replace(".", "/")
        found = [ROOT / f"{path}.py", ROOT / path, ROOT / "api" / f"{path}.py"]
        assert any(item.exists() for item in found), name
    if page.name != "metrics.md":  # generated, with names that look like files
        folders = (ROOT, ROOT / "api" / "specops", page.parent)
        named = re.findall(r"`([\w./-]+\.(?:py|c|h|toml|ya?ml|html|css|js))`", text)
        missing = [name for name in named if not any((base / name).exists() for base in folders)]
        assert [name for name in missing if "NAME" not in name] == []
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        assert (page.parent / target).exists(), target
        if heading:
            assert heading in heading_ids(page.parent / target if target else page), heading


@every_page
def test_requests_and_answers_on_a_page_are_those_of_the_api(page: Path) -> None:
    text = page.read_text()
    requests = re.findall(r":8000(/\S+)[^{]*?-d '(\{.*?\})'", text, flags=re.DOTALL)
    assert len(requests) == text.count("-d '{")
    for path, body in requests:
        BODIES[path].model_validate_json(body)
    for body in re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL):
        assert set(json.loads(body)) == set(GenerateResponse.model_fields) - {"details"}


def test_every_module_of_the_training_is_listed() -> None:
    named = re.findall(r"`(\w+\.py)`", (ROOT / "training" / "README.md").read_text())
    assert {*named} == {path.name for path in (ROOT / "training").glob("[!_]*.py")}


def test_every_name_in_the_recipes_is_in_the_code() -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add something")[2]
    names = {*re.findall(r"`(?:\w+\.)?(_?[A-Z]\w{3,})`", recipes)}
    sources = [path.read_text() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    code = {*re.findall(r"\w+", "\n".join(sources))}
    assert len(names) > 20
    assert names <= code, names - code


def test_every_target_is_described_with_its_time() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`make .*?`) \| .+ \| (?:[\d to]+|hours) \| .*\|$", page, re.MULTILINE)
    assert re.findall(r"`make ([a-z]+)", " ".join(rows)) != []
    assert set(re.findall(r"`make ([a-z]+)", " ".join(rows))) == set(TARGETS)


def test_every_subcommand_exists() -> None:
    offered = succeed(VENV_BIN / "specops", "--help")
    for page in PAGES:
        for name in re.findall(r"`?specops ([a-z]+)\b", page.read_text()):
            assert f"\n    {name} " in offered, f"{page.name}: {name}"


def test_what_is_generated_is_up_to_date() -> None:
    succeed(sys.executable, "scripts/generate.py", "--check")


def test_every_code_of_an_error_is_described() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("## Errors")[2]
    sources = (ROOT / "api" / "specops" / "http").rglob("*.py")
    codes = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text())}
    assert len(codes) > 15
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_the_picture_of_the_layers_is_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"```mermaid\n(.*?)```", page, flags=re.DOTALL)
    shared = LAYERS[-1]
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", picture, flags=re.MULTILINE))
    imported = {
        (module.split("/")[0], part(name)) for module, names in modules().items() for name in names
    }
    assert {pair for pair in drawn if pair[1] != "shared"} == {
        (own, other)
        for own, other in imported
        if other not in {None, own} | shared and own not in shared | {"__main__", "__init__"}
    }
    assert {own for own, _ in drawn} | shared | {"__main__"} == set().union(*LAYERS)
    for package in set().union(*LAYERS) - {"__main__"}:
        assert re.search(rf"^\|[^|]*`{package}`", page, flags=re.MULTILINE), package


def test_the_glossary_is_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    glossary = page.partition("## Glossary")[2].partition("\n## ")[0]
    assert 15 <= len(re.findall(r"^\| (?!term|---)", glossary, re.MULTILINE)) <= 25


def test_the_readmes_figures_are_the_measured_ones() -> None:
    """Whole times: of the rows of a record what its reader would get, the worst one included."""
    readme = (ROOT / "README.md").read_text()
    chat, compare, avx2 = (
        json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        for name in ("chat", "compare", "avx2/chat")
    )
    drawn = [each["drawn"][name] for each in (chat, avx2) for name in ("greedy", "temperature 0.7")]

    def whole(part: str) -> list[str]:
        return [f"{rows[part]['whole_speedup']:.2f}" for rows in drawn]

    fresh, again, *several = (
        whole(f"English, {part}")
        for part in ("without repetition", "repeating", "without repetition, 4 clients",
                     "without repetition, 8 clients")
    )  # fmt: skip
    (code,) = [row for row in compare["categories"]["code"] if row["label"] == "cascade, adaptive"]
    cells = [fresh, again, [f"{four}, {eight}" for four, eight in zip(*several, strict=True)]]
    table = readme.partition("| | greedy | temperature 0.7 | greedy, AVX2")[2].partition("\n\n")[0]
    found = [line.replace("*", "").split("|")[2:-1] for line in table.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in found] == [
        *cells,
        [f"{code['whole_speedup']:.2f}", "", "", ""],
    ]


def test_the_readme_names_the_memory_that_the_page_of_models_does() -> None:
    rows = re.compile(r"^\| `([\w.-]+)`.*\| ([\d.]+) \|$", re.MULTILINE)
    memory = dict(rows.findall((ROOT / "docs" / "models.md").read_text()))
    chosen = dict(rows.findall((ROOT / "README.md").read_text()))
    assert len(chosen) == 4
    assert chosen.items() <= memory.items()


def test_the_proxy_of_the_page_on_security_does_what_that_asks_for() -> None:
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    (sample,) = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
    directives = re.sub(r" *#.*", "", sample)
    assert "location = /metrics { return 404; }" in directives
    assert "proxy_set_header Host $host;" in directives
    assert "proxy_buffering off;" in directives
    seconds = int(re.findall(r"proxy_read_timeout (\d+)s;", directives)[0])
    assert seconds > Settings().request_timeout


def test_every_promise_has_its_tests() -> None:
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    section = page.split("## What is promised")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, flags=re.MULTILINE)
    promises = [row for row in rows if row[0] != "promise"]
    assert len(promises) >= 30
    # What stands outside of the tables only says to whom.
    outside = [line for line in section.splitlines() if line and not line.startswith("|")]
    assert all(line.startswith("**To ") for line in outside)
    for promise, named in promises:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", named)
        assert tests, promise
        assert "<br>".join(f"`{path}::{name}`" for path, name in tests) == named
        for path, name in tests:
            source = (ROOT / "tests" / path).read_text("utf-8")
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{path}::{name}"
