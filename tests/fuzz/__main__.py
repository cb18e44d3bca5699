"""`python -m tests.fuzz --seconds 60`: kernels under sanitizers, sockets, requests, files, chats.

Half of the time goes to the kernels, a fifth to clients that cut, reset and stall (`sockets`), a
twentieth each to odd bodies (`requests`) and to long texts (`texts`), a tenth to
hostile grammars (`grammars`).
`--cases` sets the number of cases for each reader instead of a time, ten times as many for sockets,
a hundred times as many for the kernels, whose cases take a tenth of a millisecond, and an eighth
for texts. The command prints how many cases ran. On the first finding it prints the seed, with
which `--seed` repeats the case, and exits with 1.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import grammars, kernels, rendering, requests, sockets, texts
from tests.fuzz.parsers import READERS, FindingError, Subject

KERNEL_CASES = 100  # for each case of a reader
MOST_MEMORY = 4 << 30  # of addresses; the largest tables of positions take 1.5 GB of them


def main() -> int:
    """Run for as long as asked; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=0, help="of each reader, instead of a time")
    parser.add_argument("--seed", type=int, help="of the first case; random if not given")
    subjects = ["kernels", "sockets", "requests", "texts", "grammars", *READERS, "rendering"]
    parser.add_argument("--only", choices=subjects, help="one subject alone")
    options = parser.parse_args()
    names = [name for name in READERS if options.only in (None, name)]
    rendered = options.only in (None, "rendering")
    shares = (0.5, 0.2, 0.05, 0.1, 0.1) if options.only is None else (1.0,) * 5
    kernel_seconds, socket_seconds, request_seconds, grammar_seconds, rest_seconds = (
        part * options.seconds for part in shares
    )
    share = rest_seconds / max(1, len(names) + rendered)
    seed = time.time_ns() >> 20 << 20 if options.seed is None else options.seed
    failed: list[str] = []

    def note(name: str, status: int) -> None:
        failed.extend([name] * (status != 0))

    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "kernels"):
            program = kernels.build(Path(folder))
            cases = options.cases * KERNEL_CASES
            note("kernels", kernels.run(program, cases, kernel_seconds, seed))
        if options.only in (None, "sockets"):
            note("sockets", sockets.run(options.cases * sockets.CASES, socket_seconds, seed))
        if options.only in (None, "requests"):
            note("requests", requests.run(options.cases, request_seconds, seed))
        if options.only in (None, "texts"):
            note("texts", texts.run(-(-options.cases // 8), request_seconds, seed))
        if options.only in (None, "grammars"):
            note("grammars", grammars.run(options.cases, grammar_seconds, seed))
        # A reader that believes a file's huge sizes is a finding, too.
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        for name in names:
            subject = Subject(name, Path(folder) / name)
            note(name, _read(subject, options.cases, share, seed))
        if rendered:
            note("rendering", rendering.run(options.cases, share, seed))
    if failed:  # once more at the end: a finding stands far above
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _read(subject: Subject, cases: int, seconds: float, first: int) -> int:
    end = time.monotonic() + seconds
    read = count = 0
    for seed in itertools.count(first):
        if count == cases if cases else time.monotonic() >= end:
            break
        try:
            read += subject.run(seed)
        except FindingError as finding:
            print(finding, file=sys.stderr)
            return 1
        count += 1
    print(f"{subject.name}: {count:,} damaged files, {read:,} of them read all the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
