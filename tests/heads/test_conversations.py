"""Conversations are complete: each token has the state from which it was chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.heads.conversations import Writer
from specops.heads.storage import Conversation, ConversationStore
from specops.heads.target_rows import output_rows
from specops.models.prepare import choose, prepare
from specops.text.chat_template import ChatTemplate
from tests.conftest import THREADS

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of the demo target: a model with random weights would repeat itself."""
    cache = tmp_path_factory.mktemp("cache")
    return Settings(
        model="demo",
        draft="none",
        drafter="suffix",
        threads=THREADS,
        slots=4,
        context=128,
        cache_dir=cache,
    )


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return Engine.load(settings)


@pytest.fixture(scope="module")
def rows(settings: Settings, engine: Engine) -> np.ndarray:
    folder = prepare(
        choose(settings).target, "int8-128", name="demo", cache_dir=settings.cache_dir, report=print
    )
    target = engine.scheduler.target
    return output_rows(folder.graph, range(target.vocab_size), target.hidden_size)


def written(engine: Engine, first: int, count: int) -> list[Conversation]:
    found = Writer(engine).conversations(first)
    try:
        return list(islice(filter(None, found), count))
    finally:
        found.close()


def test_each_state_is_what_its_token_was_chosen_by(engine: Engine, rows: np.ndarray) -> None:
    found = written(engine, 0, 6)
    assert not engine.scheduler.busy
    assert len({item.number for item in found}) == 6
    for item in found:
        assert len(item.tokens) == len(item.states) > 8
        likely = item.states.astype(np.float32) @ rows.T
        places = (likely > np.take_along_axis(likely, item.tokens[:, None], 1)).sum(1)
        # Sampled from the likeliest 95 %; with the states of another token they could be anywhere.
        assert np.median(places) < 5
        after = (likely[1:] > np.take_along_axis(likely[1:], item.tokens[:-1, None], 1)).sum(1)
        assert after.mean() > 3 * places.mean()


def test_a_conversation_follows_from_its_number(engine: Engine) -> None:
    """A text does not depend on the texts beside it, so a stopped run can go on with the next."""
    first = {item.number: item for item in written(engine, 0, 8)}
    again = {item.number: item for item in written(engine, 2, 5)}
    both = first.keys() & again.keys()
    assert both
    for number in both:
        np.testing.assert_array_equal(first[number].tokens, again[number].tokens)


def test_a_chat_model_asks_itself(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "chat_template", ChatTemplate(TEMPLATE, {}))
    monkeypatch.setattr(engine, "info", replace(engine.info, chat=True))
    prompts = [engine.tokenizer.decode(item.prompt.tolist()) for item in written(engine, 0, 3)]
    assert len(set(prompts)) == 3
    for prompt in prompts:
        assert "user" in prompt
        assert prompt.endswith("assistant]")


def test_stored_conversations_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = ConversationStore(tmp_path / "kept")
    assert store.next_number == 0
    given = []
    for number, asked, length in ((4, 0, 5), (1, 7, 1), (9, 2, 30)):
        states = rng.normal(size=(length, 3)).astype(np.float16)
        prompt, tokens = (rng.integers(0, 99, count, np.int32) for count in (asked, length))
        given.append(Conversation(number, prompt, tokens, states))
        store.add(given[-1])
    (tmp_path / "kept" / "0000010.partial").write_bytes(b"cut short")
    store = ConversationStore(tmp_path / "kept")
    assert store.next_number == 10
    found = list(store.first(store.nbytes))
    assert [item.number for item in found] == [1, 4, 9]
    for one, other in zip(found, sorted(given, key=lambda item: item.number), strict=True):
        for name in ("prompt", "tokens", "states"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert [item.number for item in store.first(store.nbytes - 1)] == [1, 4]
    assert not list(store.first(0))
