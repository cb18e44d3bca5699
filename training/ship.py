"""Copies the finished pair into the service's folder: checkpoints, graphs, held-out text."""

import json
import shutil
import sysconfig
from pathlib import Path

from specops.models.convert import Quantization, export_checkpoint
from specops.models.layout import parts_of
from training.corpus import DEMO_DIR, load_corpus, write_held_out, write_prompts
from training.evaluate import SHIPPED
from training.files import LICENCE, RECORD, RUNS, options


def ship(runs: Path, folder: Path = DEMO_DIR) -> None:
    """Copy `runs/target` and `runs/draft` to `folder` and export each to its shipped graph."""
    for role in ("target", "draft"):
        shutil.rmtree(folder / role, ignore_errors=True)
        shutil.copytree(runs / role, folder / role)
        export_checkpoint(
            folder / role,
            folder / role / "onnx" / SHIPPED,
            quantization=Quantization.parse(SHIPPED),
            source_digest=parts_of(folder / role).digest(),
        )
    write_held_out(load_corpus().held_out, folder)
    write_prompts(folder)
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.exists():  # for the shipped held-out text
        shutil.copyfile(licence, folder / LICENCE)
    record = {
        role: json.loads((runs / f"{role}.json").read_text("utf-8")) for role in ("target", "draft")
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and ship."""
    given = options(__doc__, runs=RUNS, folder=DEMO_DIR)
    ship(given.runs, given.folder)


if __name__ == "__main__":
    main()
