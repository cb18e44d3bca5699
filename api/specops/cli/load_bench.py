"""How long a model takes to load, and what memory it then holds: `specops bench load`.

Every measurement runs in a new process, because only the first load in a process counts. The
clock starts when the engine's code is imported and the settings are read; the start of the
interpreter is shown separately. From then on all work of the service counts: finding the files,
reading the weights ahead and comparing their digests, opening the session, the first pass.
`load_seconds` ends with the first pass, `ready_seconds` when the engine can serve.

`python -m specops.cli.load_bench` makes one measurement with the settings of `SPECOPS_*` and prints
it as a line of JSON.
"""

import ctypes
import json
import os
import re
import statistics
import subprocess  # nosec B404: runs only our own module
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specops.cli.options import CommandError
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER, Engine
from specops.engine.loading import WARM_UP
from specops.engine.model_info import Download, ModelState
from specops.request import GenerationRequest
from specops.system.memory import process_memory

_READ_AHEAD = "reading"  # first word of the weight cache's reports
_STARTED = "LOAD_BENCH_STARTED"  # variable with the time at which the process was started
_PERCENT = re.compile(r": \d+ %$")
_MB = 1e6
_TIMES = ("load_seconds", "ready_seconds", "read_ahead_seconds", "import_seconds")
_SIZES = ("anonymous", "file_backed", "swapped", "kv_cache", "beyond_kv", "at_start")
_SETUP = ("quant", "slots", "context", "kv_tokens", "kv_dtype", "threads")

Run = dict[str, Any]  # the figures of one process, see `load_once`


class _Steps:
    """Times the engine's reports, which separate its steps."""

    def __init__(self) -> None:
        self._marks = [("preparing", time.perf_counter())]

    def __call__(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        del state, download
        step = _PERCENT.sub("", detail)
        if self._marks[-1][0] != step:
            self._marks.append((step, time.perf_counter()))

    def durations(self) -> list[tuple[str, float]]:
        """Return each step with its seconds; the last one ends now."""
        ends = [*(moment for _, moment in self._marks[1:]), time.perf_counter()]
        return [(step, end - start) for (step, start), end in zip(self._marks, ends, strict=True)]


def load_once(settings: Settings, import_seconds: float) -> Run:
    """Load the target of the settings in this process. A draft is measured separately.

    Args:
        settings: the settings.
        import_seconds: time between the start of the process and this call.

    Returns:
        Times in seconds, memory in bytes. `anonymous`, `file_backed` and `swapped` are the memory
        of the process after one pass over a prompt and one over a token, with every page of the KV
        cache touched. `at_start` is the anonymous memory before loading. `beyond_kv` is anonymous
        memory, swapped out or not, without the KV cache.

    Raises:
        RuntimeError: see `Engine.load`.
    """
    at_start = process_memory().anon
    steps = _Steps()
    engine = Engine.load(settings, steps)
    durations = steps.durations()
    passed = [name for name, _ in durations].index(WARM_UP) + 1
    _generate(engine, settings)
    memory, info = process_memory(), engine.info
    return {
        "model": info.name,
        **{name: getattr(info, name) for name in _SETUP},
        "import_seconds": import_seconds,
        "load_seconds": sum(seconds for _, seconds in durations[:passed]),
        "ready_seconds": sum(seconds for _, seconds in durations),
        "read_ahead_seconds": sum(
            seconds for name, seconds in durations if name.startswith(_READ_AHEAD)
        ),
        "steps": durations,
        "at_start": at_start,
        "anonymous": memory.anon,
        "file_backed": memory.file,
        "swapped": memory.swap,
        "kv_cache": info.kv_bytes,
        "beyond_kv": memory.anon + memory.swap - info.kv_bytes,
    }


def _generate(engine: Engine, settings: Settings) -> None:
    """Touch the pages of the KV cache and run two passes: a service's memory is in use, too."""
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


def measure(environment: Mapping[str, str], runs: int, report: Callable[[str], None]) -> list[Run]:
    """Load the model several times, each in a new process.

    The first process does not count: it makes missing files (downloads, conversions, the layout of
    the weights for this processor). After it, the files are in the page cache.

    Args:
        environment: variables of the processes, with the settings `SPECOPS_*`.
        runs: number of processes that count.
        report: called with the progress.

    Raises:
        CommandError: the model cannot be loaded; the message is the process's.
    """
    measured = []
    for number in range(runs + 1):
        report("preparing" if not number else f"loading, {number} of {runs}")
        variables = {**environment, "SPECOPS_DRAFT": NO_DRAFTER, _STARTED: repr(time.monotonic())}
        done = subprocess.run(  # nosec B603: our own module
            [sys.executable, "-P", "-m", "specops.cli.load_bench"],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["the process died"]
            raise CommandError(lines[-1])
        if number:
            measured.append(json.loads(done.stdout))
    return measured


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """Return all figures for JSON: medians first, then every run."""
    medians = {name: statistics.median(run[name] for run in runs) for name in (*_TIMES, *_SIZES)}
    return {
        **{name: medians[name] for name in _TIMES},
        **{f"{name}_bytes": int(medians[name]) for name in _SIZES},
        "runs": runs,
    }


def table(runs: Sequence[Run]) -> str:
    """Return the figures in lines for people: medians, with the extremes of times."""
    run = runs[0]
    steps = [
        (f"  {_shortened(step)}", [item["steps"][index][1] for item in runs])
        for index, (step, _) in enumerate(run["steps"])
        if all(index < len(item["steps"]) for item in runs)
    ]
    times = [
        ("load, until the first pass ran", [item["load_seconds"] for item in runs]),
        *steps,
        ("ready to serve", [item["ready_seconds"] for item in runs]),
        ("(before: Python and imports)", [item["import_seconds"] for item in runs]),
    ]
    sizes = {
        "anonymous memory": "anonymous",
        "  of it KV cache": "kv_cache",
        "  beyond it, with what is swapped": "beyond_kv",
        "  (held before loading)": "at_start",
        "file-backed memory": "file_backed",
        "swapped out": "swapped",
    }
    lines = [
        f"{run['model']}, {run['quant']}, {run['slots']} slots, {run['kv_tokens']} tokens of KV "
        f"cache in {run['kv_dtype']}, {run['threads']} threads, {len(runs)} warm starts",
        "",
    ]
    for title, values in times:
        spread = f"[{min(values):.2f}-{max(values):.2f}]"
        lines.append(f"{title:50} {statistics.median(values):8.2f} s   {spread}")
    for title, name in sizes.items():
        median = statistics.median(item[name] for item in runs)
        lines.append(f"{title:50} {median / _MB:8.1f} MB")
    return "\n".join(lines) + "\n"


def _shortened(step: str) -> str:
    """Return a step's text with the last part of its paths only."""
    return re.sub(r"\S*/(?=\S)", "", step)


def _main() -> int:
    """Measure once; an error is one line, without a traceback."""
    try:
        run = load_once(Settings.from_env(), time.monotonic() - float(os.environ[_STARTED]))
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(run))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
