"""The load test's prompts: no two alike, of the lengths of real ones, and the same for a seed."""

import re
from collections import Counter
from functools import cache
from itertools import islice, pairwise
from statistics import mean, median, pstdev
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.stack.support import ROOT
from tests.stack.test_load_report import options
from training.corpus import HELD_OUT


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "api/models/demo/target/tokenizer.json"))


def spelled(text: str) -> list[bytes]:
    """The spellings of the demo pair's tokens; a blank stands for bytes of half a character."""
    encoded = tokenizer().encode(text, add_special_tokens=False)
    ends = [0, *(end for _, end in encoded.offsets)]
    return [text[start:end].encode() for start, end in pairwise(ends)]


def tokens(text: str) -> int:
    return len(spelled(text))


def workload(load: SimpleNamespace, *arguments: str, **more: Any) -> Any:
    """Parse options, and make the workload of one process."""
    names = ("chat", "context", "answer", "frame")
    server = {name: more.pop(name) for name in names if name in more}
    given = options(load, *arguments)
    return load.workload.Workload(
        given,
        load.workload.Server(more.pop("encode", load.texts.rough), **server),
        load.options.dataset(given),
        seed=given.seed,
        **more,
    )


def test_the_same_seed_asks_the_same_however_many_processes_there_are(
    load: SimpleNamespace,
) -> None:
    arguments = ("--seed", "7", "--turns", "2", "--think-time", "1", "--num-prompts", "20")
    one = workload(load, *arguments)
    asked = [one.conversation() for _ in range(10)]
    assert asked == [workload(load, *arguments).numbered(n) for n in range(10)]
    three = [workload(load, *arguments, index=n, processes=3) for n in range(3)]
    assert asked[:9] == [three[n % 3].conversation() for n in range(9)]
    assert sum(part.claim() for part in three for _ in range(20)) == 20
    assert sum(one.claim() for _ in range(50)) == 20
    assert asked != [workload(load, *arguments[2:]).numbered(n) for n in range(10)]
    assert all(len(c.turns) == len(c.tokens) == len(c.pauses) == 2 for c in asked)
    assert all(pause > 0 for c in asked for pause in c.pauses)


def test_a_process_that_joins_later_asks_something_else_and_exceeds_no_limit(
    load: SimpleNamespace,
) -> None:
    place, began = load.workload.place, ["c", "a"]
    assert [place("c", 5, began), place("a", 0, began)] == [0, 1]
    late = [place("b", 1, began), place("d", 6, began)]
    for limit in ("--num-prompts", "--max-concurrency"):
        assert not workload(load, limit, "9", index=late[0], processes=2).claim()
    parts = [workload(load, index=n, processes=2) for n in (0, 1, *late)]
    assert all(part.claim() for part in parts)
    numbers: list[int] = []
    for part in parts:
        part.numbered = numbers.append
        for _ in range(9):
            part.conversation()
    assert len({*numbers}) == 36
    assert {*range(18)} < {*numbers}
    assert sum(load.workload.share(9, n, 2) for n in (0, 1, *late)) == 9


@pytest.mark.parametrize("chat", [True, False])
def test_no_two_prompts_are_alike_or_begin_alike(load: SimpleNamespace, chat: bool) -> None:
    made: list[str] = []
    for seed in ("1", "2"):
        asks = workload(load, "--seed", seed, chat=chat)
        for conversation in map(asks.numbered, range(400)):
            assert (conversation.system is not None) == chat
            texts = (conversation.system or "", *conversation.history, *conversation.turns)
            made.append("\0".join(texts))
    assert len({*made}) == 800
    # No prompt is another one's beginning, and few share so much that a cache has it.
    assert not any(second.startswith(first) for first, second in pairwise(sorted(made)))
    assert len({text[:250] for text in made}) > 0.99 * 800


def test_a_conversation_says_one_thing_of_everybody_and_everything(load: SimpleNamespace) -> None:
    jobs = "|".join(job.partition("{")[0] for job in load.texts._SLOTS["job"])
    claims = (
        rf"([A-Z]\w+ [A-Z]\w+), ({jobs})",
        r"the ([a-z ]+) has been looked after by (\w+ \w+)",
        r"[Tt]he ([a-z ]+) is (\d+ years) old",
        r"([Ww])ith (\d+ employees)",
        r"(I) (?:run|work at|volunteer for) (.*?) (?:in|near)",
    )
    asks = workload(load, "--seed", "1", "--category", "chat", "--turns", "3")
    for chat in map(asks.numbered, range(200)):
        text = " ".join((chat.system or "", *chat.turns))
        said = [{*re.findall(claim, text)} for claim in claims]
        assert all(len(dict(pairs)) == len(pairs) for pairs in said), said


