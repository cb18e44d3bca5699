"""Whoever sends what and when: everybody is served, and clients that want alike get alike."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specops.request import FinishReason
from specops.rows import PrefixCache
from specops.waiting import ByArrival, ByClient
from tests.simulated_target import SimulatedTarget, make_scheduler
from tests.test_pacing import request

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


@given(st.sampled_from([ByArrival, ByClient]), st.integers(1, 4), arrivals)
@settings(max_examples=60, deadline=None)
def test_everybody_ends_and_nobody_waits_for_more_than_what_came_before_or_beside(
    order: type[ByArrival | ByClient],
    rows: int,
    coming: list[tuple[str, int, int, int, int | None]],
) -> None:
    """Every step computes something, so the steps are bounded by what there is to compute."""
    target = SimulatedTarget(rows=rows, capacity=512)
    scheduler = make_scheduler(target, waiting=order())
    patience: dict[str, int | None] = {}
    ended: dict[str, FinishReason] = {}
    steps, to_come = 0, list(coming)
    most = sum(prompt // 8 + 1 + output + wait for _, prompt, output, wait, _ in coming)
    pause = 0
    while to_come or scheduler.busy:
        while to_come and pause >= to_come[0][3]:
            client, prompt, output, _, leaves = to_come.pop(0)
            item = request(prompt, output, client=client)
            patience[item.request_id] = leaves
            scheduler.add(item)
            pause = 0
        pause += 1
        for name, left in patience.items():
            if left is not None and name not in ended:
                patience[name] = left - 1
                if left == 0:
                    scheduler.cancel(name)
        for output in scheduler.step().outputs:
            if output.finish:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish
        steps += 1
        assert steps <= most + 2
    assert ended.keys() == patience.keys()
    stayed = {name for name, left in patience.items() if left is None}
    assert all(ended[name] is FinishReason.LENGTH for name in stayed)
    assert scheduler.rows.tokens == 0


@pytest.mark.parametrize(("order", "fair"), [(ByArrival, False), (ByClient, True)])
def test_shares_per_client_keep_one_from_taking_it_all(
    order: type[ByArrival | ByClient], fair: bool
) -> None:
    """One client sends 40 requests at once, another 10 after them, all alike."""
    target = SimulatedTarget(rows=2, capacity=512)
    scheduler = make_scheduler(target, waiting=order(), prefix_cache=PrefixCache.OFF)
    items = [request(30, 10, client=client) for client in ["many"] * 40 + ["few"] * 10]
    clients = {item.request_id: item.client for item in items}
    for item in items:
        scheduler.add(item)
    ended: list[str] = []
    while scheduler.busy:
        ended += [
            clients[output.request_id] for output in scheduler.step().outputs if output.finish
        ]
    served = Counter(ended[:20])
    assert (abs(served["many"] - served["few"]) <= 2) == fair
    assert len(ended) == 50
