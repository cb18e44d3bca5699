"""`python -m bench`: measure this project on this machine and keep the results.

Without arguments everything that needs no network is measured. Progress goes to standard error,
tables to standard output, JSON and Markdown into the results folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from bench import kernels, layer_stack, overhead, quantization
from bench.experiments import ALWAYS, EXPERIMENTS, HELP, add_options
from bench.machine import Machine, describe
from bench.models import TINYLLAMA_VOCAB, configured, tinyllama
from bench.peers import compare, serving
from bench.peers.environment import install
from bench.peers.models import peer_models
from bench.report import Chart, Table, write
from specops.config import ConfigError

RESULTS = Path(__file__).resolve().parent / "results" / "local"
_OVERHEAD_SMALL = overhead.Plan(loads=3, rounds=8, new_tokens=256)
_OVERHEAD_LARGE = overhead.Plan(loads=3, rounds=4, new_tokens=64)
_OVERHEAD_QUICK = overhead.Plan(loads=1, rounds=2, new_tokens=16)
_PEERS = compare.Plan(loads=2, rounds=9, passes=3)
_PEERS_QUICK = compare.Plan(loads=1, rounds=2, passes=3)
_PEERS_THREADS = 2
_SERVING = serving.Plan(rounds=5)
_SERVING_QUICK = serving.Plan(rounds=1, clients=(1, 2), output=8)
_QUANTIZATION_QUICK = quantization.Plan(choices=(), documents=2, tokens=64)
_KERNEL_ROUNDS = 10
_LAYER_STACK_QUICK = layer_stack.Plan(layers=1, rounds=1, passes=2)
_DIFFERENT_OUTPUT, _FAILED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for.

    Returns:
        0; 1 where output differed that must be equal; 2 where something could not be run.
    """
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    machine = describe()
    equal = True
    try:
        if options.benchmark in ("overhead", "all"):
            equal &= _overhead(options, machine)
        for name in ALWAYS if options.benchmark == "all" else (options.benchmark,):
            if name in EXPERIMENTS:
                equal &= _experiment(name, options, machine)
        if options.benchmark == "kernels":
            _kernels(options, machine)
        if options.benchmark == "quantization":
            _quantization(options, machine)
        if options.benchmark == "layer-stack":
            _layer_stack(options, machine)
        if options.benchmark == "peers":
            _peers(options, machine)
        if options.benchmark == "serving":
            _serving(options, machine)
        if options.benchmark == "report":
            from bench.page import write_page  # noqa: PLC0415 - draws: takes a second to import

            _progress(f"wrote {write_page(options.results)}")
    except (ConfigError, RuntimeError, OSError) as error:  # no model, no server, no prompts
        _progress(str(error))
        return _FAILED
    return 0 if equal else _DIFFERENT_OUTPUT


