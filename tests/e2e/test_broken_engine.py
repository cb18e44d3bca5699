"""`make up` beside a real engine that starts no container: it says why, and runs natively.

And what the engine of these tests leaves behind.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.engine import CANNOT_RUN
from tests.stack.support import native_stack, run, tool
from tests.waiting import started

pytestmark = pytest.mark.e2e

# It makes no bridge and no firewall rules, as no container ever runs. Without a bridge an engine
# deletes `docker0`, which may be that of another one: hence a network of its own.
ALONE = (
    *("--bridge=none", "--iptables=false", "--ip6tables=false"),
    *("--ip-forward=false", "--ip-masq=false"),
)
BROKEN = ("--add-runtime", "broken=/bin/false", "--default-runtime", "broken")


@contextmanager
def engine() -> Iterator[str]:
    """An engine whose runtime fails; yields the address of its socket."""
    if os.geteuid() != 0 or tool("dockerd") is None or tool("docker") is None:
        pytest.skip("NO BROKEN ENGINE WAS TRIED: it takes root, dockerd and docker")
    with tempfile.TemporaryDirectory() as name:  # the paths of its sockets must be short
        folder = Path(name)
        address = f"unix://{folder}/docker.sock"
        places = ("--host", address, "--pidfile", folder / "pid")
        places += ("--data-root", folder / "data", "--exec-root", folder / "exec")
        command = ["unshare", "--net", "dockerd", *places, *ALONE, *BROKEN]

        def answers() -> bool:
            return run("docker", "--host", address, "info").returncode == 0

        with started(command, folder / "log", answers):
            yield address


def test_the_reason_is_printed_and_the_native_stack_serves(tmp_path: Path) -> None:
    with engine() as address, native_stack(tmp_path, "ARGS=", DOCKER_HOST=address) as stack:
        first = stack.output.read_text().splitlines()[0]
        assert first.startswith(
            "Running natively, without Grafana: the Docker Engine cannot start a container with a "
            "memory limit ("
        )
        assert "/bin/false did not terminate successfully" in first
        body = {"prompt": "def __enter__(self):", "max_new_tokens": 4}
        answer = httpx.post(f"{stack.api}/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text


# An engine with its own network, /run and data folder, beside that of other tests, whose mounts it
# must not see. Before it there is no rule, or there are a few.
ENGINE = """
awk '{{print $2}}' /proc/mounts | grep -E "^($PWD/.cache/e2e|/run)/" | sort -r | xargs -r umount -l
mkdir -p .cache/e2e && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs .cache/e2e || exit 125
{rules} || exit 125
found() {{
    for firewall in iptables ip6tables; do $firewall-save | sed '/^#/d; s/\\[.*\\]//'; done
    cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding
    ip -brief link
}}
found >{folder}/before
scripts/docker-engine start && found >{folder}/during &&
    scripts/docker-engine stop && found >{folder}/after
"""
RULES = (
    "iptables -P FORWARD ACCEPT && iptables -A INPUT -p tcp --dport 4444 -j DROP && "
    "iptables -N MINE && ip6tables -t mangle -A INPUT -p tcp --dport 4445 -j DROP"
)


@pytest.mark.parametrize("rules", ["true", RULES], ids=["no rules", "rules"])
def test_an_engine_of_ours_leaves_the_firewall_as_it_found_it(rules: str, tmp_path: Path) -> None:
    if os.geteuid() != 0 or tool("dockerd") is None or tool("iptables") is None:
        pytest.skip("NO FIREWALL WAS TRIED: it takes root, dockerd and iptables")
    program = ENGINE.format(rules=rules, folder=tmp_path)
    done = run("unshare", "--net", "--mount", "bash", "-c", program, env={"DOCKER_HOST": ""})
    if done.returncode in {CANNOT_RUN, 125}:
        pytest.skip(f"NO FIREWALL WAS TRIED: {done.stderr}")
    assert done.returncode == 0, done.stderr
    before, during, after = (
        (tmp_path / name).read_text() for name in ("before", "during", "after")
    )
    assert "DOCKER" in during
    assert after == before
