"""Slots and blocks: which sequence gets them and gives them up, and that the first goes on."""

from specops.engine.request_queue import RequestQueue
from specops.engine.request_state import RequestState
from specops.engine.slots import SlotManager
from specops.request import FinishReason
from specops.runtime.batch import Batch
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.speculation.safeguard import Safeguard
from tests.simulated_target import (
    Served,
    SimulatedTarget,
    Text,
    chains,
    expected,
    make_order,
    make_request,
    make_scheduler,
    make_state,
    serve,
)
from tests.speculation.drafters.scripted import Scripted


def made(
    num_blocks: int, num_slots: int = 4, most_tokens: int = 4096
) -> tuple[SlotManager, SimulatedTarget, RequestQueue, Scripted]:
    target = SimulatedTarget(
        num_slots=num_slots, context=64 * num_blocks, num_blocks=num_blocks, reuse=PrefixSharing.OFF
    )
    drafter = Scripted(Text(), 1.0)
    order = make_order(target.cache)
    slots = SlotManager(target.cache, order, most_tokens, Safeguard())
    return slots, target, RequestQueue(order), drafter


def coming(
    waiting: RequestQueue, *lengths: int, drafter: Scripted | None = None
) -> list[RequestState]:
    """Requests that come long after each other."""
    asked = chains(drafter or Scripted(Text(), 1.0))
    fields = {"drafter": "scripted", "k_draft": 2}
    sequences = [
        make_state(make_request(length, 200, arrival=1000.0 * number, **fields), asked)
        for number, length in enumerate(lengths)
    ]
    for sequence in sequences:
        waiting.add(sequence)
    return sequences


def compute(running: SlotManager, target: SimulatedTarget, sequence: RequestState) -> None:
    """Its prompt, in one pass, and its first token."""
    assert running.reserve(sequence, len(sequence.tokens), Batch())
    sequence.num_computed = len(sequence.tokens)
    target.cache.commit(sequence.slot, sequence.tokens, sequence.num_computed)
    sequence.was_scheduled = True
    sequence.tokens.append(1)


def test_a_sequence_without_blocks_waits_and_only_an_urgent_one_overtakes_it() -> None:
    running, _, waiting, _ = made(4)
    sequences = coming(waiting, 100, 150, 10)
    running.admit(waiting)
    assert list(running) == sequences[:1]
    assert [item.slot for item in sequences] == [0, -1, -1]
    assert len(waiting) == 2
    suggestion = make_state(make_request(10, 8, priority=-1))
    waiting.add(suggestion)
    running.admit(waiting)
    assert list(running) == [sequences[0], suggestion]
    suggestion.finish = "stop"  # type: ignore[assignment]
    assert running.remove_finished() == [suggestion]
    sequences[0].finish = "stop"  # type: ignore[assignment]
    assert running.remove_finished() == sequences[:1]
    running.admit(waiting)
    assert list(running) == sequences[1:]


def test_blocks_that_running_prompts_will_need_are_not_given_away() -> None:
    running, _, waiting, _ = made(12, num_slots=8)
    coming(waiting, *[300] * 8)  # 5 blocks each
    running.admit(waiting)
    assert len(running) == 2


def test_the_last_in_the_order_is_preempted_and_comes_back_first() -> None:
    running, target, waiting, drafter = made(3, num_slots=3)
    first, second, third = coming(waiting, 60, 60, 60, drafter=drafter)
    running.admit(waiting)
    for sequence in (first, second, third):
        compute(running, target, sequence)
    for sequence in (first, second):  # the next token needs another block
        sequence.tokens += [1] * 4
        sequence.num_computed = 64
        target.cache.commit(sequence.slot, sequence.tokens, 64)
    assert running.schedule_decodes() == [first]
    coming(waiting, 1)
    assert running.preemptions == 2
    assert [item.preemptions for item in (first, second, third)] == [0, 1, 1]
    assert second.num_computed == third.num_computed == 0
    assert list(running) == [first]
    assert sorted(drafter.released) == [1, 2]
    first.finish = "stop"  # type: ignore[assignment]
    running.remove_finished()
    running.admit(waiting)
    assert list(running) == [second, third]
    assert len(waiting) == 1


def test_a_preempted_request_continues_from_what_it_left() -> None:
    """With a prefix cache only what others have taken is computed again."""
    target = SimulatedTarget(num_slots=2, context=320, num_blocks=5)
    scheduler = make_scheduler(target)
    first, second = make_request(90, 150, arrival=-100.0), make_request(60, 100)
    served = serve(scheduler, first, second)
    for request in (first, second):
        assert served.tokens(request) == expected(target.text, request)
    stats = served.stats(second)
    assert stats.preemptions >= 1
    assert stats.queue_seconds == 0  # it left the queue once, at the beginning
    assert sum(result.preempted for result in served.results) >= 1
    again = target.computed - (90 + 150 - 1) - (60 + 100 - 1)
    assert 0 < again < stats.preemptions * (60 + 100)


