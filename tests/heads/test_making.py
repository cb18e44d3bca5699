"""A head is made from start to end, with one interruption, and then serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specops.cli.main import main
from specops.heads.storage import Conversation, ConversationStore

pytest.importorskip("torch", reason="needs the extra `train`")
from specops.heads import making

MINUTES = "0.5"


def command(out: Path) -> list[str]:
    flags = ["--model", "demo", "--out", str(out), "--minutes", MINUTES, "--threads", "1"]
    return [sys.executable, "-m", "specops", "draft", "make", *flags]


@pytest.mark.e2e
def test_a_head_is_made_with_an_interruption_and_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, work = tmp_path / "head", tmp_path / "head.making"
    environment = {**os.environ, "SPECOPS_CACHE_DIR": str(tmp_path / "cache")}
    first = subprocess.Popen(
        command(out), env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    for line in first.stderr:  # the first line of the training
        if line.startswith("training"):
            first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    assert not out.exists()
    written = json.loads((work / "progress.json").read_text())
    second = subprocess.run(
        command(out), env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert second.returncode == 0, second.stderr
    assert json.loads((work / "progress.json").read_text()) - written < 5  # seconds of writing
    assert re.search(r"the head (pays|does not pay) here: \d", second.stdout)
    reached = [float(share) for share in re.findall(r"first guess right ([\d.]+)%", second.stderr)]
    assert reached
    assert reached[-1] > 3  # by chance: a two-hundredth of that
    card = (out / "README.md").read_text()
    assert "held-out conversations" in card
    assert {path.name for path in out.iterdir()} == {"README.md", "head.json", "head.onnx"}
    arguments = ["generate", "def add(", "--model", "demo", "--max-new-tokens", "24"]
    texts = []
    for draft, drafter in ((str(out), "head"), (str(out), "cascade"), ("none", "none")):
        assert main([*arguments, "--draft", draft, "--drafter", drafter, "--threads", "1"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_no_more_is_written_than_training_has_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        def __init__(self, engine: Any) -> None: ...

        def conversations(self, first: int) -> Iterator[Conversation]:
            tokens, states = np.zeros(4, np.int64), np.zeros((4, 2), np.float16)
            for number in count(first):
                yield Conversation(number, tokens, tokens, states)

    monkeypatch.setattr(making, "Writer", Endless)
    monkeypatch.setattr(making, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(making, "page_cache_room", lambda: 50_000)
    store, told = ConversationStore(tmp_path), list[str]()
    making._write(cast(Any, None), store, tmp_path / "progress.json", 60.0, told.append)
    assert 50_000 < making._TRAINING_BYTES * store.nbytes < 100_000
    assert told == ["writing ends here: training on more would not fit into the memory"]
