"""The walls: who may import whom."""

import ast
import re
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specops
from tests.http.connections import imported_by

ROOT = Path(specops.__file__).parent
# From the top down; a package may import those after it, and itself. What is last is shared by all
# and may import each other.
LAYERS = [
    {"__main__", "cli"},
    {"http"},
    {"serving", "ngrams"},
    {"engine", "metrics"},
    {"speculation", "models"},
    {"runtime"},
    {"text", "system", "config", "request", "sampling_defaults", "presets", "weights"}
    | {"tracing", "synonyms"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ALONE = {  # which import nothing of the service
    *("specops.models.contract", "specops.models.errors", "specops.models.gguf_files"),
    "specops.models.paths",
    *("specops.models.sentencepiece", "specops.models.state_dict", "specops.system.checksums"),
    *("specops.system.cpus", "specops.system.folders", "specops.weights"),
    "specops.sampling_defaults",
    *("specops.runtime.kernels", "specops.runtime.layer_shapes"),
    *("specops.text.files", "specops.text.fill_in_forms"),
}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Module path below the package → all nodes of its code."""
    return {
        path.relative_to(ROOT).with_suffix("").as_posix(): [*ast.walk(ast.parse(path.read_text()))]
        for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def modules() -> dict[str, set[str]]:
    """Module path → absolute names that it imports anywhere in its code."""
    found = {}
    for module, code in nodes().items():
        names: set[str] = set()
        for node in code:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports are absolute"
                names.add(node.module or "")
                if node.module == "specops":  # its modules
                    names |= {f"specops.{alias.name}" for alias in node.names}
        found[module] = names
    return found


@cache
def named() -> dict[str, set[str]]:
    """Module path → our modules that its code names in strings: started by `-m`, or imported."""
    known = {f"specops.{name.replace('/', '.')}" for name in modules()}
    return {
        module: {node.value for node in code if isinstance(node, ast.Constant)} & known
        for module, code in nodes().items()
    }


def part(name: str) -> str | None:
    """`specops.speculation.drafters.base` → `speculation`; None for other libraries."""
    head, _, rest = name.partition(".")
    return rest.split(".")[0] if head == "specops" and rest else None


def test_every_package_has_a_layer_and_every_layer_its_packages() -> None:
    assert {module.split("/")[0] for module in modules()} - {"__init__"} == set(LEVEL)


def test_imports_go_in_one_direction() -> None:
    """Also those by name, in another process: `prepare` has the converter run so."""
    assert "specops.models.eagle.convert" in named()["models/prepare"]
    for module, names in modules().items():
        own = module.split("/")[0]
        for name in names | named()[module]:
            other = part(name)
            if own not in ("__init__", "__main__") and other not in (None, own):
                assert LEVEL[own] < LEVEL[other] or LAYERS[-1] >= {own, other}, (
                    f"{module} imports {name}"
                )


@cache
def arrows() -> dict[str, set[str]]:
    """Module path → those of the modules that it imports, also for types alone, or names."""
    known = {
        f"specops.{name}".replace("/", ".").removesuffix(".__init__"): name for name in modules()
    }
    found = {}
    for module, code in nodes().items():
        names = set(named()[module])
        for node in code:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    names.add(whole if whole in known else str(node.module))
        found[module] = {known[name] for name in names if name in known} - {module}
    return found


def room(module: str) -> str:
    """`http/protocols/openai/chat` → `http/protocols`; a module of a package is its own room."""
    folder, _, rest = module.partition("/")
    return f"{folder}/{rest.split('/')[0]}"


@pytest.mark.parametrize("place", [str, room], ids=["modules", "packages"])
def test_nothing_imports_itself_in_a_circle(place: Callable[[str], str]) -> None:
    """Neither modules nor the packages inside packages."""
    found: dict[str, set[str]] = {}
    for module, others in arrows().items():
        found.setdefault(place(module), set()).update({place(one) for one in others})
    assert "models/graph/prepack" in arrows()["models/graph/weight_cache"]  # by name, with `-m`
    order = TopologicalSorter({one: others - {one} for one, others in found.items()})
    assert {*order.static_order()} == {*found}


def test_every_package_says_what_lives_there() -> None:
    for folder in {path.parent for path in ROOT.rglob("*.py")}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text, f"{folder} has no docstring"


def test_what_a_step_is_made_of_knows_no_http_and_no_onnx_runtime() -> None:
    """But for the module that loads models."""
    for module, names in modules().items():
        if module.split("/")[0] in ("engine", "speculation"):
            assert not names & {"onnxruntime", "onnx", "fastapi", "starlette", "asyncio"}, module
            if module != "engine/loading":
                assert "specops.runtime.session" not in names, module


def test_the_serving_path_does_not_import_the_converter() -> None:
    for module, names in modules().items():
        if not module.startswith(("models/convert/", "models/eagle/", "cli/")):
            assert not any(name.startswith("specops.models.convert") for name in names), module


def test_the_converter_imports_nothing_of_the_service() -> None:
    for module, names in modules().items():
        if module.startswith("models/convert/"):
            ours = {name for name in names if part(name)}
            ours -= ALONE
            if module == "models/convert/checkpoint":  # the ids of tokens that files name by text
                ours -= {"specops.text", "specops.text.tokenizer", "specops.text.added_tokens"}
            if module.startswith("models/convert/calibration/"):  # it runs the model
                ours -= {name for name in ours if part(name) in {"runtime", "text"}}
                ours -= {"specops.models.folder", "specops.models.graph.weight_cache"}
                ours -= {"specops.request"}
            assert all(name.startswith("specops.models.convert") for name in ours), module


def importers(package: str) -> set[str]:
    return {
        module
        for module, names in modules().items()
        if any(name == package or name.startswith(package + ".") for name in names)
    }


def test_outside_libraries_stay_behind_one_door() -> None:
    assert importers("onnxruntime") == {"runtime/model_runner", "runtime/session"}
    assert importers("prometheus_client") == {
        "metrics/metrics",
        "metrics/series",
        "metrics/collectors",
    }
    assert importers("tokenizers") == {
        *("text/tokenizer", "text/added_tokens", "text/cuts"),
        *("models/sentencepiece", "models/convert/gguf/tokenizer"),
        "models/convert/gguf/pretokenizers",
    }
    assert importers("jinja2") == {"text/template_worker"}  # a process of its own
    assert importers("huggingface_hub") == {"models/download"}
    reading = {name.rsplit("/", 1)[0] for name in importers("onnx")}
    parts = {re.split("/(?:families|calibration)", name)[0] for name in reading}
    assert parts == {"models/graph", "models/convert", "models/eagle"}
    assert not importers("torch")
    assert not importers("gguf")
    assert importers("opentelemetry") == {"tracing"}


def test_serving_imports_no_heavy_library() -> None:
    loaded = imported_by("specops.http.app")
    assert "specops.serving.async_engine" in loaded
    assert not loaded & {
        "torch",
        "jinja2",
        "transformers",
        "onnx",
        "huggingface_hub",
        "opentelemetry.sdk",
        "specops.models.convert",
    }
    assert "specops.models.graph.prepack" not in loaded