def test_a_preempted_request_that_is_cancelled_leaves_within_a_step() -> None:
    scheduler = make_scheduler(SimulatedTarget(num_slots=2, context=320, num_blocks=5))
    first, second = make_request(90, 150, arrival=-100.0), make_request(60, 100)
    for request in (first, second):
        scheduler.add(request)
    served = Served()
    while not served.step(scheduler).preempted:
        assert served.finish(second) is None
    scheduler.cancel(second.request_id)
    served.step(scheduler)
    assert served.finish(second) is FinishReason.CANCELLED


def test_no_sequence_of_the_batch_is_preempted_for_a_prompt() -> None:
    running, target, waiting, _ = made(3, num_slots=2)
    first, second = coming(waiting, 100, 60)
    running.admit(waiting)
    compute(running, target, second)
    assert target.cache.reserve(second.slot, 100)
    batch = Batch()
    batch.add(second.slot, 60, [1], 1)
    assert not running.reserve(first, 100, batch)
    assert list(running) == [first, second]
    assert running.reserve(first, 64, batch)
    assert running.reserve(first, 100, Batch())  # a later sequence is preempted otherwise
    assert list(running) == [first]


def test_a_prompt_that_is_preempted_while_a_batch_is_filled_is_left_out() -> None:
    """It was overtaken by a short one, which needs a block."""
    target = SimulatedTarget(num_slots=3, context=512, num_blocks=12)
    scheduler = make_scheduler(target)
    long, short = make_request(400, 3), make_request(150, 3)
    served = Served()
    for request in (long, short):
        scheduler.add(request)
        served.step(scheduler)
    assert [len(batch.spans) for batch in target.passes] == [1, 1]  # the long one is parked
    target.cache.allocate(2, [1])
    assert target.cache.reserve(2, 64 * target.cache.available_blocks)
    assert served.step(scheduler).preempted == 1
    assert [len(span.tokens) for span in target.passes[-1].spans] == [150 - 96]
    target.cache.release(2)
    while scheduler.busy:
        served.step(scheduler)
    assert served.stats(long).preemptions == 1
    for request in (long, short):
        assert served.tokens(request) == expected(target.text, request)


def test_an_unfinished_prompt_gives_its_blocks_to_an_answer() -> None:
    """Though the answer's request was admitted after it."""
    running, target, waiting, _ = made(3, num_slots=2)
    long = make_state(make_request(100, 20))
    short = make_state(make_request(60, 20, arrival=0.1))
    for sequence in (long, short):
        waiting.add(sequence)
        running.admit(waiting)
    assert list(running) == [long, short]
    assert target.cache.reserve(long.slot, 96)
    compute(running, target, short)
    short.tokens += [1] * 4
    short.num_computed = 64
    target.cache.commit(short.slot, short.tokens, 64)
    assert running.schedule_decodes() == [short]
    assert list(running) == [short]
    assert long.preemptions == 1


def test_only_its_own_drafter_follows_a_request() -> None:
    """A draft model keeps blocks of its cache for each prompt that it follows."""
    target = SimulatedTarget(num_slots=4)
    drafters = {name: Scripted(Text(), 1.0, name=name) for name in ("draft", "suffix")}
    order = make_order(target.cache)
    running, waiting = SlotManager(target.cache, order, 4096, Safeguard()), RequestQueue(order)
    asked = [("draft", 4), ("suffix", 4), ("none", 0), ("draft", 0)]
    for drafter, k_draft in asked:
        request = make_request(40, drafter=drafter, k_draft=k_draft)
        waiting.add(make_state(request, chains(*drafters.values())))
    running.admit(waiting)
    assert [sequence.slot for sequence in running] == [0, 1, 2, 3]
    assert {name: drafter.begun for name, drafter in drafters.items()} == {
        "draft": [0],
        "suffix": [1],
    }
    for sequence in running:
        sequence.finish = "stop"  # type: ignore[assignment]
    running.remove_finished()
    assert {name: drafter.released for name, drafter in drafters.items()} == {
        "draft": [0],
        "suffix": [1],
    }


def test_who_is_preempted_is_not_charged_again_and_loses_no_place() -> None:
    target = SimulatedTarget(num_slots=2, context=256, num_blocks=4, reuse=PrefixSharing.OFF)
    scheduler = make_scheduler(target)
    first = make_request(100, 120, client="ann", arrival=-100.0)
    second = make_request(60, 100, client="bob", arrival=-50.0)
    others = [make_request(60, 2, client="eve") for _ in range(4)]
    served = Served()
    for request in (first, second, *others):
        scheduler.add(request)
    ended = []
    while scheduler.busy:
        ended += [item.request_id for item in served.step(scheduler).outputs if item.finish]
    stats = served.stats(second)
    assert stats.preemptions > 0
    assert ended[0] == first.request_id
    assert served.tokens(second)
    begun = [output.request_id for result in served.results for output in result.outputs]
    assert begun.index(second.request_id) < min(begun.index(item.request_id) for item in others)
