"""`python -m training.train`: tokenizer and target, draft, export, figures, model card.

Every step is a separate command that continues where it stopped; a finished training is not
repeated. Remove `training/runs/` to start again. `--target-minutes` and `--draft-minutes` limit a
training by time instead of tokens.
"""

import os
import subprocess  # nosec B404: runs only this package's own modules
import sys

from training.corpus import DEMO_DIR
from training.files import PROCESS_ENVIRONMENT, RUNS, options
from training.runtime import device


def run(module: str, *arguments: str) -> None:
    """Run one step; a failure ends the whole training."""
    command = [sys.executable, "-m", f"training.{module}", *arguments]
    print("+", " ".join(command[1:]), flush=True)
    environment = PROCESS_ENVIRONMENT | os.environ
    subprocess.run(command, check=True, env=environment)  # noqa: S603 # nosec B603


def main() -> None:
    """Read the command line and run the unfinished steps."""
    given = options(
        __doc__, preset=device().type, runs=RUNS, target_minutes=float, draft_minutes=float
    )
    common = ["--preset", given.preset, "--runs", str(given.runs)]
    steps = (
        ("pretrain", "target", given.target_minutes),
        ("distill", "draft", given.draft_minutes),
    )
    for module, role, minutes in steps:
        if not (given.runs / f"{role}.json").exists():
            run(module, *common, *(["--minutes", str(minutes)] if minutes else []))
    # The larger pair is too large for the repository and stays with its run.
    folder = DEMO_DIR if given.preset == "cpu" else given.runs / "demo"
    where = ["--folder", str(folder)]
    run("ship", "--runs", str(given.runs), *where)
    run("evaluate", *where)
    run("card", *where)
    print(f"the pair is in {folder}")


if __name__ == "__main__":
    main()
