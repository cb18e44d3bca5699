"""Names of files next to the two models; options and environment of the training's commands."""

import argparse
from pathlib import Path
from typing import Any

CARD = "README.md"  # training.card writes it
RECORD = "training.json"  # training.ship, from the records of both runs
EVALUATION = "evaluation.json"  # training.evaluate
LICENCE = "LICENSE.python.txt"  # training.ship, from the training's Python

# For training on a CPU, which these settings make a fifth faster. Without them, glibc maps and
# unmaps every large activation, and the kernel zeroes it each time. Also, threads would spin while
# they wait for a preempted thread.
PROCESS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "500000000",
}

RUNS = Path(__file__).parent / "runs"


def options(purpose: str, **defaults: Any) -> argparse.Namespace:
    """Parse a command's options, one for each default.

    Args:
        purpose: docstring of the command's module.
        defaults: default value of each option, or its type if it has none.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    for name, default in defaults.items():
        flag, choices = f"--{name.replace('_', '-')}", ("cpu", "cuda") if name == "preset" else None
        if isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, choices=choices)
    return parser.parse_args()
