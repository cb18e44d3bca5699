"""Clients that cut, reset and stall hurt nobody; `make fuzz ARGS="--only sockets"` tries more."""

from tests.fuzz import sockets


def test_clients_that_break_off_end_neither_the_server_nor_others() -> None:
    assert "60 cases" in sockets.run(60, 0, 1)


def test_every_byte_of_every_request_is_a_case_and_seeds_visit_all() -> None:
    attack = sockets.Attack(0)
    per_request = {name: len(content) + 1 for name, content in sockets.requests().items()}
    huge = 6 * len(sockets._HUGE)
    assert attack.number == (sum(per_request.values()) + huge) * len(sockets.WAYS)
    visited = {seed * sockets._STEP % attack.number for seed in range(attack.number)}
    assert len(visited) == attack.number
