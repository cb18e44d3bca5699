"""What a template takes, and what it reaches, ends at the process that renders it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from specops.text import confined_process, confined_worker, template_worker
from specops.text.confined_process import (
    ProgramLimitExceeded,
    ProgramProcessError,
    ProgramRefusal,
)
from specops.text.template_process import TemplateProcess
from tests.fuzz.rendering import NAMES, Call, values
from tests.waiting import PATIENCE, printed, wait

CLOCK_SECONDS = TemplateProcess.clock_seconds
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="takes seccomp and procfs")
TIME, MEMORY, LENGTH = "takes longer than", "takes too much memory", "writes more than 16 MiB"
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"
)
HOSTILE = {
    ENDLESS: TIME,
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ 'b' in x }}{% endfor %}": TIME,
    "{% set c = cycler(1) %}{% for i in range(100000) %}"
    "{% for j in range(100000) %}{{ c.next() and '' }}{% endfor %}{% endfor %}": TIME,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": TIME,
    "{{ 10 ** (10 ** 10) }}": TIME,
    "{{ lipsum(900, false, 6000, 6001) }}": TIME,
    GROWING.replace("START", "9").replace("NEXT", "ns.x * ns.x"): TIME,
    "{% for a in range(100000) %}{{ range(100000) | sort | length and '' }}{% endfor %}": TIME,
    "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 10000) }}": "takes",
    GROWING.replace("START", "'a'").replace("NEXT", "ns.x + ns.x"): MEMORY,
    GROWING.replace("START", "'a'").replace("NEXT", "ns.x ~ ns.x"): MEMORY,
    "{{ 'a' | indent('b' * 200000000) }}": MEMORY,
    "{{ ('a\n' * 100000) | indent('b' * 1000000) }}": MEMORY,
    "{{ ('{0}' * 100000).format('a' * 100000) }}": MEMORY,
    "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}": MEMORY,
    "{{ '{0:999999999}'.format(1) }}": MEMORY,
    "{{ '%1000000000d' % 1 }}": MEMORY,
    "{{ '%*d' | format(1000000000, 1) }}": MEMORY,
    "{{ 'a' * 10**10 }}": MEMORY,
    "{{ [0] * 10**10 }}": MEMORY,
    "{{ 'a'.center(10**10) }}": MEMORY,
    "{{ range(100000) | list | tojson(indent=10000) }}": MEMORY,
    "{{ range(100000) | join('b' * 100000) }}": MEMORY,
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}": MEMORY,
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}": MEMORY,
    "{% set x = 'a' * 100000 %}{{ raise_exception([x] * 10000) }}": MEMORY,
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}": MEMORY,
    "{{ 'a' * 20000000 }}": LENGTH,
}  # fmt: skip
# What honest templates use, and what Python and Jinja load only when it is used.
HONEST = [
    "{{ 'a long line' | wordwrap(4) }}{{ 'see http://a.example' | urlize }}",
    "{{ {'a': [1]} | pprint }}{{ [1, 2] | random is number }}",
    "{{ '<b>1 &lt; 2</b>' | striptags }}{{ '<' | escape }}{{ [3, 1] | sort | tojson }}",
    "{{ '\\N{BULLET}\\u00e9\\x41' }}{{ 'é'.encode('latin-1') }}{{ 'ü'.encode('idna') }}",
    "{{ 'ß'.casefold() }}{{ 'a-b' | title }}{{ 12345 | filesizeformat }}{{ '%5.1f' % 2 }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ 'x,y'.split(',') | join('-') }}{{ '{:>4}'.format(1) }}",
    "{{ strftime_now('%d %b %Y %Z') }}{{ '\\ud800' }}{{ 'a' * 70000 }}",
    "{{ missing }}{{ missing.deeper }}",
    "{{ raise_exception('é ' * 9) }}",
    "{{ 1 / 0 }}{{",
    "{{ 1 / 0 }}",
]  # fmt: skip


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    with_own = TemplateProcess()
    yield with_own
    with_own.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[TemplateProcess]:
    """For tests that ask nothing of the process itself."""
    for_all = TemplateProcess()
    yield for_all
    for_all.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(TemplateProcess, "seconds", 60.0)
    monkeypatch.setattr(TemplateProcess, "clock_seconds", 60.0)


@contextmanager
def hurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateProcess, "seconds", 0.1)
        yield


def pid(process: TemplateProcess) -> int:
    assert process._child is not None
    return process._child.result()._process.pid


def peak_of_this_process() -> Callable[[], int]:
    """Start anew to note the most memory of this process; returns how to read its rise, in KiB."""
    if sys.platform != "linux":
        return lambda: 0
    Path("/proc/self/clear_refs").write_text("5")

    def highest() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]

    before = highest()
    return lambda: highest() - before


def works(process: TemplateProcess) -> bool:
    return process.render("{{ a }}", {}, {"a": 5}) == "5"


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_that_takes_too_much_is_ended_and_the_next_is_not(
    source: str, shared: TemplateProcess
) -> None:
    ended = shared.ended["limit"]
    highest = peak_of_this_process()
    limits = nullcontext() if HOSTILE[source] in (MEMORY, LENGTH) else hurried()
    with pytest.raises(ProgramLimitExceeded, match=HOSTILE[source]), limits:
        shared.render(source, {}, {})
    assert shared.ended == {"limit": ended + 1, "crash": 0}
    assert works(shared)
    assert highest() < 60_000  # KiB


@pytest.mark.parametrize("seed", range(3))
def test_any_call_with_hostile_values_is_survived(seed: int, shared: TemplateProcess) -> None:
    """A few of the calls that `python -m tests.fuzz --only rendering` makes."""
    draw = random.Random(seed)
    for name in draw.sample(NAMES, 12):
        with suppress(ProgramLimitExceeded, ProgramRefusal), hurried():
            shared.render(Call.draw(name, draw).source, {}, values())
    assert works(shared)
    assert shared.ended["crash"] == 0


@LINUX
def test_memory_is_bounded_by_the_system(process: TemplateProcess) -> None:
    works(process)
    limits = Path(f"/proc/{pid(process)}/limits").read_text()
    found = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()[1:]}
    most = int(found["Max address space"][1])
    assert 128 << 20 < most < 256 << 20
    for name in ("file size", "core file size", "processes", "open files"):
        assert found[f"Max {name}"] == ["0", "0"]
    assert found["Max cpu time"] == ["90", "90"]
    assert Path(f"/proc/{pid(process)}/oom_score_adj").read_text() == "1000\n"


@LINUX
def test_a_process_is_replaced_before_its_processor_time_is_used_up(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert confined_process._USED_UP_SECONDS + CLOCK_SECONDS < confined_worker._CPU_SECONDS
    works(process)
    first = pid(process)
    monkeypatch.setattr(confined_process, "_USED_UP_SECONDS", 0.0)
    assert works(process)
    assert pid(process) != first
    assert process.ended == {"limit": 0, "crash": 0}


# -- what the process reaches ----------------------------------------------------------------------

# A worker whose template broke out: it runs the request as Python, on behalf of nobody.
ESCAPED = """
import sys
from specops.text import confined_worker

