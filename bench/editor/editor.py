"""`python -m bench editor`: the time from keystroke to suggestion, against llama-server.

Both serve the same GGUF of Qwen2.5-Coder's shapes and get the requests of llama.vim (`replay`).
Each trace starts on a fresh server.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event as Flag

from bench.editor.llama_server import llama_server, llama_serving
from bench.editor.models import KIND, qwen
from bench.editor.replay import CHATS, TOKENS, Played, chats, play, strokes
from bench.models import plain
from bench.serving.load import Answer, ServerError, following
from bench.serving.server import environment, serving
from bench.tools.report import Outcome, Summary, Table, Target, progress
from loadtest.editor_trace import Event, trace

_ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "api/specops/http/server/connection.py",
    "tests/http/test_connection.py",
    "loadtest/protocols.py",
)
THREADS, SLOTS, CONTEXT, KV_TOKENS = 2, 4, 8192, 32_768  # the context of the presets
OURS, WITH_CHATS, LLAMA = "specops", f"next to {CHATS} chats", "llama-server"
_FAMILY = "Qwen/Qwen2.5-"
_GOALS = {  # maximum seconds, by model
    "Qwen/Qwen2.5-Coder-0.5B": {"line": 0.35, "new line": None, "jump": 0.8},
    "Qwen/Qwen2.5-Coder-1.5B": {"line": 0.9, "new line": None, "jump": 2.2},
}
_SLOWER, _FASTER = 2.0, 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The minutes of the trace to play, and the models."""

    minutes: float
    models: tuple[str, ...] = tuple(_GOALS)


FULL = Plan(10)
QUICK = Plan(1, ("Qwen/Qwen2.5-Coder-0.5B",))


def run(plan: Plan, cache: Path) -> Outcome:
    """Play the trace with all models on both servers."""
    files = {name: (_ROOT / name).read_text(encoding="utf-8") for name in FILES}
    events = [*trace(files, plan.minutes * 60, seed=1)]
    return outcome(plan, {name: _play(name, files, events, cache) for name in plan.models})


def _play(
    name: str, files: Mapping[str, str], events: Sequence[Event], cache: Path
) -> dict[str, Played]:
    file, executable, found = qwen(name, cache), llama_server(cache), dict[str, Played]()
    settings = replace(
        plain(file, file.parent), context=CONTEXT, kv_tokens=KV_TOKENS, slots=SLOTS,
        threads=THREADS, prefix_cache="client", drafter="none",
    )  # fmt: skip
    for side in (OURS, WITH_CHATS, LLAMA):
        progress(f"{name}: {side}")
        done, answers = Flag(), list[Answer]()
        if side == LLAMA:
            served = llama_serving(executable, file, threads=THREADS, context=CONTEXT)
        else:
            served = serving(environment(settings))
        with served as server:
            talks = following(server.port, chats([*files.values()], done, answers))
            with talks if side == WITH_CHATS else nullcontext():
                try:
                    found[side] = asyncio.run(play(server.port, [*strokes(events)]))
                finally:
                    done.set()
        if bad := [one for one in answers if one.status != 200 or not one.whole]:
            raise ServerError(f"a chat failed: {bad[0].status} {bad[0].problem} {bad[0].body!r}")
        if side == WITH_CHATS and len(answers) < 2 * CHATS:
            raise ServerError("the chats ended before the trace")
    return found


def outcome(plan: Plan, played: Mapping[str, Mapping[str, Played]]) -> Outcome:
    """A row per model and kind of keystroke."""
    rows, targets = [], []
    for name, sides in played.items():
        for kind, goal in _GOALS[name].items():
            if kind not in sides[OURS].seconds:
                continue
            seconds = {side: Summary.of(item.seconds[kind]) for side, item in sides.items()}
            read = [f"{Summary.of(sides[side].read[kind]).median:.0f}" for side in (OURS, LLAMA)]
            ours, busy, theirs = (summary.median for summary in seconds.values())
            shown = [summary.spread() for summary in seconds.values()]
            what = f"{name.removeprefix(_FAMILY)}, {kind}"
            rows.append((what, *shown, f"{theirs / ours:.2f}", *read))
            if goal:
                targets.append(Target(f"{what}, s", goal, ours, at_most=True))
                targets.append(Target(f"{what}, {WITH_CHATS}", _SLOWER, busy / ours, at_most=True))
                targets.append(Target(f"{what}, over {LLAMA}", _FASTER, theirs / ours))
    gone = [
        f"{side} {item.cancelled} of {item.hasty}"
        for sides in played.values() for side, item in sides.items()
    ]  # fmt: skip
    notes = (
        f"seconds from a keystroke to {TOKENS} tokens, {KIND}, {THREADS} threads, medians "
        "[quartiles]; read: computed tokens of the prompt, median",
        f"{plan.minutes:g} minutes of typing in {', '.join(FILES)}; bench/editor/replay.py says "
        "which parts are played and which time is skipped",
        f"hasty keystrokes whose requests the next ones cancelled: {', '.join(gone)}",
        f"{OURS} cuts prompts to what it can read in t_max_prompt_ms, which {LLAMA} ignores",
        "plain decoding: a random model repeats itself more than any real one",
    )
    columns = ("keystroke", OURS, WITH_CHATS, LLAMA, "times", "read", f"read, {LLAMA}")
    table = Table("Suggestions in an editor", columns, rows, notes)
    record = {
        name: {side: asdict(one) for side, one in sides.items()} for name, sides in played.items()
    }
    return Outcome({"plan": asdict(plan), "played": record}, [table], targets=targets)
