"""`python -m tests.fuzz --seconds 60`: kernels under sanitizers, sockets, requests, files, chats.

Half of the time goes to the kernels, a fifth to clients that cut, reset and stall (`sockets`), a
twentieth each to odd bodies (`requests`) and to long texts (`texts`), a tenth each to hostile
grammars (`grammars`) and to readers of files with `rendering`.
`--cases` sets the number of cases for each reader instead of a time, ten times as many for sockets,
fifty times as many for the kernels, whose cases take some milliseconds, and an eighth for texts.
The command prints how many cases ran. A finding ends its subject; it is printed with the seed, with
which `--seed` repeats the case, and the exit status is 1.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.fuzz import grammars, kernels, parsers, rendering, requests, sockets, texts


class Subject(NamedTuple):
    """What is fuzzed.

    Attributes:
        run: takes a number of cases, or 0 and seconds, and the first seed; tells what it did.
        share: of the time.
        factor: cases for each of a reader's.
    """

    run: Callable[[int, float, int], str]
    share: float
    factor: float = 1.0


_REST = 0.1 / (len(parsers.READERS) + 1)
SUBJECTS = {
    "kernels": Subject(kernels.fuzz, 0.5, 50),
    "sockets": Subject(sockets.run, 0.2, 10),
    "requests": Subject(requests.run, 0.05),
    "texts": Subject(texts.run, 0.05, 1 / 8),
    "grammars": Subject(grammars.run, 0.1),
    **{name: Subject(partial(parsers.run, name), _REST) for name in parsers.READERS},
    "rendering": Subject(rendering.run, _REST),
}


def main() -> int:
    """Run for as long as asked; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=0, help="of each reader, instead of a time")
    parser.add_argument("--seed", type=int, help="of the first case; random if not given")
    parser.add_argument("--only", choices=SUBJECTS, help="one subject alone")
    options = parser.parse_args()
    seed = time.time_ns() >> 20 << 20 if options.seed is None else options.seed
    chosen = {options.only: SUBJECTS[options.only]} if options.only else SUBJECTS
    failed: list[str] = []
    for name, subject in chosen.items():
        seconds = options.seconds * (1.0 if options.only else subject.share)
        try:
            told = subject.run(math.ceil(options.cases * subject.factor), seconds, seed)
        except (AssertionError, TimeoutError) as finding:
            told = f"{finding!r} {' '.join(getattr(finding, '__notes__', ()))}"
            failed.append(name)
        print(f"{name}: {told}", flush=True)
    if failed:  # once more at the end: a finding stands far above
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
