"""Names of the files beside the two models, and the options of the training's commands."""

import argparse
from pathlib import Path
from typing import Any

CARD = "README.md"  # training.card writes it
RECORD = "training.json"  # training.ship, from the records of both runs
EVALUATION = "evaluation.json"  # training.evaluate
LICENCE = "LICENSE.python.txt"  # training.ship, from the Python that trained

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
