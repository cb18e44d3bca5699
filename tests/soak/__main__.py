"""`python -m tests.soak --minutes 60`: mixed load for a long time; the service must stay as it was.

A first server answers every request alone, by plain decoding. It is told to end under load; a
second server, with other settings, follows at its address and is watched. Its memory must be level,
its descriptors and threads as many as before, its answers those of the first server, and the last
answers as fast as the first ones. The exit status is 1 if that does not hold; the reasons follow.

Memory may grow by 1 MB an hour after the first sixth of the time. A run of less than 36 minutes
cannot tell that from a step of the allocator: it allows 2 MB in its second half. Where it sees
more, it goes on for half of its time again, twice at most, since a leak goes on too and a step does
not. The 95th percentile of the last sixth may be 15 % above that of the first one; a run of less
than ten minutes reports it without a judgement.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.tools.machine import describe
from tests.loopback import free_port
from tests.overload import serving
from tests.soak.load import Load, asks
from tests.soak.watch import HALF, WINDOWS, Course, at_rest, watch
from training.corpus import read_prompts

# At first so many times as many clients come, more than the server has places for: memory keeps its
# largest size. After 6 times as many it grew by 5 MB when other work on the machine made clients
# pile up later; after 15 times it stayed level while answers took 7 s.
CROWD_SECONDS, CROWD = 12.0, 15.0
CALM_SECONDS = 20.0  # after that, so that each kind of request is served: some start a thread
# The first server shares nothing between requests. When it is told to end, its queue is full: on a
# slow machine its one slot takes longer for it than the default timeout.
ALONE = {"SPECOPS_PREFIX_CACHE": "off", "SPECOPS_SLOTS": "1", "SPECOPS_DRAFTER": "none"}
ALONE |= {"SPECOPS_DRAIN_TIMEOUT": "50"}
# The KV cache is small, so that all of it has been used and freed before the first window.
WATCHED = {"SPECOPS_KV_TOKENS": "2048"}
COLUMNS = ("sixth", "answers", "median, ms", "95 %, ms", "CPU, ms", "memory, MB")
COLUMNS += ("descriptors", "threads", "others' cores")
TABLE = f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}"


@asynccontextmanager
async def server(
    folder: Path, port: int, variables: dict[str, str]
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A server that is ready; the end of the block kills it if it still runs."""
    context = serving(folder, port, **variables)
    _, process = await asyncio.to_thread(context.__enter__)
    try:
        yield process
    finally:
        context.__exit__(None, None, None)


async def end(process: subprocess.Popen[bytes], load: Load) -> None:
    """Tell a server to end, and check that it does."""
    load.ending, load.ready = time.monotonic(), None
    process.send_signal(signal.SIGTERM)
    if status := await asyncio.to_thread(process.wait, 60):
        load.problems.append(f"a server that was told to end did so with status {status}")


async def soak(folder: Path, load: Load, minutes: float) -> Course:
    """Run one server after the other; returns what was seen of the second one."""
    async with server(folder, load.port, ALONE) as first:
        await load.record()
        crowd = asyncio.create_task(load.play(CROWD_SECONDS, CROWD))
        await asyncio.sleep(CROWD_SECONDS / 4)
        await end(first, load)
    async with server(folder, load.port, WATCHED) as process:
        load.ready = time.monotonic()
        await crowd
        await load.play(CALM_SECONDS)
        await load.all_gone()
        before = await at_rest(process)
        course = Course(before, before, [], load.problems)
        while not course.seen_enough:
            window = await watch(process, load.play(minutes * 60 / WINDOWS), load.seconds)
            course.windows.append(window)
            print(f"| {len(course.windows)} | {window.row} |", flush=True)
        await load.all_gone()
        course.after = await at_rest(process)
        await end(process, load)
    return course


def report(course: Course, load: Load, arrivals: float, machine: str) -> str:
    """The page with the results."""
    lines = [
        f"### {course.minutes:.0f} minutes of mixed load: the demo pair",
        "",
        TABLE,
        *(f"| {number} | {window.row} |" for number, window in enumerate(course.windows, 1)),
        "",
        f"- clients, {arrivals:g} a second (the same at the same moments of each sixth): "
        + ", ".join(f"{number} {name}" for name, number in load.ended.most_common()),
        f"- memory that is no file's: {course.growth:+.2f} MB an hour "
        f"{'after the first sixth' if course.long else f'in the last {HALF} sixths'}, by the "
        "straight line through a sample every 2 s",
        f"- at rest before and after: {course.before.descriptors} and {course.after.descriptors} "
        f"descriptors, {course.before.threads} and {course.after.threads} threads, "
        f"{course.before.memory / 1e6:.2f} and {course.after.memory / 1e6:.2f} MB",
        f"- 95th percentile of the last sixth: {course.drift:+.0%} of the first one's",
        "- CPU: the server's, for each answer; others' cores: kept busy by other processes of "
        "the machine, on the mean",
        f"- measured on {machine}",
    ]
    reasons = course.reasons()
    lines += ["", "All is well." if not reasons else "Not well:", *(f"- {one}" for one in reasons)]
    return "\n".join(lines) + "\n"


async def run(minutes: float, arrivals: float) -> tuple[Course, Load]:
    """Soak in a temporary folder."""
    prompts = [prompt[:400] for prompt in read_prompts()]
    load = Load(free_port(), asks(prompts), arrivals)
    with tempfile.TemporaryDirectory() as folder:
        return await soak(Path(folder), load, minutes), load


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--arrivals", type=float, default=8, help="clients a second")
    parser.add_argument("--report", type=Path, help="file for the page, in Markdown")
    options = parser.parse_args()
    machine = describe().line
    print(TABLE, flush=True)
    course, load = asyncio.run(run(options.minutes, options.arrivals))
    page = report(course, load, options.arrivals, machine)
    if options.report:
        options.report.write_text(page, encoding="utf-8")
    print(page[page.index("\n- ") :])
    return int(bool(course.reasons()))


if __name__ == "__main__":
    sys.exit(main())
