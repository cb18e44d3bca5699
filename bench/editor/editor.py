"""`python -m bench editor`: the time from keystroke to suggestion, against llama-server.

Both serve the same GGUF of Qwen2.5-Coder's shapes and get the requests of llama.vim (`replay`).
Each trace starts on a fresh server. Lookups are measured on the real SmolLM2, at places where the
current line also occurs elsewhere in the prompt; it has no infill tokens, so it continues the text.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event as Flag

from bench.editor.llama_server import llama_server, llama_serving
from bench.editor.models import KIND, coder
from bench.editor.replay import CHATS, TOKENS, Played, chats, play, strokes
from bench.models import configured, plain
from bench.serving.load import Answer, ServerError, following
from bench.serving.server import environment, serving
from bench.tools.report import Outcome, Summary, Table, Target, progress
from loadtest.editor_trace import Event, trace
from specops.engine.engine import Engine
from specops.presets import CHAT
from specops.request import GenerationRequest

_ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "api/specops/http/server/connection.py",
    "tests/http/test_connection.py",
    "loadtest/protocols.py",
)
THREADS, SLOTS, CONTEXT, KV_TOKENS = 2, 4, 8192, 32_768  # the context of the presets
OURS, BESIDE, LLAMA = "specops", f"beside {CHATS} chats", "llama-server"
_FAMILY = "Qwen/Qwen2.5-"
_GOALS = {  # maximum seconds, by model
    "Qwen/Qwen2.5-Coder-0.5B": {"line": 0.35, "new line": None, "jump": 0.8},
    "Qwen/Qwen2.5-Coder-1.5B": {"line": 0.9, "new line": None, "jump": 2.2},
}
_BESIDE, _FASTER, _PER_PASS = 2.0, 1.5, 1.5
_SECONDS = 600.0  # of the whole trace, which provides the places for the lookups
_CHARACTERS, _MIN_LINE, _MIN_REST = 8000, 12, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The minutes of the trace to play, and the models."""

    minutes: float
    models: tuple[str, ...] = tuple(_GOALS)


FULL = Plan(10)
QUICK = Plan(1, ("Qwen/Qwen2.5-Coder-0.5B",))


def run(plan: Plan, cache: Path) -> Outcome:
    """Play the trace with all models on both servers, and measure lookups."""
    files = {name: (_ROOT / name).read_text(encoding="utf-8") for name in FILES}
    events = [*trace(files, _SECONDS, seed=1)]
    per_pass = _tokens_per_pass([*_repeated(files, events)])
    within = [event for event in events if event.at < plan.minutes * 60]
    played = {name: _play(name, files, within, cache) for name in plan.models}
    return outcome(plan, played, per_pass)


def _play(
    name: str, files: Mapping[str, str], events: Sequence[Event], cache: Path
) -> dict[str, Played]:
    file, executable, found = coder(name, cache), llama_server(cache), dict[str, Played]()
    settings = replace(
        plain(file, file.parent), context=CONTEXT, kv_tokens=KV_TOKENS, slots=SLOTS,
        threads=THREADS, prefix_cache="client", drafter="none",
    )  # fmt: skip
    for side in (OURS, BESIDE, LLAMA):
        progress(f"{name}: {side}")
        done, answers = Flag(), list[Answer]()
        if side == LLAMA:
            served = llama_serving(executable, file, threads=THREADS, context=CONTEXT)
        else:
            served = serving(environment(settings))
        with served as server:
            talks = following(server.port, chats([*files.values()], done, answers))
            with talks if side == BESIDE else nullcontext():
                try:
                    found[side] = asyncio.run(play(server.port, [*strokes(events)]))
                finally:
                    done.set()
        if bad := [one for one in answers if one.status != 200 or not one.whole]:
            raise ServerError(f"a chat failed: {bad[0].status} {bad[0].problem} {bad[0].body!r}")
        if side == BESIDE and len(answers) < 2 * CHATS:
            raise ServerError("the chats ended before the trace")
    return found


def _repeated(files: Mapping[str, str], events: Sequence[Event]) -> Iterator[str]:
    """The prompts, without the suffix, whose current line also occurs elsewhere in them."""
    for body in (event.body for event in events if event.kind != "warm"):
        chunks = [chunk["text"] for chunk in body["input_extra"]]
        shown = "\n".join((*chunks, body["input_prefix"]))[-_CHARACTERS:]
        before = body["input_prefix"].removeprefix("\n") + body["prompt"]
        if not before:  # the first line of a file
            continue
        text = next(text for text in files.values() if before in text)
        rest = text.partition(before)[2].partition("\n")[0]
        line = f"{body['prompt']}{rest}".strip()
        if len(rest) >= _MIN_REST and len(line) >= _MIN_LINE and line in shown:
            yield shown + body["prompt"]


def _tokens_per_pass(prompts: Sequence[str]) -> float:
    progress(f"lookups in {len(prompts)} places")
    engine, generated, passes = Engine.load(configured(CHAT).settings), 0, 0
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(
            request_id=str(number), prompt_tokens=engine.encode(prompt), max_new_tokens=TOKENS,
            drafter="suffix", k_draft=TOKENS, adaptive=True, stream=False,
        )  # fmt: skip
        *_, last = engine.generate(request)
        if last.stats is None:
            raise RuntimeError(f"a request failed: {last.error}")
        generated += last.stats.generated_tokens - 1
        passes += last.stats.sequence_steps
    return generated / passes


def outcome(plan: Plan, played: Mapping[str, Mapping[str, Played]], per_pass: float) -> Outcome:
    """A row per model and kind of keystroke."""
    rows, targets = [], []
    for name, sides in played.items():
        for kind, goal in _GOALS[name].items():
            if kind not in sides[OURS].seconds:
                continue
            seconds = {side: Summary.of(item.seconds[kind]) for side, item in sides.items()}
            read = [f"{Summary.of(sides[side].read[kind]).median:.0f}" for side in (OURS, LLAMA)]
            ours, beside, theirs = (summary.median for summary in seconds.values())
            shown = [summary.spread() for summary in seconds.values()]
            what = f"{name.removeprefix(_FAMILY)}, {kind}"
            rows.append((what, *shown, f"{theirs / ours:.2f}", *read))
            if goal:
                targets.append(Target(f"{what}, s", goal, ours, at_most=True))
                targets.append(Target(f"{what}, {BESIDE}", _BESIDE, beside / ours, at_most=True))
                targets.append(Target(f"{what}, over {LLAMA}", _FASTER, theirs / ours))
    targets.append(Target("lookups, tokens per pass", _PER_PASS, per_pass))
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
    columns = ("keystroke", OURS, BESIDE, LLAMA, "times", "read", f"read, {LLAMA}")
    table = Table("Suggestions in an editor", columns, rows, notes)
    record = {
        name: {side: asdict(one) for side, one in sides.items()} for name, sides in played.items()
    }
    result = {"plan": asdict(plan), "played": record, "tokens_per_pass": per_pass}
    return Outcome(result, [table], targets=targets)
