"""A real draft model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from specops.decoder import Decoder
from specops.session import open_session, share_threads


@pytest.fixture
def draft_decoder(tiny_pair: Path) -> Decoder:
    share_threads(2)
    graph = tiny_pair / "draft" / "onnx" / "fp32" / "model.onnx"
    return Decoder(open_session(graph), rows=3, capacity=64, max_width=8)
