"""`python -m bench NAME`: measure this project on this machine and save the results.

Without a name it runs the benchmarks that take minutes and need no network. Progress goes to
standard error, tables go to standard output, and JSON, Markdown and pictures go to the results
folder.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.benchmarks import ALL, BENCHMARKS, add_options
from bench.tools.machine import Machine, describe
from bench.tools.report import Outcome, progress, write
from specops.config import ConfigError
from specops.runtime.kernels import force

RESULTS = Path(__file__).resolve().parent / "results" / "local"
_UNSOUND, _FAILED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks.

    Returns:
        0; 1 if a required property does not hold; 2 if a benchmark could not run.
    """
    options = _parser().parse_args(arguments)
    # Run every `finally`, so that no measured server survives.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    force(options.kernels)
    machine = describe()
    sound = True
    try:
        if options.benchmark == "report":
            from bench.tools.page import write_page  # noqa: PLC0415 - drawing takes time to import

            progress(f"wrote {write_page(options.results)}")
            return 0
        for name in ALL if options.benchmark == "all" else (options.benchmark,):
            benchmark = BENCHMARKS[name]
            outcome = benchmark.run(options, benchmark.quick if options.quick else benchmark.full)
            _publish(options, machine, outcome.name or name, outcome)
            sound &= outcome.sound
    except (ConfigError, RuntimeError, OSError) as error:  # no model, no server, no results
        progress(str(error))
        return _FAILED
    return 0 if sound else _UNSOUND


def _parser() -> argparse.ArgumentParser:
    listed = "; ".join(f"{name}: {benchmark.text}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the gain from speculation, time and memory use, and other engines.",
        epilog="The model is the demo pair, unless SPECOPS_MODEL or SPECOPS_TARGET name another; "
        "the other settings apply, too.",
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        metavar="NAME",
        choices=(*BENCHMARKS, "report", "all"),
        default="all",
        help=f"{listed}; report: one HTML page of all results; all (default): {' and '.join(ALL)}",
    )
    parser.add_argument("model", nargs="?", type=Path, help="quality: a GGUF, or a checkpoint")
    parser.add_argument("--quick", action="store_true", help="show that it works, in seconds")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder to write to (default: %(default)s)"
    )
    add_options(parser)
    return parser


def _publish(options: argparse.Namespace, machine: Machine, name: str, outcome: Outcome) -> None:
    for table in outcome.shown:
        print(table.text(), flush=True)
    print(f"{machine.line}\n", flush=True)
    about = {"quick": options.quick, "machine": asdict(machine)}
    written = [*write(options.results, name, about, outcome, f"measured on {machine.line}")]
    if outcome.chart is not None:
        from bench.tools.plots import save  # noqa: PLC0415 - drawing takes time to import

        written.append(save(options.results / name, outcome.chart))
    for path in written:
        progress(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
