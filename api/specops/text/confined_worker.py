"""The part that all processes for untrusted programs share: see `confined_process`.

Such a process has no secrets, no files but its two pipes, and limits that the system enforces. Once
all imports are done, a seccomp filter allows only the system calls that memory and these pipes
need.

A request is a length (8 bytes, big-endian) and JSON. An answer is a kind (one byte), a length and
UTF-8.
"""

import codecs
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from specops.system import seccomp

HEADER = struct.Struct(">cQ")  # kind and length of an answer
LENGTH = struct.Struct(">Q")
READY, TEXT, REFUSED, EXCEEDED = b"R", b"T", b"E", b"L"

_CPU_SECONDS = 90  # in total; `confined_process` replaces the process earlier
_OOM_SCORE = "1000"  # when memory runs out, the kernel ends this process first
_CODECS = (  # for `encode`, and for `\N{...}` in a template's texts
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"),
    *("idna", "punycode", "unicode-escape", "raw-unicode-escape"),
)

# -- limits by the system --------------------------------------------------------------------------

_DENY = seccomp.ERROR | errno.EPERM
_PR_SET_PDEATHSIG = 1
_PROT_EXEC = 4
_BITS = 64

# For each processor, the numbers of its system calls. Memory can be mapped only without PROT_EXEC,
# so that no data becomes code.
_FREE = (
    *("brk", "munmap", "mremap", "madvise", "futex", "clock_gettime", "gettimeofday"),
    *("getrandom", "rt_sigreturn", "restart_syscall", "exit", "exit_group"),
)
_CALLS: dict[str, dict[str, int]] = {
    "x86_64": (
        {"read": 0, "write": 1, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12}
        | {"rt_sigreturn": 15, "mremap": 25, "madvise": 28, "exit": 60, "gettimeofday": 96}
        | {"futex": 202, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231}
        | {"getrandom": 318}
    ),
    "aarch64": (
        {"read": 63, "write": 64, "exit": 93, "exit_group": 94, "futex": 98}
        | {"clock_gettime": 113, "restart_syscall": 128, "rt_sigreturn": 139}
        | {"gettimeofday": 169, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222}
        | {"mprotect": 226, "madvise": 233, "getrandom": 278}
    ),
}


def filter_program(machine: str) -> list[seccomp.Instruction]:
    """Return the seccomp filter for a processor.

    It allows reading from descriptor 0, writing to descriptor 1, memory that is not executable,
    the clock, and exiting. All other calls fail with EPERM.

    Raises:
        KeyError: the numbers of this processor's calls are unknown.
    """
    arch, numbers = seccomp.ARCHITECTURES[machine], _CALLS[machine]
    program = [
        (seccomp.LOAD, 0, 0, seccomp.ARCH),
        (seccomp.EQUAL, 1, 0, arch),
        (seccomp.RETURN, 0, 0, seccomp.KILL),
    ]
    program += [(seccomp.LOAD, 0, 0, seccomp.NUMBER)]
    for name in _FREE:
        program += [(seccomp.EQUAL, 0, 1, numbers[name]), (seccomp.RETURN, 0, 0, seccomp.ALLOW)]
    for name, argument, test, value in (
        ("read", 0, seccomp.EQUAL, 0),
        ("write", 0, seccomp.EQUAL, 1),
        ("mmap", 2, seccomp.ANY_BIT, _PROT_EXEC),
        ("mprotect", 2, seccomp.ANY_BIT, _PROT_EXEC),
    ):
        passes, fails = (0, 1) if test == seccomp.EQUAL else (1, 0)
        program += [
            (seccomp.EQUAL, 0, 4, numbers[name]),
            (seccomp.LOAD, 0, 0, seccomp.ARGUMENTS + 8 * argument),
        ]
        program += [
            (test, passes, fails, value),
            (seccomp.RETURN, 0, 0, seccomp.ALLOW),
            (seccomp.RETURN, 0, 0, _DENY),
        ]
    return [*program, (seccomp.RETURN, 0, 0, _DENY)]


def _filter_system_calls() -> str:
    """Install the filter; return an empty text, or why there is none."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    bits = 8 * struct.calcsize("P")  # a 32-bit Python uses other numbers than a 64-bit kernel's
    try:
        program = filter_program(os.uname().machine if bits == _BITS else f"{bits}-bit programs")
    except KeyError as error:
        return f"the system calls of {error.args[0]} are not known here"
    return seccomp.install(program)


def confine(parent: int, memory_bytes: int, stack_bytes: int | None = None) -> str:
    """Give up everything that the work does not need. This cannot be undone.

    Args:
        parent: number of the process that this one must not outlive.
        memory_bytes: address space that it may use in addition to the idle process's.
        stack_bytes: size of this thread's stack; None: the system's limit.

    Returns:
        Why system calls are not filtered; empty if they are.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    time.tzset()  # reads the time zone's file
    for name in _CODECS:
        codecs.lookup(name)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent has ended")
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write(_OOM_SCORE)
    for limit, most in (
        (resource.RLIMIT_AS, _addresses() + memory_bytes),
        (resource.RLIMIT_STACK, stack_bytes),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        if most is not None:
            with suppress(OSError, ValueError):  # macOS refuses some
                resource.setrlimit(limit, (most, most))
    os.close(2)
    return _filter_system_calls()


def _addresses() -> int:
    """Return the size of the process's address space."""
    try:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # macOS, which does not enforce this limit either
        return 0


# -- requests and answers --------------------------------------------------------------------------


def serve(reply: Callable[[bytes], tuple[bytes, bytes]], unfiltered: str = "") -> None:
    """Answer requests until the parent closes the pipe.

    Args:
        reply: carries out a request; returns the answer's kind and text.
        unfiltered: why system calls are not filtered; the first message says so.
    """
    _write(READY, unfiltered.encode())
    while size := _read(LENGTH.size):
        _write(*reply(_read(*LENGTH.unpack(size))))


def _read(count: int) -> bytes:
    """Read this many bytes; fewer if the parent has closed the pipe."""
    data = bytearray()
    while len(data) < count and (more := os.read(0, min(count - len(data), 1 << 20))):
        data += more
    return bytes(data)


def _write(kind: bytes, text: bytes) -> None:
    left = memoryview(HEADER.pack(kind, len(text)) + text)
    while left:
        left = left[os.write(1, left) :]
