"""NUMA nodes: weights are spread over the memory of all nodes whose processors compute.

Weights are mapped files. The memory policy of the thread that first reads a page of a file decides
on which node the page lies; the policy of a mapping has no effect on files (mbind(2)). Without a
policy, all weights would lie on the node of the thread that loads the model, and all processors
would wait for the memory of that node. So this thread gets a policy while it reads the weights.
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
# Numbers of the system calls set_mempolicy and get_mempolicy; the C library has no functions.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_WORD, _WORDS = 64, 16  # bits in a word, and words in a set of nodes


def nodes(cpus: set[int] | None = None, system: Path = _SYSTEM) -> tuple[int, ...]:
    """Return the nodes with memory and with a CPU of this process; none if the system does not say.

    Args:
        cpus: CPUs that the process may run on; None: those of its affinity.
        system: folder with a description of each node.
    """
    allowed = allowed_cpus() if cpus is None else cpus
    try:
        found = _numbers((system / "has_memory").read_text("utf-8"))
        return tuple(
            node
            for node in found
            if allowed.intersection(
                _numbers((system / f"node{node}" / "cpulist").read_text("utf-8"))
            )
        )
    except (OSError, ValueError):
        return ()


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    ]


def described() -> str:
    """Describe the nodes and how weights are placed on them."""
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
    """Place the pages of files that this thread reads first on several nodes in turn.

    If the thread already has a policy, for example from `numactl`, it keeps this policy.

    Args:
        places: numbers of the nodes; None: the result of `nodes`. One node needs no policy.
    """
    over = nodes() if places is None else places
    changed = len(over) > 1 and _policy() == _DEFAULT and _set_policy(_INTERLEAVE, over)
    try:
        yield
    finally:
        if changed:
            _set_policy(_DEFAULT, ())


def _policy() -> int | None:
    """Return this thread's policy; None if the system has no policies."""
    mode = ctypes.c_int(_DEFAULT)
    return mode.value if _call(1, ctypes.byref(mode), None, 0, None, 0) else None


def _set_policy(mode: int, over: Sequence[int]) -> bool:
    """Set this thread's policy; return whether the system accepted it."""
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
