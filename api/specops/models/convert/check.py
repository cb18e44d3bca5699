"""`python -m specops.models.convert.check FILE…`: whether a model can be converted.

FILE is a config.json or a GGUF; or several are the shards of a GGUF, or their beginnings, that are
being downloaded. This reads no weights, so that what cannot run is refused before gigabytes are
downloaded or read. It prints how many of the files are here as far as that takes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from specops.models.convert.checkpoint import read_json
from specops.models.convert.families import family_of
from specops.models.convert.gguf.architectures import family_in
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.gguf.header import Header, Metadata, read_beginning
from specops.models.convert.model_config import ModelConfig
from specops.models.errors import ModelError
from specops.models.gguf_files import is_gguf


def check(files: Sequence[Path]) -> int:
    """Checks a model as far as its files tell; returns how many files tell all that they can.

    Raises:
        ModelError: it cannot be converted.
    """
    first = files[0]
    if first.suffix == ".json":
        config = read_json(first)
    elif is_gguf(first) and len(files) == 1:
        config = GgufCheckpoint(first).config
    else:
        headers = list[Header]()
        for file in files:
            metadata, header = read_beginning(file) if file.exists() else ({}, None)
            if file is first and "general.architecture" in metadata:
                family_in(Metadata(metadata, file))
            if header is None:
                return len(headers)
            headers.append(header)
        config = GgufCheckpoint(first, headers).config
    family_of(ModelConfig(config, first))
    return len(files)


def main(arguments: list[str]) -> int:
    """Returns the exit status; standard error has the reason."""
    try:
        print(check([Path(file) for file in arguments]))
    except (ModelError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
