"""Typing traces: what is typed is the files' text, and requests are those of llama.vim."""

import json
import math
from itertools import islice, pairwise

import pytest

from loadtest.editor_trace import RING_CHUNKS, Event, trace
from tests.stack.support import ROOT

FILES = {path.name: path.read_text("utf-8") for path in sorted(ROOT.glob("loadtest/*.py"))}
COMMON = {"id_slot", "input_prefix", "input_suffix", "input_extra", "prompt", "n_predict"}
COMMON |= {"samplers", "stream", "cache_prompt", "t_max_prompt_ms", "t_max_predict_ms"}
COMMON |= {"response_fields", "model"}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return [*trace(FILES, 120, seed=1)]


def test_the_seed_decides_the_trace(events: list[Event]) -> None:
    assert [*trace(FILES, 60, seed=1)] == [event for event in events if event.at < 60]
    assert [*trace(FILES, 60, seed=2)] != [*trace(FILES, 60, seed=3)]
    assert next(islice(trace(FILES, math.inf, seed=1), len(events), None)).at >= 120


def test_time_goes_on_at_the_speed_of_people(events: list[Event]) -> None:
    assert all(first.at <= second.at for first, second in pairwise(events))
    keys = [second.at - first.at for first, second in pairwise(events) if second.kind == "key"]
    assert 0.15 < sorted(keys)[len(keys) // 2] < 0.3
    assert {event.kind for event in events} == {"key", "jump", "warm"}


def test_what_stands_before_and_behind_the_cursor_is_a_files_text(events: list[Event]) -> None:
    typed = [event.body for event in events if event.kind != "warm"]
    for body in typed:
        before = body["input_prefix"].removeprefix("\n") + body["prompt"]
        after = body["input_suffix"].rstrip("\n")
        assert any(before in text and after in text for text in FILES.values())


def test_a_key_adds_a_character_or_begins_a_line(events: list[Event]) -> None:
    for first, second in pairwise(events):
        if second.kind == "key":
            was, now = first.body, second.body
            assert now["input_suffix"] == was["input_suffix"]
            if now["input_prefix"] == was["input_prefix"]:
                assert now["prompt"][:-1].strip() == was["prompt"].strip()
            else:
                # A line of blanks is no prompt, and its blanks are not in the prefix either.
                assert now["input_prefix"].endswith(was["prompt"].strip() + "\n")
                assert not now["prompt"].strip()


def test_chunks_are_read_ahead_before_they_go_with_a_request(events: list[Event]) -> None:
    read: list[str] = []
    for event in events:
        chunks = [chunk["text"] for chunk in event.body["input_extra"]]
        assert len(chunks) <= RING_CHUNKS
        assert all(chunk["text"] in FILES[chunk["filename"]] for chunk in event.body["input_extra"])
        if event.kind == "warm":
            assert event.body["n_predict"] == 0
            read.append(chunks[-1])
        assert {*chunks} <= {*read}
    assert len(read) > 5


def test_requests_have_llama_vims_fields_in_json(events: list[Event]) -> None:
    for event in events:
        more = {"temperature"} if event.kind == "warm" else {"n_indent", "top_k", "top_p", "stop"}
        assert event.body.keys() == COMMON | more
        assert json.loads(json.dumps(event.body)) == event.body


def test_files_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="file with text"):
        trace({"a.py": "\n \n"}, 1, seed=0)
