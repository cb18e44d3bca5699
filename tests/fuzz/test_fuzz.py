"""A few cases of each fuzzer; `make fuzz` tries more, and `--only` those of one."""

import json
from pathlib import Path

import pytest

from specops.http.protocols import PROTOCOLS
from specops.http.security.request_body import MAX_BODY_BYTES
from tests.fuzz import grammars, requests, sockets, texts
from tests.fuzz.parsers import READERS, Subject

DAMAGED = 150


def test_hostile_grammars_are_refused_or_followed_within_the_limits() -> None:
    assert "25 cases" in grammars.run(25, 0, 1)
    grammars.run(1, 0, 115_332)  # with more fuel a mask takes 0.27 s before it ends


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    subject = Subject(name, tmp_path)
    read = sum(subject.run(seed) for seed in range(DAMAGED))
    assert 0 <= read < DAMAGED


def test_odd_bodies_get_an_answer_or_a_word(tmp_path: Path) -> None:
    made = requests.attack(tmp_path, range(3))
    assert PROTOCOLS.prompts.keys() <= set(made.paths)
    assert made.counts[200] > 60
    assert made.counts[400] + made.counts[422] > 60


def test_clients_that_break_off_end_neither_the_server_nor_others() -> None:
    assert "60 cases" in sockets.run(60, 0, 1)


def test_every_byte_of_every_request_is_a_case_and_seeds_visit_all() -> None:
    attack = sockets.Attack(0)
    per_request = {name: len(content) + 1 for name, content in sockets.requests().items()}
    huge = 6 * len(sockets._HUGE)
    assert attack.number == (sum(per_request.values()) + huge) * len(sockets.WAYS)
    visited = {seed * sockets._STEP % attack.number for seed in range(attack.number)}
    assert len(visited) == attack.number


def test_every_endpoint_with_a_prompt_gets_long_texts() -> None:
    assert PROTOCOLS.prompts.keys() <= texts._BODIES.keys()
    asked = [texts.request(seed, "model")[0] for seed in range(400)]
    assert {ask.path for ask in asked} == texts._BODIES.keys()
    assert max(len(ask.content()) for ask in asked) > MAX_BODY_BYTES  # some are refused unread
    whole = [ask for ask in asked if isinstance(ask.body, bytes) and len(ask.body) < MAX_BODY_BYTES]
    assert all(json.loads(ask.body)["model"] == "model" for ask in whole)  # type: ignore[arg-type]
