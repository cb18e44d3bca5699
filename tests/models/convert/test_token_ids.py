"""Tokens that no text can have are refused before a conversion begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specops.models.convert import ExportError, Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.runner import edit_config


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eos_token_id": -1}, "is -1, but there are 320 tokens"),
        ({"eos_token_id": [0, 320]}, "is 320, but"),
        ({"bos_token_id": 320}, "is 320, but"),
        ({"bos_token_id": True}, "key 'bos_token_id' must be token ids"),
    ],
)
def test_they_are_refused(file: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    if file == "config.json":
        edit_config(source, **changes)
    else:
        (source / file).write_text(json.dumps(changes))
    with pytest.raises(ExportError, match=said):
        export_checkpoint(source, tmp_path / "out", quantization=Quantization.parse("fp32"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
