"""Memory of several NUMA nodes: weights are spread over those whose processors compute.

Weights are mapped files. On which node a page of a file lies is up to the memory policy of the
thread that reads it first, mbind(2) says; a mapping's own policy counts for nothing there. Without
one, all weights lie on the node of the thread that reads them when the model is loaded, and all
processors wait for that node's memory. So this thread gets a policy while it reads them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specops.system.cpus import allowed_cpus

_SYSTEM = Path("/sys/devices/system/node")
_DEFAULT, _INTERLEAVE = 0, 3  # policies, as linux/mempolicy.h numbers them
# Numbers of set_mempolicy and get_mempolicy, which no C library has functions for.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_WORD, _WORDS = 64, 16  # bits of a word of a set of nodes, and words: as many as there may be


def nodes(cpus: set[int] | None = None, system: Path = _SYSTEM) -> tuple[int, ...]:
    """Nodes that have memory and a CPU that this process may run on; none where nobody says.

    Args:
        cpus: that the process may run on; None: as the system says.
        system: the folder that describes each node.
    """
    allowed = allowed_cpus() if cpus is None else cpus
    try:
        found = _numbers((system / "has_memory").read_text())
        return tuple(
            node
            for node in found
            if allowed.intersection(_numbers((system / f"node{node}" / "cpulist").read_text()))
        )
    except (OSError, ValueError):
        return ()


def _numbers(text: str) -> list[int]:
    """Those of a list as the system writes it: `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    ]


def described() -> str:
    """Which nodes there are for weights, and what becomes of them."""
    places = nodes()
    if len(places) < 2:
        return "1"
    names = ", ".join(map(str, places))
    policy = _policy()
    if policy is None:
        return (
            f"{names}; weights lie where they were read first: the system refuses memory policies"
        )
    if policy != _DEFAULT:
        return f"{names}; weights lie as the process's own memory policy says"
    return f"{names}; weights are interleaved over them"


@contextmanager
def interleaved(places: Sequence[int] | None = None) -> Iterator[None]:
    """Let what this thread is the first to read of files lie on several nodes in turn.

    A thread that has a policy already, as `numactl` gives one, keeps it.

    Args:
        places: numbers of the nodes; None: as `nodes` finds them. One is as good as none.
    """
    over = nodes() if places is None else places
    changed = len(over) > 1 and _policy() == _DEFAULT and _set_policy(_INTERLEAVE, over)
    try:
        yield
    finally:
        if changed:
            _set_policy(_DEFAULT, ())


def _policy() -> int | None:
    """This thread's; None where there are none."""
    mode = ctypes.c_int(_DEFAULT)
    return mode.value if _call(1, ctypes.byref(mode), None, 0, None, 0) else None


def _set_policy(mode: int, over: Sequence[int]) -> bool:
    """Give this thread a policy; whether the system takes it."""
    words = (ctypes.c_uint64 * _WORDS)()
    for node in over:
        words[node // _WORD] |= 1 << node % _WORD
    return _call(0, mode, words if over else None, _WORD * _WORDS if over else 0)


def _call(which: int, *arguments: object) -> bool:
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return False
    words = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    failed: int = ctypes.CDLL(None).syscall(ctypes.c_long(numbers[which]), *words)
    return not failed