def _leave(number: int, frame: FrameType | None) -> None:
    """End through every `finally`: the server that is being measured must not stay behind."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the layers' overhead, what speculation gains, and the alternatives.",
        epilog="The model is the one that the service would serve: SPECOPS_MODEL, "
        "SPECOPS_TARGET and the other settings apply.",
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=(
            "overhead",
            *EXPERIMENTS,
            "kernels",
            "quantization",
            "layer-stack",
            "peers",
            "serving",
            "report",
            "all",
        ),
        default="all",
        help=f"all (default): overhead, {', '.join(ALWAYS)}; {HELP}; kernels: the operators "
        "of a pass; quantization: bits per byte of each way to store weights; layer-stack: the "
        "time of a pass by block size; peers: against llama.cpp and OpenVINO, which are downloaded "
        "and compiled first; serving: requests at once, against the same; report: one HTML page "
        "of all results",
    )
    parser.add_argument("--quick", action="store_true", help="show that it works, in seconds")
    parser.add_argument(
        "--skip-tinyllama",
        action="store_true",
        help="overhead, kernels, simulated, before: leave out the model of 1.1 B random parameters",
    )
    parser.add_argument(
        "--prompts", type=Path, help="prompts of your own: JSON lines with the field `prompt`"
    )
    add_options(parser)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder to write to (default: %(default)s)"
    )
    return parser


def _overhead(options: argparse.Namespace, machine: Machine) -> bool:
    models = [(configured(), _OVERHEAD_SMALL)]
    if not options.skip_tinyllama:
        models.append((tinyllama(_progress), _OVERHEAD_LARGE))
    measured, tables = [], []
    for model, plan in models:
        found = overhead.measure(model, _OVERHEAD_QUICK if options.quick else plan, _progress)
        measured.append(found)
        tables.append(_shown(overhead.table(found)))
    results = {"models": [overhead.result(item) for item in measured]}
    _publish(options, machine, "overhead", results, tables)
    return all(item.outputs_equal for item in measured)


def _kernels(options: argparse.Namespace, machine: Machine) -> None:
    model = configured() if options.skip_tinyllama else tinyllama(_progress)
    profiles = kernels.measure(model, 1 if options.quick else _KERNEL_ROUNDS, _progress)
    tables = [_shown(kernels.table(model, profiles))]
    _publish(options, machine, "kernels", kernels.result(model, profiles), tables)


def _experiment(name: str, options: argparse.Namespace, machine: Machine) -> bool:
    outcome = EXPERIMENTS[name](options, _progress)
    tables = [_shown(table) for table in outcome.tables]
    _publish(options, machine, name, outcome.result, tables, charts=outcome.charts)
    return outcome.sound


def _peers(options: argparse.Namespace, machine: Machine) -> None:
    python = install(_progress)
    files, model = peer_models(python, _progress), tinyllama(_progress)
    measured = compare.measure(
        compare.sides(model, _PEERS_THREADS, python, files),
        _PEERS_QUICK if options.quick else _PEERS,
        threads=_PEERS_THREADS,
        vocab=TINYLLAMA_VOCAB,
        progress=_progress,
    )
    result = compare.result(measured)
    _publish(options, machine, "peers", result, [_shown(compare.table(model.title, measured))])


def _serving(options: argparse.Namespace, machine: Machine) -> None:
    python = install(_progress)
    files, model = peer_models(python, _progress), tinyllama(_progress)
    plan, file = _SERVING_QUICK if options.quick else _SERVING, options.results / "serving.json"
    earlier = None
    if options.add and file.is_file():
        earlier = serving.Measured.kept(json.loads(file.read_text(encoding="utf-8")))
    measured = serving.measure(
        model,
        serving.peers(python, files),
        replace(plan, rounds=options.rounds or plan.rounds),
        threads=_PEERS_THREADS,
        vocab=TINYLLAMA_VOCAB,
        progress=_progress,
        earlier=earlier,
    )
    shown = _shown(serving.table(model.title, measured))
    _publish(options, machine, "serving", serving.result(measured), [shown])


def _quantization(options: argparse.Namespace, machine: Machine) -> None:
    plan = _QUANTIZATION_QUICK if options.quick else quantization.Plan()
    found = quantization.measure(plan, _progress)
    shown = _shown(quantization.table(found))
    _publish(options, machine, "quantization", quantization.result(found, plan), [shown])


def _layer_stack(options: argparse.Namespace, machine: Machine) -> None:
    plan = _LAYER_STACK_QUICK if options.quick else layer_stack.Plan()
    found = layer_stack.measure(plan, _progress)
    shown = _shown(layer_stack.table(found, plan))
    _publish(options, machine, "layer-stack", layer_stack.result(found, plan), [shown])


def _publish(
    options: argparse.Namespace,
    machine: Machine,
    name: str,
    result: Mapping[str, object],
    tables: list[Table],
    *,
    charts: Sequence[Chart] = (),
) -> None:
    print(f"{machine.line}\n", flush=True)
    document = {"quick": options.quick, "machine": asdict(machine), **result}
    signed = [*tables[:-1], tables[-1].noting(f"measured on {machine.line}")]
    for path in write(options.results, name, document, signed, charts):
        _progress(f"wrote {path}")
    if charts:
        from bench.plots import save  # noqa: PLC0415 - as above

        for path in save(options.results / name, charts):
            _progress(f"wrote {path}")


def _shown(table: Table) -> Table:
    """Print a table at once: what is measured next may take minutes."""
    print(table.text(), flush=True)
    return table


def _progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
