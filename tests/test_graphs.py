"""How a graph is opened follows from what it will be asked: attention in tiles, or all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specops import graphs
from specops.config import Settings
from specops.models.folder import ModelFolder

TINYLLAMA = ModelFolder(
    path=Path("model"),
    name="tinyllama",
    graph=Path("model/model.onnx"),
    quant="int4-128",
    vocab_size=32_000,
    context_length=2048,
    parameters=1_100_000_000,
    bos_token=None,
    end_tokens=frozenset(),
    hidden_size=2048,
    num_heads=32,
    scaled_queries=True,
)
Opened = Callable[[ModelFolder, Settings, str], list[bool]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens a model's graphs, the one that decodes first; whether each holds whole scores."""

    def whole_scores(folder: ModelFolder, settings: Settings, prefill: str) -> list[bool]:
        found: list[bool] = []

        def open_session(_: Path, *, prepacked: bool, whole_scores: bool = False) -> None:
            assert prepacked
            found.append(whole_scores)

        monkeypatch.setattr(graphs, "open_session", open_session)
        monkeypatch.setattr(graphs, "prepacked_graph", lambda graph, *_, **__: graph)
        monkeypatch.setattr(graphs, "used_bytes", lambda _: 0)
        graphs.load_graph(folder, settings, lambda _: None, prefill=prefill)
        return found

    return whole_scores


def test_beside_a_graph_that_reads_prompts_scores_are_small(opened: Opened) -> None:
    assert opened(TINYLLAMA, Settings(), "int8") == [True, False]


def test_a_graph_that_reads_prompts_too_works_in_tiles_where_scores_would_be_large(
    opened: Opened,
) -> None:
    """128 tokens x 32 heads x 2,048 floats are the 32 MiB that cost."""
    wide = Settings(prefill_chunk=128)
    assert opened(TINYLLAMA, wide, "same") == [False]
    assert opened(TINYLLAMA, Settings(), "same") == [True]
    assert opened(replace(TINYLLAMA, context_length=1024), wide, "same") == [True]
    assert opened(TINYLLAMA, replace(wide, context=1024), "same") == [True]
    assert opened(replace(TINYLLAMA, num_heads=12), wide, "same") == [True]


def test_where_attention_scales_its_scores_tiles_are_as_fast(opened: Opened) -> None:
    assert opened(replace(TINYLLAMA, scaled_queries=False), Settings(), "int8") == [False, False]
