"""`python -m training.train`: tokenizer and target, draft, export, figures, model card.

Every step is a command of its own that goes on where it stopped; a finished training is not
repeated. Remove `training/runs/` to start afresh.
"""

import argparse
import subprocess  # nosec B404: runs only this package's own modules
import sys
from pathlib import Path

from training.corpus import DEMO_DIR
from training.runtime import device


def run(module: str, *arguments: str) -> None:
    """Run one step; its failure ends the whole."""
    command = [sys.executable, "-m", f"training.{module}", *arguments]
    print("+", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)  # noqa: S603 # nosec B603


def main() -> None:
    """Read the command line and run what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=("cpu", "cuda"), default=device().type)
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--target-minutes", type=float, help="plan by time, not by tokens")
    parser.add_argument("--draft-minutes", type=float, help="plan by time, not by tokens")
    options = parser.parse_args()
    common = ["--preset", options.preset, "--runs", str(options.runs)]
    steps = (
        ("pretrain", "target", options.target_minutes),
        ("distill", "draft", options.draft_minutes),
    )
    for module, role, minutes in steps:
        if not (options.runs / f"{role}.json").exists():
            run(module, *common, *(["--minutes", str(minutes)] if minutes else []))
    # The larger pair does not fit into the repository: it stays with its run.
    folder = DEMO_DIR if options.preset == "cpu" else options.runs / "demo"
    where = ["--folder", str(folder)]
    run("ship", "--runs", str(options.runs), *where)
    run("reference", "--runs", str(options.runs), *where)
    run("evaluate", *where)
    run("card", *where)
    print(f"the pair is in {folder}")


if __name__ == "__main__":
    main()
