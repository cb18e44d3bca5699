"""Every call that a chat template can make, with hostile values.

The filters, tests and globals come from the environment of the templates themselves, the methods
from Python's types, so that none is left out. A case is one call; `python -m tests.fuzz --only
rendering` makes as many as there is time for, each name in turn, and looks at the clock and at the
memory of both processes.
"""

from __future__ import annotations

import inspect
import itertools
import random
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tools.repeating import repeating
from specops.text.confined_process import ProgramLimitExceeded, ProgramRefusal
from specops.text.template_process import TemplateProcess
from specops.text.template_worker import environment
from tests.fuzz.cases import FindingError, seeds

MAX_SECONDS = 6.0  # of a rendering: 1 s of processor time, and at most 5 by the clock
NEXT_SECONDS = 0.5
MAX_BYTES = 200 << 20  # of the process with the template
MAX_GROWTH = 64 << 20  # of the service's process: a prompt of 16 MiB, and copies of it
_ENVIRONMENT = environment({})
_OBJECTS = {  # how a template comes to an object of each type
    str: "text",
    bytes: "text.encode()",
    int: "10 ** 1000",
    float: "1.5e300",
    list: "many",
    tuple: "dict(a=1, b=2).items() | first",
    dict: "table",
    range: "range(100000)",
}
_MADE = {
    "Markup": "(text | escape)",
    "cycler": "cycler(text, many)",
    "joiner": "joiner(text)",
    "namespace": "namespace(a=text)",
    "undefined": "nothing",
    "items": "table.items()",
    "function": "raise_exception",
}
_METHODS = {
    **{kind.__name__: (text, dir(kind)) for kind, text in _OBJECTS.items()},
    **{
        name: (text, dir(_ENVIRONMENT.compile_expression(text)(text="a", many=[1], table={"a": 1})))
        for name, text in _MADE.items()
    },
}
NAMES = [
    *(f"filter {name}" for name in sorted(_ENVIRONMENT.filters)),
    *(f"test {name}" for name in sorted(_ENVIRONMENT.tests)),
    *(f"global {name}" for name in sorted(_ENVIRONMENT.globals)),
    *(f"operator {name}" for name in ("+", "-", "*", "/", "//", "**", "%", "~", "in", "<")),
    *(
        f"method {kind}.{name}"
        for kind, (_, names) in _METHODS.items()
        for name in names
        if not name.startswith("__")
    ),
    *("loop range", "loop text", "loop recursive", "statement block", "statement macro"),
]
_TEXTS = (
    *("text", "lines", "words", "wide", "tags", "text * 90", "'{0}' * 100000", "'%(a)s' * 100000"),
    *("'{0:999999999}'", "'%999999999d'", "'{0!r:>9999999}'", "''", "'a'", "'utf-16'", "'\\n'"),
)
_NUMBERS = ("10 ** 9", "10 ** 18", "-1", "0", "100000", "10 ** 4000", "1.5e300", "true", "none")
_GROUPS = (
    *("many", "table", "deep", "range(100000)", "messages", "[many] * 1000", "[text] * 1000"),
    *("dict(a=text)", "range(100000) | map('string')", "messages | map(attribute='content')"),
    *("nothing", "raise_exception", "namespace", "(text | escape)", "text.encode()"),
)
_VALUES = (*_TEXTS, *_NUMBERS, *_GROUPS)
_GIVEN = ("environment", "context", "eval_ctx", "_Context__self")  # by Jinja, not by a template


