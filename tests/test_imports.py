"""The walls: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import specops

ROOT = Path(specops.__file__).parent
# From the top down; a module may import those after it, and those beside it.
LAYERS = [
    {"__main__", "cli", "healthcheck"},
    {"load_bench"},
    {"server"},
    {"app"},
    {"routes"},
    {"service", "schemas", "errors", "sse", "middleware"},
    {"engine_thread", "ticket", "door"},
    {"places"},
    {"metrics"},
    {"series"},
    {"collectors"},
    {"engine"},
    {"open_models"},
    # One step: who runs, what a pass computes, what comes of it.
    {"scheduler"},
    {"postprocess"},
    {"planner"},
    {"proposer", "running"},
    {"waiting"},
    {"sequence", "verify", "drafters"},
    # What is known of passes and drafts, and what follows from it.
    {"calibration", "controller", "token_budget"},
    {"acceptance", "cost_model"},
    {"sampling", "text_stream"},
    # The model: its graph, its passes, its cache.
    {"graphs"},
    {"models"},
    {"model_runner"},
    {"kv_cache"},
    {"cache_slot"},
    {"block_pool", "prefix_trie", "batch"},
    {"tokenizer", "chat_template", "session"},
    {"admission", "memory_plan"},
    {"config", "request", "cpus", "memory", "resources", "logs", "presets", "jump_window"},
    {"priority", "kernels"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def modules() -> dict[str, set[str]]:
    """Module path below the package → absolute names that it imports anywhere in its code."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                names.add(node.module or "")
                if node.module == "specops":  # its modules
                    names |= {f"specops.{alias.name}" for alias in node.names}
        found[path.relative_to(ROOT).with_suffix("").as_posix()] = names
    return found


def part(name: str) -> str | None:
    """`specops.drafters.base` → `drafters`; None for other packages."""
    head, _, rest = name.partition(".")
    return rest.split(".")[0] if head == "specops" and rest else None


def test_every_module_has_a_layer_and_every_layer_its_modules() -> None:
    found = {module.split("/")[0] for module in modules()} - {"export", "__init__"}
    assert found == set(LEVEL)


def test_imports_go_in_one_direction() -> None:
    for module, names in modules().items():
        own = module.split("/")[0]
        if own in ("export", "__init__"):
            continue
        for name in names:
            other = part(name)
            if other is None or other in (own, "export"):
                continue
            same_layer = LEVEL[own] == LEVEL[other]
            assert same_layer or LEVEL[own] < LEVEL[other], f"{module} imports {name}"


def test_what_a_step_is_made_of_knows_no_http_and_no_onnx_runtime() -> None:
    """But for the one that runs a pass and whoever measures it."""
    scheduling = {"scheduler", "postprocess", "planner", "proposer", "running", "waiting"}
    scheduling |= {"sequence", "verify", "controller", "acceptance", "cost_model", "token_budget"}
    for module, names in modules().items():
        if module in scheduling:
            assert not names & {"onnxruntime", "onnx", "fastapi", "starlette", "asyncio"}, module
            assert "specops.session" not in names, module


def test_the_serving_path_does_not_import_the_converter() -> None:
    for module, names in modules().items():
        if not module.startswith("export/") and module != "cli":
            assert not any(part(name) == "export" for name in names), module


def test_the_converter_imports_nothing_of_the_service() -> None:
    for module, names in modules().items():
        if module.startswith("export/"):
            assert {part(name) for name in names} <= {None, "export"}, module


def importers(package: str) -> set[str]:
    return {
        module
        for module, names in modules().items()
        if any(name == package or name.startswith(package + ".") for name in names)
    }


def test_outside_libraries_stay_behind_one_door() -> None:
    assert importers("onnxruntime") == {"model_runner", "session"}
    assert importers("prometheus_client") == {"metrics", "series", "collectors"}
    assert importers("tokenizers") == {"tokenizer", "models/sentencepiece"}
    assert importers("jinja2") == {"chat_template"}
    assert importers("huggingface_hub") == {"models/download"}
    drawing = {name for name in importers("onnx") if not name.startswith("export/")}
    assert drawing == {
        "models/head_norms",
        "models/prepack",
        "models/rewrite",
        "models/tensors",
        "models/tiles",
        "models/tokenwise",
    }
    assert importers("torch") == set()


def test_serving_imports_no_heavy_library() -> None:
    code = "import specops.app, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "specops.service" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "huggingface_hub", "specops.export"}
    assert "specops.models.prepack" not in loaded
