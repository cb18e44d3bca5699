"""A head is made from start to end, with one interruption, and then serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specops.cli.main import main
from specops.config import Settings
from specops.heads.evaluation import Evaluation
from specops.heads.storage import Conversation, ConversationStore
from specops.models.folder import ModelError

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


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Loads of an engine, of which none succeeds."""
    seen: list[Settings] = []

    def load(settings: Settings) -> None:
        seen.append(settings)
        raise ModelError("no more is needed here")

    monkeypatch.setattr(making.Engine, "load", load)
    return seen


def make(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return why no head is made."""
    assert main(["draft", "make", "--model", "demo", "--out", str(out), *flags]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("out", ["notes", "notes/todo", "."])
def test_nothing_but_a_head_is_replaced(
    out: str,
    tmp_path: Path,
    loads: list[Settings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And that is said before an hour of work."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo").write_text("keep")
    monkeypatch.chdir(tmp_path)
    said = make(Path(out), capsys)
    assert re.fullmatch(rf"specops: {(tmp_path / out).resolve()}: .*(head\.json|current).*\n", said)
    assert loads == []
    assert (tmp_path / "notes" / "todo").read_text() == "keep"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_earlier_head_and_a_new_folder_may_be_written(
    tmp_path: Path, loads: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "head.json").touch()
    for name in ("old", "new"):
        assert make(tmp_path / name, capsys) == "specops: no more is needed here\n"
    assert len(loads) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "head.json"]


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert make(tmp_path / "file" / "head", capsys).startswith(f"specops: {tmp_path / 'file'}")


def test_conversations_of_another_model_are_not_learnt_from(tmp_path: Path) -> None:
    making._keep_to(tmp_path, "qwen", "sha256:1", 576)
    making._keep_to(tmp_path, "the same, elsewhere", "sha256:1", 576)
    for digest, size in (("sha256:2", 576), ("sha256:1", 64), ("", 576)):
        with pytest.raises(ModelError, match=r"another model, qwen, .* --out, or") as refused:
            making._keep_to(tmp_path, "smollm", digest, size)
        assert str(tmp_path) in str(refused.value)


def test_an_hour_of_work_is_not_lost_to_a_short_context(
    tmp_path: Path, tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head is measured in the context that its conversations were written in."""
    seen: list[Settings] = []

    def evaluate(settings: Settings, conversations: object) -> Evaluation:
        seen.append(settings)
        ways = {"suffix": 1.0, "head": 1.0, "cascade": 1.0}
        return Evaluation(1, 7, ways, ways)

    monkeypatch.setattr(making, "evaluate", evaluate)
    rng, store = np.random.default_rng(0), ConversationStore(tmp_path / "head.making/conversations")
    for number in range(12):
        tokens = rng.integers(0, 320, 30, np.int32)
        store.add(Conversation(number, tokens, tokens, rng.random((30, 256)).astype(np.float16)))
    short = replace(tiny_settings, draft="none", context=16)
    making.make_head(short, tmp_path / "head", 1e-3, lambda text: None)
    assert [settings.context for settings in seen] == [making._CONTEXT]
    assert "on 7 threads" in (tmp_path / "head" / "README.md").read_text().replace("\n", " ")
    known = json.loads((tmp_path / "head.making" / "target.json").read_text())
    assert known["name"] == "target"
    assert known["hidden_size"] == 256
    assert known["source_digest"].startswith("sha256:")


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
    store, reported = ConversationStore(tmp_path), list[str]()
    making._write(cast(Any, None), store, tmp_path / "progress.json", 60.0, reported.append)
    assert 50_000 < making._TRAINING_BYTES * store.nbytes < 100_000
    assert reported == ["writing ends here: training on more would not fit into memory"]