def values() -> dict[str, Any]:
    """What a request of a mebibyte could bring."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    return {
        "text": "a" * 200_000,
        "lines": "a\n" * 100_000,
        "words": "a " * 100_000,
        "wide": "\U0001f600" * 50_000,
        "tags": "<a href='http://a.example'>&lt;" * 5_000,
        "many": list(range(50_000)),
        "table": {str(number): number for number in range(10_000)},
        "deep": deep,
        "messages": [{"role": "user", "content": "a" * 50} for _ in range(4_000)],
    }


@dataclass(frozen=True)
class Call:
    """One call, as a template."""

    source: str

    @classmethod
    def draw(cls, name: str, draw: random.Random) -> Call:
        """Draw the arguments of a call."""
        kind, _, what = name.partition(" ")
        one, other = draw.choice(_VALUES), draw.choice(_VALUES)
        arguments = _arguments(kind, what, draw)
        shown = draw.choice(("| string | length", "| string | length", "| tojson", ""))
        if kind == "filter":
            return cls(f"{{{{ (({one}) | {what}({arguments})) {shown} }}}}")
        if kind == "test":
            return cls(f"{{{{ ({one}) is {what}({arguments}) }}}}")
        if kind == "global":
            call = what if draw.random() < 0.1 else f"{what}({arguments})"
            return cls(f"{{{{ ({call}) {shown} }}}}")
        if kind == "operator":
            return cls(f"{{{{ (({one}) {what} ({other})) {shown} }}}}")
        if kind == "method":
            of, _, method = what.partition(".")
            subject = one if of == "str" and one in _TEXTS else _METHODS[of][0]
            return cls(f"{{{{ (({subject}).{method}({arguments})) {shown} }}}}")
        return cls(
            {
                "range": f"{{% for a in ({one}) %}}{{% for b in ({other}) %}}{{{{ b }}}}"
                "{% endfor %}{% endfor %}",
                "text": f"{{% for a in ({one}) %}}{{{{ {other} }}}}{{% endfor %}}",
                "recursive": "{% for a in deep recursive %}{{ loop(a) }}"
                f"{{{{ {one} }}}}{{% endfor %}}",
                "block": f"{{% set x %}}{{{{ {one} }}}}{{% endset %}}"
                + "{% set x = x ~ x %}" * 20
                + "{{ x | length }}",
                "macro": f"{{% macro m(a) %}}{{{{ m(a) ~ ({one}) }}}}{{% endmacro %}}"
                f"{{{{ m({other}) }}}}",
            }[what]
        )


def _arguments(kind: str, what: str, draw: random.Random) -> str:
    """Draw arguments by place, or by the names that the function has."""
    function: Any = None
    if kind in ("filter", "test", "global"):
        function = getattr(_ENVIRONMENT, f"{kind}s").get(what)
    try:
        names = list(inspect.signature(function).parameters) if callable(function) else []
    except ValueError:  # some of Python's own functions do not tell
        names = []
    names = [name for name in names if name not in _GIVEN]
    names = names if kind == "global" else names[1:]  # the first one stands before `|` or `is`
    if names and draw.random() < 0.4:
        some = draw.sample(names, draw.randint(1, len(names)))
        return ", ".join(f"{name}={draw.choice(_VALUES)}" for name in some)
    most = len(names) if function is not None else draw.choice((0, 1, 1, 2, 3))
    return ", ".join(draw.choice(_VALUES) for _ in range(draw.randint(0, min(most, 3))))


def run(cases: int, seconds: float, seed: int) -> str:
    """Make calls for a time, or so many; return what came of them.

    Only calls for a time are held against the clock: the other kind runs beside other tests.

    Raises:
        FindingError: a call took too much.
    """
    process, given = TemplateProcess(), values()
    process.render("", {}, {})
    outcomes = dict.fromkeys(("text", "refused", "limit"), 0)
    slowest = next_slowest = 0.0
    before = _own_bytes()
    peak = _Peak(process)
    with repeating(peak.look, 0.01):
        for own, name in zip(seeds(cases, seconds, seed), itertools.cycle(NAMES), strict=False):
            call = Call.draw(name, random.Random(own))
            begin = time.monotonic()
            outcome, broken = _outcome(process, call, given)
            took = time.monotonic() - begin
            outcomes[outcome] += 1
            begin = time.monotonic()
            process.render("{{ a }}", {}, {"a": 1})
            waited = time.monotonic() - begin
            slowest, next_slowest = max(slowest, took), max(next_slowest, waited)
            grown = _own_bytes() - before
            late = not cases and (took > MAX_SECONDS or waited > NEXT_SECONDS)
            if broken or late or grown > MAX_GROWTH or peak.bytes > MAX_BYTES:
                raise FindingError(
                    f"seed {seed}: {broken} {took:.2f} s, the next {waited:.2f} s, "
                    f"{grown >> 20} MiB more here, {peak.bytes >> 20} MiB there: {call.source}"
                )
    process.close()
    return (
        f"{sum(outcomes.values()):,} calls of {len(NAMES)} names ({outcomes}), "
        f"{slowest:.2f} s at most, the next answer after {next_slowest:.2f} s at most, "
        f"{peak.bytes >> 20} MiB at most"
    )


def _outcome(process: TemplateProcess, call: Call, given: dict[str, Any]) -> tuple[str, str]:
    """Make a call; return how it ended, and what must not happen."""
    try:
        process.render(call.source, {}, given)
    except ProgramRefusal:
        return "refused", ""
    except ProgramLimitExceeded as error:
        return "limit", str(error) if "breaks" in str(error) else ""
    return "text", ""


class _Peak:
    """The highest memory of a process with templates."""

    def __init__(self, process: TemplateProcess) -> None:
        self._process = process
        self.bytes = 0

    def look(self) -> None:
        child = self._process._child
        if child is None or not child.done():
            return
        try:
            text = Path(f"/proc/{child.result()._process.pid}/status").read_text()
        except OSError:
            return
        for line in text.splitlines():
            if line.startswith("VmHWM"):
                self.bytes = max(self.bytes, int(line.split()[1]) * 1024)


def _own_bytes() -> int:
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