def test_kinds_are_those_that_the_model_can_answer(load: SimpleNamespace) -> None:
    kinds = load.texts.KINDS
    for kind in kinds:
        (text, *_) = workload(load, "--category", kind).numbered(0).turns
        assert text.strip()
    chats = [*map(workload(load).numbered, range(200))]
    assert {bool(chat.system) for chat in chats} == {bool(chat.history) for chat in chats}
    continued = workload(load, chat=False)
    for number in range(50):
        code = continued.numbered(number).turns[0]
        assert code.startswith(('"""', "# "))
    assert load.texts.HELD_OUT == HELD_OUT


def test_lengths_are_those_of_real_conversations_scaled_and_within_the_context(
    load: SimpleNamespace,
) -> None:
    frame = load.texts.Frame(question=12, system=5, turn=9)

    def sizes(*arguments: str, **server: Any) -> tuple[list[int], list[int], list[bool]]:
        asks = workload(load, *arguments, encode=spelled, frame=frame, **server)
        found = [asks.numbered(n) for n in range(600)]
        totals = []
        for one in found:
            system = tokens(one.system) + frame.system if one.system else 0
            told = sum(map(tokens, one.history)) + (frame.turn if one.history else 0)
            totals.append(frame.question + system + told + tokens(one.turns[0]))
        return totals, [one.tokens[0] for one in found], [one.cut for one in found]

    prompts, answers, cut = sizes("--seed", "1")
    assert mean(prompts) == pytest.approx(802, rel=0.03)
    for start in range(0, 600, 20):  # a short run asks for as much as a long one
        assert mean(prompts[start : start + 20]) == pytest.approx(802, rel=0.15)
        assert mean(answers[start : start + 20]) == pytest.approx(171, rel=0.15)
    assert median(prompts) == pytest.approx(392, rel=0.05)
    assert max(prompts) < 1.05 * 4094
    assert mean(answers) == pytest.approx(171, rel=0.04)
    assert median(answers) == pytest.approx(144, rel=0.05)
    assert not any(cut)
    halved, half_answers, _ = sizes("--seed", "1", "--length-scale", "0.5")
    assert mean(halved) == pytest.approx(mean(prompts) / 2, rel=0.03)
    assert mean(half_answers) == pytest.approx(mean(answers) / 2, rel=0.03)
    small, answers, cut = sizes("--seed", "1", context=1024, answer=256)
    assert max(p + a for p, a in zip(small, answers, strict=True)) <= 1024
    assert max(answers) == 256
    assert 0.2 < mean(cut) < 0.5
    exact, _, _ = sizes("--input-len", "300", "--output-len", "50")
    assert mean(exact) == pytest.approx(300, rel=0.02)
    assert pstdev(exact) < 15
    varied = workload(load, "--output-len", "50", "--range-ratio", "0.5")
    spread = [varied.numbered(n).tokens[0] for n in range(40)]
    assert 25 <= min(spread) < 40
    assert 60 < max(spread) <= 75


def test_prompts_repeat_as_often_as_is_asked_for(load: SimpleNamespace) -> None:
    asks = workload(load, "--repeat-share", "0.3", "--seed", "3")
    seen = Counter((c.system, c.history, c.turns) for c in map(asks.numbered, range(400)))
    assert 1 - len(seen) / 400 == pytest.approx(0.3, abs=0.04)
    shared = ("--prefix-repetition-prefix-len", "200", "--prefix-repetition-num-prefixes", "4")
    for chat in (True, False):
        asks = workload(load, *shared, encode=spelled, chat=chat)
        found = [asks.numbered(n) for n in range(60)]
        assert len({c.turns for c in found}) == 60
        begins = {c.system if chat else c.turns[0][:400] for c in found}
        assert len(begins) == 4
        if chat:
            assert all(tokens(begin) == pytest.approx(200, rel=0.1) for begin in begins)


def test_arrivals_have_the_rates_of_their_stages_and_come_as_bursty_as_asked(
    load: SimpleNamespace,
) -> None:
    stages = [load.shapes.Stage(100, rate=2), load.shapes.Stage(1000, rate=20)]
    for burstiness in (0.25, 1.0, 4.0):
        times = load.shapes.arrivals(stages, burstiness, "5", 0, 1)
        one = [*islice(times, 5000)]
        parts = [load.shapes.arrivals(stages, burstiness, "5", n, 2) for n in range(2)]
        assert sorted(at for part in parts for at in islice(part, 2500)) == one
        assert sum(at < 100 for at in one) == pytest.approx(200, rel=0.3)
        late = [at for at in one if at > 100]
        gaps = [second - first for first, second in pairwise(late)]
        assert 1 / mean(gaps) == pytest.approx(20, rel=0.15)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)
    assert [*load.shapes.arrivals(stages, 1.0, "5", 2, 2)] == []  # it joined later