import _posixsubprocess, ctypes, mmap, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(64)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def run(request):
    try:
        exec(request.decode())
    except BaseException as error:
        return b"E", repr(error).encode()
    return b"T", b"done"

parent = int(sys.argv[1])
confined_worker.serve(run, confined_worker.confine(parent, 128 << 20))
"""
FORBIDDEN = [
    "open('/etc/passwd')",
    "open('/tmp/escaped', 'w')",
    "open('/proc/self/environ')",
    "open(f'/proc/{parent}/mem', 'rb')",
    "os.stat('/etc/passwd')",
    "os.listdir('/')",
    "os.mkdir('/tmp/escaped')",
    "os.unlink('/tmp/escaped')",
    "socket.socket()",
    "socket.socket(socket.AF_UNIX)",
    "socket.socketpair()",
    "os.pipe()",
    "os.dup(0)",
    "os.fork()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.execv('/bin/true', ['true'])",
    "os.kill(parent, 0)",
    "os.kill(parent, signal.SIGKILL)",
    "os.setuid(0)",
    "os.nice(1)",
    "os.sched_setaffinity(0, {0})",
    "call('setrlimit', resource.RLIMIT_CPU, buffer)",
    "resource.prlimit(parent, resource.RLIMIT_AS)",
    "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "call('mprotect', ctypes.c_void_p(id(buffer) & ~4095), 4096, 7)",
    "call('ptrace', 16, parent, 0, 0)",
    "call('process_vm_readv', parent, buffer, 1, buffer, 1, 0)",
    "call('prctl', 1, 0, 0, 0, 0)",  # PR_SET_PDEATHSIG
    "call('unshare', 0x10000000)",
    "call('syscall', 425, 1, buffer)",  # io_uring_setup
    "call('syscall', 319, buffer, 0)",  # memfd_create
    "os.read(1, 1)",
    "os.write(0, b'x')",
]


@LINUX
@pytest.mark.parametrize("code", FORBIDDEN)
def test_code_that_broke_out_of_the_sandbox_is_alone(code: str, escaped: Escaped) -> None:
    said = escaped(code)
    assert "PermissionError(1," in said, said


@LINUX
def test_code_that_broke_out_may_compute(escaped: Escaped) -> None:
    code = "import time; x = ['a' * 50_000 for _ in range(500)]; time.time(); os.urandom(8)"
    assert escaped(code) == "done"
    assert "MemoryError" in escaped("x = b'a' * (200 << 20)")
    assert escaped("x = None") == "done"


Escaped = Callable[[str], str]


@pytest.fixture(scope="module")
def escaped() -> Iterator[Escaped]:
    with subprocess.Popen(
        [sys.executable, "-I", "-c", ESCAPED, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
        cwd="/",
    ) as worker:
        assert worker.stdin
        assert worker.stdout
        pipe, back = worker.stdin, worker.stdout

        def answer() -> str:
            _, size = confined_worker.HEADER.unpack(back.read(confined_worker.HEADER.size))
            return back.read(size).decode()

        def ask(code: str) -> str:
            pipe.write(confined_worker.LENGTH.pack(len(code)) + code.encode())
            pipe.flush()
            return answer()

        assert answer() == ""  # filtered
        yield ask


@LINUX
def test_the_process_holds_nothing_of_the_service(process: TemplateProcess) -> None:
    os.environ["SPECOPS_API_KEYS"] = "secret"
    try:
        with Path("/etc/passwd").open() as file:
            os.set_inheritable(file.fileno(), True)
            works(process)
    finally:
        del os.environ["SPECOPS_API_KEYS"]
    own = Path(f"/proc/{pid(process)}")
    assert sorted(path.name for path in (own / "fd").iterdir()) == ["0", "1"]
    names = {item.partition(b"=")[0] for item in (own / "environ").read_bytes().split(b"\0")}
    assert names <= {b"", b"TZ", b"LC_CTYPE", b"LD_LIBRARY_PATH", b"OPENBLAS_NUM_THREADS"}
    status = (own / "status").read_text()
    assert "Seccomp:\t2\n" in status
    assert "NoNewPrivs:\t1\n" in status
    assert os.readlink(own / "cwd") == "/"


def verdict(machine: str, arch: int, number: int, *arguments: int) -> int:
    """What seccomp would do: a small interpreter of BPF."""
    data = {0: number, 4: arch} | {16 + 8 * i: value for i, value in enumerate(arguments)}
    program, at, value = confined_worker.filter_program(machine), 0, 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code == 0x20:
            value = data.get(operand, 0)
        elif code == 0x15:
            at += true if value == operand else false
        elif code == 0x45:
            at += true if value & operand else false
        else:
            assert code == 0x06
            return operand


# From <asm/unistd_64.h> of x86-64, and <asm-generic/unistd.h>, which arm64 has.
ARCHS = {
    "x86_64": (
        0xC000003E,
        {"read": 0, "write": 1, "mmap": 9, "mprotect": 10},
        {11, 12, 15, 25, 28, 60, 96, 202, 219, 228, 231, 318},
    ),
    "aarch64": (
        0xC00000B7,
        {"read": 63, "write": 64, "mmap": 222, "mprotect": 226},
        {93, 94, 98, 113, 128, 139, 169, 214, 215, 216, 233, 278},
    ),
}


@pytest.mark.parametrize("machine", ARCHS)
def test_the_filter_allows_memory_and_two_pipes(machine: str) -> None:
    arch, checked, free = ARCHS[machine]
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    for number in (*range(600), 1 << 30, (1 << 30) + 1):  # also those of x32
        if number not in checked.values():
            assert verdict(machine, arch, number) == (allow if number in free else deny), number
        assert verdict(machine, arch ^ 1, number) == kill
    for name, passes, fails in (
        ("read", (0,), (1,)),
        ("read", (0,), (5,)),
        ("write", (1,), (0,)),
        ("write", (1,), (2,)),
        ("mmap", (0, 4096, 3), (0, 4096, 5)),
        ("mprotect", (0, 4096, 3), (0, 4096, 7)),
    ):
        assert verdict(machine, arch, checked[name], *passes) == allow
        assert verdict(machine, arch, checked[name], *fails) == deny


def test_a_processor_with_unknown_calls_has_no_filter() -> None:
    with pytest.raises(KeyError, match="riscv64"):
        confined_worker.filter_program("riscv64")


# -- honest templates ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", HONEST)
def test_everything_works_as_without_the_process(source: str, shared: TemplateProcess) -> None:
    def here() -> str:
        return template_worker.environment({"a": "b"}).from_string(source).render({})

    def there() -> str:
        return shared.render(source, {"a": "b"}, {})

    def outcome(render: Callable[[], str]) -> str:
        try:
            return render()
        except Exception as error:
            return f"error: {error}"

    assert outcome(there) == outcome(here)


def test_values_arrive_as_they_are(shared: TemplateProcess) -> None:
    given = {"a": [None, True, 10**30, -0.0, float("inf"), "é\ud800\0", {"": [[]]}, 0.1]}
    source = "{{ a }}{{ a is mapping }}{{ a[6] is mapping }}{{ a[5] }}"
    here = template_worker.environment({}).from_string(source).render(given)
    assert shared.render(source, {}, given) == here


def test_a_conversation_of_a_mebibyte_is_within_the_limits(shared: TemplateProcess) -> None:
    source = """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{{ m.role }}: {{ m.content | trim | replace('x', 'yy') }}{{ '\n' * 2 }}{% endfor %}
{{ messages[1:] | tojson(indent=2) | length }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}/{{ ns.n * 10000 }}"""
    roles = ("assistant", "user")
    many = [{"role": roles[i % 2], "content": " x" * 31 + "\U0001f600"} for i in range(16_000)]
    text = shared.render(source, {}, {"messages": many})
    assert text.splitlines()[-1] == "8000/160000000"
    nested: Any = [[] for _ in range(300_000)]
    assert shared.render("{{ a[1:] | length }}", {}, {"a": nested}) == "299999"


def test_renderings_of_many_threads_do_not_mix(process: TemplateProcess) -> None:
    def ask(number: int) -> str:
        try:
            return process.render("{{ a }}{% if a == 50 %}{{ 'b' * 10**10 }}{% endif %}", {}, {
                "a": number
            })  # fmt: skip
        except ProgramLimitExceeded:
            return "too much"

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(100)))
    assert answers == ["too much" if number == 50 else str(number) for number in range(100)]


# -- the process's life ----------------------------------------------------------------------------


def test_a_process_that_ends_between_renderings_is_missed_by_nobody(
    process: TemplateProcess,
) -> None:
    works(process)
    old = pid(process)
    os.kill(old, signal.SIGKILL)
    process._child.result()._process.wait()  # type: ignore[union-attr]
    assert works(process)
    assert pid(process) != old
    assert process.ended == {"limit": 0, "crash": 1}


@LINUX
@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (signal.SIGKILL, ProgramProcessError, "the system ended the process"),
        (signal.SIGSEGV, ProgramLimitExceeded, r"breaks the process that runs it \(SIGSEGV\)"),
    ],
)
def test_a_process_that_ends_in_a_rendering_costs_that_one_alone(
    number: int, error: type[Exception], words: str, process: TemplateProcess
) -> None:
    works(process)
    before = cpu_ticks(pid(process))

    def end() -> None:
        wait("it computes", lambda: cpu_ticks(pid(process)) >= before + 5)
        os.kill(pid(process), number)

    ending = Thread(target=end)
    ending.start()
    with pytest.raises(error, match=words):
        process.render(ENDLESS, {}, {})
    ending.join()
    assert works(process)
    assert process.ended == {"limit": 0, "crash": 1}


def cpu_ticks(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11])


def test_the_thread_that_first_needs_the_process_may_end(process: TemplateProcess) -> None:
    first = Thread(target=works, args=(process,))
    first.start()
    first.join()
    old = pid(process)
    assert works(process)
    assert pid(process) == old


def test_the_process_runs_the_package_that_started_it(tmp_path: Path) -> None:
    """Not another one that is installed, if this one comes by PYTHONPATH."""
    package = Path(confined_process.__file__).parents[1]
    copy = tmp_path / "specops" / "text"
    copy.mkdir(parents=True)
    copy.with_name("system").mkdir()
    files = ("__init__", "system/__init__", "system/seccomp", "text/__init__")
    programs = ("confined_process", "confined_worker", "template_process", "template_worker")
    for name in (*files, *(f"text/{name}" for name in programs)):
        shutil.copy(package / f"{name}.py", tmp_path / "specops" / f"{name}.py")
    with (copy / "template_worker.py").open("a") as file:
        file.write("\nenvironment_of, environment = environment, lambda names: environment_of("
                   "{**names, 'copied': 'yes'})\n")  # fmt: skip
    code = "from specops.text.template_process import SHARED; print(SHARED.render('{{ copied }}', "
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert printed(code + "{}, {}))", cwd=Path("/"), env=env) == "yes\n"


OWNER = f"""
from specops.text.template_process import SHARED
SHARED.render("", {{}}, {{}})
print(SHARED._child.result()._process.pid, flush=True)
SHARED.render({ENDLESS!r}, {{}}, {{}})
"""


def ended(process: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" in (process / "status").read_text()
    return True


@LINUX
def test_the_process_does_not_outlive_the_service() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        child = Path("/proc", owner.stdout.readline().decode().strip())
        assert child.exists()
        owner.kill()
    wait("it has ended", lambda: ended(child))


def fake(tmp_path: Path, answer: str) -> str:
    """A worker that answers with the bytes of a format of `printf`, then waits."""
    program = tmp_path / "worker"
    ready = r"R\0\0\0\0\0\0\0\0"
    program.write_text(
        f"#!/bin/sh\nprintf '{ready}'\nhead -c 1 >&2\nprintf '{answer}'\nexec sleep 60\n"
    )
    program.chmod(0o755)
    return str(program)


def test_a_process_that_is_swapped_out_is_waited_for_while_it_is_sent_a_conversation(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its memory is read from the disk, it computes nothing, and takes no bytes."""
    assert works(process)
    monkeypatch.setattr(TemplateProcess, "seconds", 0.3)
    asked = Event()
    left, child = confined_process._Clock.left, pid(process)

    def counted(clock: Any, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        if len(seen) == 4:  # it has waited for three times its second
            asked.set()
        return left(clock)

    monkeypatch.setattr(confined_process._Clock, "left", counted)
    text = "a" * 4_000_000  # more than a socket holds
    os.kill(child, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            rendering = pool.submit(process.render, "{{ text[:3] }}", {}, {"text": text})
            assert asked.wait(PATIENCE)
            assert not rendering.done()
            os.kill(child, signal.SIGCONT)
            assert rendering.result() == "aaa"
    finally:
        os.kill(child, signal.SIGCONT)
    assert pid(process) == child


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (r"X\0\0\0\0\0\0\0\0", "breaks the process"),
        (r"T\377\377\377\377\377\377\377\377", "writes more than"),
        (r"T\0\0\0\0\0\0\0\001\377", "breaks the process"),
        (r"T\0\0", "takes longer"),
        ("", "takes longer"),
    ],
)
def test_nothing_that_comes_back_is_believed(
    answer: str,
    words: str,
    process: TemplateProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words == "takes longer":
        monkeypatch.setattr(TemplateProcess, "clock_seconds", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", fake(tmp_path, answer))
        with pytest.raises(ProgramLimitExceeded, match=words):
            process.render("", {}, {})
        process._child.result()  # type: ignore[union-attr] # also a fake


def test_a_process_that_does_not_start_is_reported_and_tried_again(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ProgramProcessError, match="did not start"):
            works(process)
        patch.setattr(sys, "executable", "/missing")
        with pytest.raises(ProgramProcessError, match="No such file"):
            works(process)
    assert works(process)
