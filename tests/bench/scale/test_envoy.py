"""The simulation chooses as the real Envoy does, key by key.

`tests/gateway/test_key.py` compares the keys themselves.
"""

from __future__ import annotations

import threading
from pathlib import Path

from bench.scale.envoy import Maglev
from bench.scale.traffic import Talk, key
from tests.gateway.running import Row, row
from tests.loopback import HOST
from tests.waiting import wait


def table(fakes: Row) -> Maglev:
    return Maglev([f"{HOST}:{fake.port}" for fake in fakes.fakes])


def asked(fakes: Row) -> list[int]:
    return [len(fake.asked) for fake in fakes.fakes]


def test_a_replica_that_has_its_fill_is_passed_over_as_the_table_says(tmp_path: Path) -> None:
    with row(5, tmp_path, {"GATEWAY_CLIENT_RATE": "5000"}) as fakes:
        held = threading.Event()
        for fake in fakes.fakes:
            fake.held = held
        chosen, threads = table(fakes), []
        passed = 0
        try:
            for number in range(25):
                talk = Talk(f"held {number % 2}", "", ("a",))  # two keys for five replicas
                before = asked(fakes)
                route = key(talk)
                place = chosen.choose(route, before, sum(before))
                passed += place != chosen.home(route)
                headers = {"X-Session-ID": f"held {number % 2}"}
                thread = threading.Thread(target=fakes.post, kwargs={"headers": headers})
                thread.start()
                threads.append(thread)
                wait("it arrived", lambda count=number + 1: sum(asked(fakes)) == count)
                after = asked(fakes)
                assert after[place] == before[place] + 1, f"request {number}: {before} to {after}"
        finally:
            held.set()
            for thread in threads:
                thread.join()
        assert passed > 0
