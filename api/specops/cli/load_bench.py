"""How long a model takes to load and what memory it then holds: `specops bench load`.

Every measurement is a process of its own, since a process loads a model for the first time once.
The clock starts when the engine's code is imported and settings are read, so the interpreter's own
start does not count (it is shown apart); from there on everything counts that the service does:
finding the files, reading the weights ahead and comparing their digests, opening the session, the
first pass. `load_seconds` ends with the first pass, `ready_seconds` when the engine could serve.

`python -m specops.cli.load_bench` is one measurement, of `SPECOPS_*`, as a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import subprocess  # nosec B404: runs only our own module
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Download, Engine, ModelState
from specops.engine.open_models import WARM_UP
from specops.request import GenerationRequest
from specops.system.memory import process_memory

READ_AHEAD = "reading"  # how the weight cache's reports begin
_STARTED = "LOAD_BENCH_STARTED"  # monotonic clock at which the process was asked for
_PERCENT = re.compile(r": \d+ %$")
_MB = 1e6


class LoadBenchError(RuntimeError):
    """A measuring process failed; the message is what it said."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One process's figures. Memory in bytes.

    `anonymous`, `file_backed` and `swapped` are the process's after one pass over a prompt and one
    over a token, every page of the KV cache touched; `at_start` is anonymous memory before loading.
    """

    model: str
    quant: str
    slots: int
    context: int
    kv_tokens: int
    kv_dtype: str
    threads: int
    import_seconds: float
    load_seconds: float
    ready_seconds: float
    read_ahead_seconds: float  # part of both: weights read whole and their digests compared
    steps: list[tuple[str, float]]  # what the engine said that it does, and how long it took
    at_start: int
    anonymous: int
    file_backed: int
    swapped: int
    kv_cache: int

    @property
    def beyond_kv(self) -> int:
        """Anonymous memory, swapped out or not, that is not the KV cache."""
        return self.anonymous + self.swapped - self.kv_cache


class _Steps:
    """Takes the engine's reports as the marks between its steps."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def __call__(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        del state, download
        step = _PERCENT.sub("", detail)
        if not self._marks or self._marks[-1][0] != step:
            self._marks.append((step, time.perf_counter()))

    def durations(self, start: float, end: float) -> list[tuple[str, float]]:
        """Seconds from each report to the next one."""
        marks = [("preparing", start), *self._marks]
        ends = [*(moment for _, moment in self._marks), end]
        return [(step, after - before) for (step, before), after in zip(marks, ends, strict=True)]


def load_once(settings: Settings, import_seconds: float) -> LoadRun:
    """Load the settings' target here and now, without a draft: a draft is a model of its own.

    Args:
        import_seconds: what the process took until it could begin.

    Raises:
        RuntimeError: see `Engine.load`.
    """
    at_start = process_memory().anon
    steps, start = _Steps(), time.perf_counter()
    engine = Engine.load(settings, steps)
    end = time.perf_counter()
    durations = steps.durations(start, end)
    names = [name for name, _ in durations]
    passed = names.index(WARM_UP) + 1
    _serve_a_little(engine, settings)
    memory, info = process_memory(), engine.info
    return LoadRun(
        model=info.name,
        quant=info.quant,
        slots=info.slots,
        context=info.context,
        kv_tokens=info.kv_tokens,
        kv_dtype=info.kv_dtype,
        threads=info.threads,
        import_seconds=import_seconds,
        load_seconds=sum(seconds for _, seconds in durations[:passed]),
        ready_seconds=end - start,
        read_ahead_seconds=sum(
            seconds for name, seconds in durations if name.startswith(READ_AHEAD)
        ),
        steps=durations,
        at_start=at_start,
        anonymous=memory.anon,
        file_backed=memory.file,
        swapped=memory.swap,
        kv_cache=info.kv_bytes,
    )


