"""`python -m specops.models.convert.check FILE`: whether a model can be converted.

FILE is a config.json, a GGUF, or the beginning of a GGUF that is being downloaded. This reads no
weights, so that what cannot run is refused before gigabytes are downloaded or read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specops.models.convert.checkpoint import read_json
from specops.models.convert.errors import ExportError
from specops.models.convert.families import family_of
from specops.models.convert.gguf import GgufCheckpoint
from specops.models.convert.gguf.architectures import check_architecture
from specops.models.convert.gguf.header import Metadata, read_beginning
from specops.models.convert.model_config import ModelConfig
from specops.models.gguf_files import is_gguf


def check(file: Path) -> None:
    """Raises ExportError if a model cannot be converted, as far as `file` tells."""
    if is_gguf(file):
        family_of(ModelConfig(GgufCheckpoint(file).config, file))
    elif file.suffix == ".json":
        family_of(ModelConfig(read_json(file), file))
    else:
        check_architecture(Metadata(read_beginning(file), file))


def main(arguments: list[str]) -> int:
    """Returns the exit status; standard error says what is wrong."""
    try:
        check(Path(arguments[0]))
    except (ExportError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
