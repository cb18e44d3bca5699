"""The process that renders chat templates.

A template comes from strangers, with the model's weights. Jinja's sandbox keeps it away from
Python's objects, but lets it loop for days or make values of any size, and a sandbox within an
interpreter has had holes before. So templates run in a process of their own that has nothing to
give away: no environment, no files but its two pipes, and limits that the system holds. Once all
imports are done, a seccomp filter leaves it the system calls that memory and these pipes need.
`template_process` starts the process, stops it when a rendering takes too long, and believes
nothing that comes back.

A request is a length (8 bytes, big-endian) and JSON:

    {"source": template, "names": {"bos_token": ..., ...}, "values": {"messages": ..., ...}}

Without values the template is only compiled. An answer is a kind (one byte), a length and UTF-8.

This module imports nothing of the package, so that the process stays small. Its imports include
what Python and Jinja would otherwise load later, when no file can be opened any more. The serving
process never imports it, nor Jinja.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import html
import json
import os
import pprint
import resource
import signal
import struct
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.constants
import jinja2.debug
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specops.system import seccomp

HEADER = struct.Struct(">cQ")  # kind and length of an answer
LENGTH = struct.Struct(">Q")
READY, TEXT, REFUSED, EXCEEDED = b"R", b"T", b"E", b"L"

_MEMORY_BYTES = 128 << 20  # of addresses, beside those that the idle process has
_CPU_SECONDS = 90  # in all: `template_process` replaces the process before
_ERROR_CHARACTERS = 2000
_FEW = 16  # compiled templates that are kept; a model has two at most
_OOM_SCORE = "1000"  # where memory runs out, the kernel ends this process first
_LATE_IMPORTS = (html, jinja2.constants, jinja2.debug, pprint, textwrap, unicodedata)
_CODECS = (  # for `encode`, and for `\N{...}` in a template's texts
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"),
    *("idna", "punycode", "unicode-escape", "raw-unicode-escape"),
)

# -- what the system allows ------------------------------------------------------------------------

_DENY = seccomp.ERROR | errno.EPERM
_PR_SET_PDEATHSIG = 1
_PROT_EXEC = 4
_BITS = 64

# For each processor, the numbers of its calls. The kinds of memory are allowed without PROT_EXEC:
# no code can be brought in as data.
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

    Allowed are reading from descriptor 0, writing to descriptor 1, memory that is not executable,
    the clock, and the end. All other calls fail with EPERM.

    Raises:
        KeyError: the numbers of this processor's calls are not known.
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


def _close_system_calls() -> str:
    """Install the filter; return why not if the system has none for us."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    bits = 8 * struct.calcsize("P")  # a 32-bit Python has other calls than the kernel's machine
    try:
        program = filter_program(os.uname().machine if bits == _BITS else f"{bits}-bit programs")
    except KeyError as error:
        return f"the system calls of {error.args[0]} are not known here"
    return seccomp.install(program)


def confine(parent: int) -> str:
    """Give up everything that rendering does not need. There is no way back.

    Args:
        parent: the process that this one must not outlive.

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
        (resource.RLIMIT_AS, _addresses() + _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        with suppress(OSError, ValueError):  # macOS refuses some
            resource.setrlimit(limit, (most, most))
    os.close(2)
    return _close_system_calls()


def _addresses() -> int:
    """Return the size of the process's address space."""
    try:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # macOS; it does not hold this limit either
        return 0


# -- templates -------------------------------------------------------------------------------------


class _GenerationBlocks(Extension):
    """`{% generation %}` marks text for training. Here the block only returns its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's `namespace` without names that give access to Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set the name `self`
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be set on a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)  # the class itself would give templates its methods


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in `transformers`: Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def environment(names: Mapping[str, str]) -> ImmutableSandboxedEnvironment:
    """Return what `apply_chat_template` of transformers compiles a template with.

    Args:
        names: the text of `bos_token` and so on, by name.
    """
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlocks],
        autoescape=False,  # the result is a prompt, not HTML
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_refuse,
        strftime_now=_now,
        namespace=_PlainNamespace,
        dict=_new_dict,
        **names,
    )
    return made


@lru_cache(maxsize=_FEW)
def _compiled(source: str, names: tuple[tuple[str, str], ...]) -> Template:
    return environment(dict(names)).from_string(source)


def answer(request: bytes, compiled: Callable[..., Template] = _compiled) -> tuple[bytes, bytes]:
    """Do what a request asks for; return the kind and the text of the answer."""
    try:
        try:
            asked = json.loads(request)
            template = compiled(asked["source"], tuple(asked["names"].items()))
            values = asked["values"]
            text = "" if values is None else template.render(values)
            return TEXT, text.encode("utf-8", "surrogatepass")
        except MemoryError:
            raise
        except Exception as error:  # templates fail in every way that Python does
            return REFUSED, str(error)[:_ERROR_CHARACTERS].encode("utf-8", "replace")
    except MemoryError:  # of a message, too: `raise_exception` takes values of any size
        return EXCEEDED, b""


# -- requests and answers --------------------------------------------------------------------------


def serve(reply: Callable[[bytes], tuple[bytes, bytes]] = answer, unfiltered: str = "") -> None:
    """Answer requests until there are no more.

    Args:
        reply: does what a request asks for.
        unfiltered: why system calls are not filtered, for the first answer.
    """
    _write(READY, unfiltered.encode())
    while size := _read(LENGTH.size):
        _write(*reply(_read(*LENGTH.unpack(size))))


def _read(count: int) -> bytes:
    """Read so many bytes; fewer if the parent has closed the pipe."""
    data = bytearray()
    while len(data) < count and (more := os.read(0, min(count - len(data), 1 << 20))):
        data += more
    return bytes(data)


def _write(kind: bytes, text: bytes) -> None:
    left = memoryview(HEADER.pack(kind, len(text)) + text)
    while left:
        left = left[os.write(1, left) :]


def main(parent: int) -> None:
    """Be the process of templates for a parent, until that closes the socket."""
    serve(unfiltered=confine(parent))