def _serve_a_little(engine: Engine, settings: Settings) -> None:
    """Make the process hold what a serving one holds.

    The KV cache is mapped but its pages come when they are written; passes leave memory behind.
    """
    cache, info = engine.scheduler.target.cache, engine.info
    ctypes.memset(int(cache.descriptor[0]), 0, cache.nbytes)
    length = min(settings.max_batched_tokens, info.context - 2)
    prompt = tuple(index % info.vocab_size for index in range(length))
    request = GenerationRequest(
        request_id="load", prompt_tokens=prompt, max_new_tokens=2, ignore_eos=True
    )
    for output in engine.generate(request):
        if output.error is not None:
            raise RuntimeError(output.error)


def measure(
    environment: Mapping[str, str], runs: int, tell: Callable[[str], None]
) -> list[LoadRun]:
    """Load the model in processes of their own, one after the other.

    The first one does not count: it makes what is not there yet (downloads, conversions, the
    weights' layout for this processor), and after it the files are in the page cache.

    Args:
        environment: the processes' variables; `SPECOPS_*` among them name the model.
        runs: how many count.

    Raises:
        LoadBenchError: the model cannot be loaded.
    """
    found = []
    for number in range(runs + 1):
        tell("preparing" if not number else f"loading, {number} of {runs}")
        variables = {**environment, "SPECOPS_DRAFT": NO_DRAFTER, _STARTED: repr(time.monotonic())}
        done = subprocess.run(  # nosec B603: our own module
            [sys.executable, "-m", "specops.cli.load_bench"],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["the process died"]
            raise LoadBenchError(said[-1])
        if number:
            found.append(_parsed(done.stdout))
    return found


def _parsed(text: str) -> LoadRun:
    values = json.loads(text)
    values["steps"] = [(step, seconds) for step, seconds in values["steps"]]
    return LoadRun(**values)


def document(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """All figures, fit for JSON: medians first, then every run."""
    names = ("load_seconds", "ready_seconds", "read_ahead_seconds", "import_seconds")
    sizes = ("anonymous", "file_backed", "swapped", "kv_cache", "beyond_kv", "at_start")
    return {
        **{name: statistics.median(getattr(run, name) for run in runs) for name in names},
        **{
            f"{name}_bytes": int(statistics.median(getattr(run, name) for run in runs))
            for name in sizes
        },
        "runs": [asdict(run) for run in runs],
    }


def table(runs: Sequence[LoadRun]) -> str:
    """The figures in lines for people: medians, of times also the extremes."""
    run = runs[0]
    head = (
        f"{run.model}, {run.quant}, {run.slots} slots, {run.kv_tokens} tokens of KV cache in "
        f"{run.kv_dtype}, {run.threads} threads, {len(runs)} warm starts"
    )
    lines = [
        _seconds("load, until the first pass ran", [item.load_seconds for item in runs]),
        *(
            _seconds(f"  {_shortened(step)}", [item.steps[place][1] for item in runs])
            for place, (step, _) in enumerate(run.steps)
            if all(place < len(item.steps) for item in runs)
        ),
        _seconds("ready to serve", [item.ready_seconds for item in runs]),
        _seconds("(before: Python and imports)", [item.import_seconds for item in runs]),
        *(
            _megabytes(title, [getattr(item, name) for item in runs])
            for title, name in (
                ("anonymous memory", "anonymous"),
                ("  of it KV cache", "kv_cache"),
                ("  beyond it, with what is swapped", "beyond_kv"),
                ("  (held before loading)", "at_start"),
                ("file-backed memory", "file_backed"),
                ("swapped out", "swapped"),
            )
        ),
    ]
    return "\n".join([head, "", *lines]) + "\n"


def _shortened(step: str) -> str:
    """A step without its folders: the last part of a path says enough."""
    return re.sub(r"\S*/(?=\S)", "", step)


def _seconds(title: str, values: Sequence[float]) -> str:
    spread = f"[{min(values):.2f}-{max(values):.2f}]"
    return f"{title:50} {statistics.median(values):8.2f} s   {spread}"


def _megabytes(title: str, values: Sequence[int]) -> str:
    return f"{title:50} {statistics.median(values) / _MB:8.1f} MB"


def _main() -> int:
    """Measure once; errors are a line, not a traceback."""
    try:
        run = load_once(Settings.from_env(), time.monotonic() - float(os.environ[_STARTED]))
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(run)))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
