"""`specops generate`, `chat` and `info` as a person types them, on the default model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specops.presets import chat_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not chat_model().is_file(), reason="no chat model: scripts/chat_model.py"),
]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def specops(*arguments: str, typed: str = "") -> tuple[str, str]:
    """Run the command, which must succeed; returns what it writes to both outputs."""
    command = [sys.executable, "-W", "error", "-m", "specops", *arguments]
    done = subprocess.run(
        command, check=False, input=typed, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_question_is_answered() -> None:
    for prompt, typed in ((QUESTION, ""), ("-", QUESTION)):
        said, figures = specops("generate", "--max-new-tokens", "16", prompt, typed=typed)
        assert said == f"{ANSWER}\n"
        assert re.search(r"\d tokens/s .* tokens per pass", figures)


def test_a_conversation_goes_on_and_is_saved(tmp_path: Path) -> None:
    lines = (QUESTION, "And of Italy?", f"/save {tmp_path / 'saved.json'}", "/quit")
    said, _ = specops("chat", typed="\n".join(lines))
    assert said.splitlines() == [ANSWER, "The capital of Italy is Rome."]
    saved = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [turn["content"] for turn in saved if turn["role"] == "user"] == [*lines[:2]]


def test_the_models_facts_are_listed() -> None:
    said, _ = specops("info")
    assert "134.5 M parameters" in said
    assert re.search(r"n-grams.*MB", said)
