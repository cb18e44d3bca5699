"""`python -m tests.text.schemas PATH`: schemas as the world writes them, and answers by them.

PATH is a copy of the repository guidance-ai/jsonschemabench, whose folder `data` has about 9,500
schemas in ten sets. Each is compiled for the vocabulary of the model that SPECOPS_MODEL names, in a
process of its own. A table says by set how many compile, how many are refused, crash, or take
longer than the service waits; then come the reasons, and the keywords that are left out.
`--answers 300` asks the model for a sample of them, and validates the answers that ended by
themselves, apart from the keywords that the service names as not enforced. The exit status is 1 if
fewer than 95 % compile, one takes too long or crashes, or an answer is invalid.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.models import configured
from bench.tools.machine import describe
from specops.engine.engine import Engine
from specops.http.answering.submit import COMPILE_SECONDS
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams
from tests.text.schemas.answers import faults
from tests.text.schemas.world import (
    COMPILED,
    CRASHED,
    REFUSED,
    SLOW,
    Result,
    compile_all,
    grammar_of,
)

MIN_COMPILED = 0.95
KINDS = (COMPILED, REFUSED, SLOW, CRASHED)
ANSWER_TOKENS = 300
PROMPT_TOKENS = 200  # of what a schema says about itself


def main() -> int:
    """Compile the schemas, then ask for answers; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.text.schemas", description=__doc__)
    parser.add_argument("path", type=Path, help="the repository's folder, or its `data`")
    parser.add_argument("--answers", type=int, default=0, help="schemas to answer")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    folder = options.path / "data" if (options.path / "data").is_dir() else options.path
    files = sorted(folder.glob("*/*.json"))
    if not files:
        parser.error(f"{folder} has no folders with schemas")
    model = configured()
    print(f"{len(files)} schemas, {model.title}; {describe().line}", flush=True)
    results = list(compile_all(files, model.folder(), COMPILE_SECONDS))
    report(results)
    share = sum(result.kind == COMPILED for result in results) / len(results)
    bad = sum(result.kind in (CRASHED, SLOW) for result in results)
    invalid = 0
    if options.answers:
        good = [result for result in results if result.kind == COMPILED]
        sample = random.Random(options.seed).sample(good, min(options.answers, len(good)))
        invalid = answer(Engine.load(model.settings), sample)
    return int(share < MIN_COMPILED or bad > 0 or invalid > 0)


def report(results: Sequence[Result]) -> None:
    """Print what became of the schemas of each set, why, and what is not enforced."""
    print(f"| set | schemas | {' | '.join(KINDS)} | share | whole | slowest, s |")
    print("|---|" + "---:|" * (len(KINDS) + 4))
    sets = sorted({result.file.parent.name for result in results})
    for name in (*sets, "all"):
        own = [result for result in results if name in ("all", result.file.parent.name)]
        count = Counter(result.kind for result in own)
        whole = sum(result.kind == COMPILED and not result.left_out for result in own)
        figures = [len(own), *(count[kind] for kind in KINDS)]
        figures += [f"{count[COMPILED] / len(own):.1%}", whole]
        figures += [f"{max(result.seconds for result in own):.2f}"]
        print(f"| {name} | {' | '.join(map(str, figures))} |")
    reasons = Counter(_kind(result.reason) for result in results if result.kind != COMPILED)
    for reason, times in reasons.most_common():
        print(f"{times} not compiled: {reason}")
    for result in results:
        if result.kind in (SLOW, CRASHED):
            print(f"{result.kind}: {result.file} ({result.reason})")
    keywords = Counter(
        keyword
        for result in results
        for keyword in {path.rpartition("/")[2] for path in result.left_out}
    )
    named = ", ".join(f"{keyword} {times}" for keyword, times in keywords.most_common())
    print(f"schemas in which a keyword is not enforced: {named or 'none'}", flush=True)


def _kind(reason: str) -> str:
    """Return a reason without what differs from schema to schema."""
    reason = re.sub(r"^\S*/(\S+): ", r"`\1`: ", reason)
    reason = re.sub(r"\S+ does not exist", "the definition does not exist", reason)
    return re.sub(r"( while processing| are not supported:| property) .*", "", reason)[:100]


def answer(engine: Engine, sample: Sequence[Result]) -> int:
    """Have a model answer by schemas; returns the number of invalid answers."""
    count: Counter[str] = Counter()
    for result, text in answers(engine, sample):
        if text is None:
            count["cut off"] += 1
            continue
        schema = json.loads(result.file.read_text())
        found = faults(schema, json.loads(text), result.left_out)
        count["invalid" if found else "valid"] += 1
        if found:
            print(f"invalid: {result.file}: {found[0]}; {text[:300]}", flush=True)
    named = sum(bool(result.left_out) for result in sample)
    ended = count["valid"] + count["invalid"]
    print(
        f"{len(sample)} answers ({named} by schemas with keywords that are not enforced): "
        f"{ended} ended by themselves, {count['valid']} of these valid; "
        f"{count['cut off']} were cut off at {ANSWER_TOKENS} tokens",
        flush=True,
    )
    return count["invalid"]


def answers(engine: Engine, sample: Sequence[Result]) -> Iterator[tuple[Result, str | None]]:
    """Yield an answer by each schema, several at once; None: it was cut off."""
    waiting, running = deque(enumerate(sample)), 0
    texts: dict[str, str] = {}
    while waiting or running:
        while waiting and running < engine.info.slots:
            number, result = waiting.popleft()
            running += 1
            texts[str(number)] = ""
            engine.scheduler.add(engine.admit(_request(engine, str(number), result)))
        for output in engine.scheduler.step().outputs:
            texts[output.request_id] += "".join(piece.text for piece in output.pieces)
            if output.finish is not None:
                running -= 1
                text = texts.pop(output.request_id)
                yield sample[int(output.request_id)], _ended(output, text)


def _ended(output: Output, text: str) -> str | None:
    if output.finish is FinishReason.ERROR:
        raise RuntimeError(output.error)
    return text if output.finish is FinishReason.STOP else None


def _request(engine: Engine, name: str, result: Result) -> GenerationRequest:
    schema = json.loads(result.file.read_text())
    about = " ".join(str(schema.get(word, "")) for word in ("title", "description"))
    question = f"Write an example in JSON, with short values. {about}"[:PROMPT_TOKENS]
    prompt = engine.encode_chat(engine.render_chat([{"role": "user", "content": question}]))
    return GenerationRequest(
        request_id=name,
        prompt_tokens=prompt,
        max_new_tokens=ANSWER_TOKENS,
        sampling=SamplingParams(temperature=0.7, seed=int(name), grammar=grammar_of(result.file)),
        drafter=engine.info.default_drafter,
        k_draft=8,
        adaptive=True,
    )


if __name__ == "__main__":
    sys.exit(main())
