"""A model writes conversations that follow from their numbers, and they are kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.ngrams import conversations
from specops.ngrams.conversations import Writer
from specops.ngrams.storage import Conversation, ConversationStore
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


def written(engine: Engine, first: int, count: int) -> list[Conversation]:
    writer, found = Writer(engine, first), list[Conversation]()
    while len(found) < count:
        found += writer.write()
    stop(engine)
    return found[:count]


def stop(engine: Engine) -> None:
    engine.scheduler.cancel_all()
    engine.scheduler.step()


def test_conversations_are_numbered_and_whole(engine: Engine) -> None:
    found = written(engine, 0, 6)
    assert not engine.scheduler.busy
    assert len({item.number for item in found}) == 6
    for item in found:
        assert len(item.tokens) >= 8
        assert item.prompt.tolist() == list(engine.encode(""))


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


def test_what_is_unfinished_is_kept_as_it_is(engine: Engine) -> None:
    """So that an interruption loses none of the time in which it was written."""
    whole = {item.number: item.tokens for item in written(engine, 0, 6)}
    writer = Writer(engine, 0)
    while sum(len(text.tokens) >= 8 for text in writer._texts.values()) < 2:
        assert not writer.write()
    kept = writer.unfinished()
    stop(engine)
    assert len(kept) >= 2
    assert len(whole.keys() & {item.number for item in kept}) >= 2
    for item in kept:
        if item.number in whole:
            np.testing.assert_array_equal(item.tokens, whole[item.number][: len(item.tokens)])


def test_a_model_that_writes_nothing_of_use_is_noticed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_ANSWER_TOKENS", 7)  # one too few
    writer = Writer(engine, 0)
    while not writer.writes_nothing:
        assert writer.write() == []
        assert writer.ended.total() < 100
    assert min(writer.ended.values()) == 12  # of each temperature
    stop(engine)


def test_messages_that_lead_to_no_answer_count_as_nothing_of_use(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "chat_template", ChatTemplate(TEMPLATE, {}))
    monkeypatch.setattr(engine, "info", replace(engine.info, chat=True, context=20))
    monkeypatch.setattr(conversations, "_MESSAGE_TOKENS", 2)
    writer = Writer(engine, 0)
    while not writer.writes_nothing:
        assert writer.write() == []
        assert writer.ended.total() < 100
    stop(engine)


def test_stored_conversations_come_back(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "kept"
    store, given = ConversationStore(file), []
    assert store.read() == []
    for number, asked, length in ((4, 0, 5), (1, 7, 1), (9, 2, 30)):
        prompt, tokens = (rng.integers(0, 99, count, np.int32) for count in (asked, length))
        given.append(Conversation(number, prompt, tokens))
        store.add(given[-1])
    whole = file.read_bytes()
    torn = [whole[:-cut] for cut in (1, 4, 4 * 31, 4 * 34)]  # the last one has 35 numbers
    for left in (*torn, whole[: -4 * 35] + bytes(4000)):  # zeros: from a crash of the machine
        file.write_bytes(left)
        assert [item.number for item in store.read()] == [4, 1]
        store.add(given[-1])  # goes on where it was cut
        assert file.read_bytes() == whole
        for one, other in zip(store.read(), given, strict=True):
            assert one.number == other.number
            np.testing.assert_array_equal(one.prompt, other.prompt)
            np.testing.assert_array_equal(one.tokens, other.tokens)
