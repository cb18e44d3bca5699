"""Whoever sends what and when: everybody is served, and clients that want alike get alike."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specops.request import FinishReason
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from tests.simulated_target import Served, SimulatedTarget, make_request, make_scheduler

# client, prompt and output lengths, steps until it comes, steps until it leaves (or not)
arrivals = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "eve"]),
        st.integers(1, 300),
        st.integers(1, 30),
        st.integers(0, 5),
        st.none() | st.integers(0, 40),
    ),
    min_size=1,
    max_size=25,
)


@given(
    st.integers(1, 4),
    st.sampled_from([6, 100]),
    arrivals,
)
@settings(max_examples=60)
def test_everybody_ends_and_nobody_waits_for_more_than_what_came_before_or_beside(
    slots: int,
    blocks: int,
    coming: list[tuple[str, int, int, int, int | None]],
) -> None:
    """Every step computes something, so the steps are bounded by what there is to compute."""
    target = SimulatedTarget(num_slots=slots, context=384, num_blocks=blocks, max_tokens=32)
    scheduler = make_scheduler(target)
    patience: dict[str, int | None] = {}
    served, requests, steps, pause = Served(), [], 0, 0
    to_come = list(coming)
    while to_come or scheduler.busy:
        while to_come and pause >= to_come[0][3]:
            client, prompt, output, _, leaves = to_come.pop(0)
            request = make_request(prompt, output, client=client)
            requests.append(request)
            patience[request.request_id] = leaves
            scheduler.add(request)
            pause = 0
        pause += 1
        for request in requests:
            name, left = request.request_id, patience[request.request_id]
            if left is not None and served.finish(request) is None:
                patience[name] = left - 1
                if left == 0:
                    scheduler.cancel(name)
        served.step(scheduler)
        steps += 1
        again = sum(result.preempted for result in served.results)
        most = sum(prompt // 8 + output + wait + 2 for _, prompt, output, wait, _ in coming)
        assert steps <= most + 20 * again + 2
    for request in requests:
        stayed = patience[request.request_id] is None
        assert served.finish(request) is FinishReason.LENGTH or not stayed
        assert served.finish(request) is not None
    assert target.cache.used_blocks == 0


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
