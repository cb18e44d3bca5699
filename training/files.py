"""Names of the files beside the two models; options and environment of the training's commands."""

import argparse
from pathlib import Path
from typing import Any

CARD = "README.md"  # training.card writes it
RECORD = "training.json"  # training.ship, from the records of both runs
EVALUATION = "evaluation.json"  # training.evaluate
LICENCE = "LICENSE.python.txt"  # training.ship, from the Python that trained

# For a process that trains on a CPU: a fifth faster. Without these settings glibc maps and unmaps
# every large activation again, and the kernel zeroes it again. Also, a thread that waits for a
# displaced thread would spin.
PROCESS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "500000000",
}

RUNS = Path(__file__).parent / "runs"


def options(purpose: str, **defaults: Any) -> argparse.Namespace:
    """Read a command's options, one for each default.

    Args:
        purpose: the docstring of the command's module.
        defaults: an option's default value, or its type if it has none.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    for name, default in defaults.items():
        flag, choices = f"--{name.replace('_', '-')}", ("cpu", "cuda") if name == "preset" else None
        if isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, choices=choices)
    return parser.parse_args()
