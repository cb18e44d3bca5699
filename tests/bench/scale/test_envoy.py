"""Maglev's table sends each key to the replica that the real Envoy chooses."""

from pathlib import Path

from bench.scale.envoy import Maglev
from tests.deploy.gateway.running import row
from tests.loopback import HOST


def test_every_key_goes_to_the_replica_of_the_table(tmp_path: Path) -> None:
    with row(5, tmp_path, {"GATEWAY_CLIENT_RATE": "5000"}) as fakes:
        table = Maglev([f"{HOST}:{fake.port}" for fake in fakes.fakes])
        homes = set()
        for number in range(40):
            before = [len(fake.asked) for fake in fakes.fakes]
            key = fakes.key({"prompt": "a"}, headers={"X-Session-ID": str(number)})
            assert key is not None
            homes.add(home := table.home(key))
            assert len(fakes.fakes[home].asked) == before[home] + 1, f"{key}: not {home}"
        assert len(homes) == 5
