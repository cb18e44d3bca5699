"""The order of the queue: no client starves, and clients with the same demand get the same."""

from collections import Counter
from itertools import count
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.engine import order
from specops.engine.order import Order
from specops.engine.request_queue import RequestQueue
from specops.engine.request_state import RequestState
from specops.request import FinishReason
from tests.simulated_target import (
    Served,
    SimulatedTarget,
    make_order,
    make_request,
    make_scheduler,
    make_state,
    serve,
)

_arrivals = count()

# Prompt and output lengths.
requests = st.tuples(st.integers(1, 50), st.integers(1, 50))


def waiting(client: str, prompt: int, **fields: object) -> RequestState:
    arrival = float(next(_arrivals))
    return make_state(make_request((1,) * prompt, 50, client=client, arrival=arrival, **fields))


def taken(queue: RequestQueue) -> RequestState:
    """Give the first request a slot."""
    state = queue.first()
    queue.take(state)
    return state


def cost(prompt: int, output: int) -> float:
    return prompt + 2 * output


def test_equal_requests_are_served_in_the_order_of_their_coming() -> None:
    queue = RequestQueue(make_order())
    items = [waiting("ann", 3) for _ in range(5)]
    for item in items:
        queue.add(item)
    assert queue.remove(items[2])
    assert set(queue) == {items[0], items[1], items[3], items[4]}
    assert [taken(queue) for _ in range(len(queue))] == [items[0], items[1], items[3], items[4]]
    with pytest.raises(IndexError):
        queue.first()
    assert not queue.remove(items[0])


@given(
    st.integers(1, 4),
    st.sampled_from([0, 100]),
    st.lists(st.tuples(st.sampled_from("abcd"), requests), min_size=1, max_size=60),
    st.data(),
)
def test_no_client_starves_and_shares_are_equal(
    slots: int, lead: int, items: list[tuple[str, tuple[int, int]]], data: st.DataObject
) -> None:
    """Slots are taken and given back in any order; all arrive at once, or when they like.

    While two clients both have requests waiting, what they have been given differs by no more than
    the allowed lead and what slots and one more request of the largest size hold.
    """
    queue = RequestQueue(make_order())
    to_come, running = list(items), []
    outputs: dict[str, int] = {}
    given: dict[str, float] = {}
    backlogged: dict[frozenset[str], dict[str, float]] = {}
    largest = max(cost(*lengths) for _, lengths in items)
    served = 0
    while to_come or len(queue) or running:
        choices = ["come"] * bool(to_come) + ["end"] * bool(running)
        choices += ["begin"] * (len(queue) > 0 and len(running) < slots)
        match data.draw(st.sampled_from(choices)):
            case "come":
                client, (prompt, output) = to_come.pop(0)
                item = waiting(client, prompt)
                outputs[item.request.request_id] = output
                queue.add(item)
            case "begin":
                with patch.object(order, "LEAD", lead):
                    item = taken(queue)
                served += 1
                running.append(item)
                client = item.request.client
                given[client] = given.get(client, 0.0) + len(item.request.prompt_tokens)
            case "end":
                item = running.pop(data.draw(st.integers(0, len(running) - 1)))
                output = outputs[item.request.request_id]
                queue.order.generated(item.request.client, output)
                given[item.request.client] += 2 * output
        clients = {item.request.client for item in queue}
        pairs = {frozenset((a, b)) for a in clients for b in clients if a < b}
        backlogged = {pair: backlogged.get(pair, dict(given)) for pair in pairs}
        for pair, before in backlogged.items():
            a, b = (given.get(name, 0.0) - before.get(name, 0.0) for name in sorted(pair))
            assert abs(a - b) <= lead + 2 * (slots + 1) * largest
    assert served == len(items)


def test_a_suggestion_goes_first_and_warming_last_and_each_turn_comes() -> None:
    queue = RequestQueue(make_order())

    def add(priority: int, arrival: float) -> RequestState:
        request = make_request(3, 5, client="ann", arrival=arrival, priority=priority)
        state = make_state(request)
        queue.add(state)
        return state

    warming, chats = add(1, 0.0), [add(0, arrival) for arrival in (0.1, 0.2)]
    suggestions = [add(-1, 0.5 * second) for second in range(1, 40)]
    gone = suggestions.pop(3)
    assert queue.remove(gone)
    assert not queue.remove(gone)
    each = [taken(queue) for _ in range(len(queue))]
    assert each[:2] == suggestions[:2]
    waits = {state: each.index(state) for state in (*chats, warming)}
    assert waits[chats[0]] < waits[chats[1]] < waits[warming] == len(each) - 1
    assert each[waits[chats[0]] - 1].request.arrival == 10.0  # those after it came 10 s later


def test_many_texts_to_embed_in_one_request_bring_no_more_than_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request for many embeddings is charged for all of its texts."""
    monkeypatch.setattr(order, "LEAD", 0)
    queue = RequestQueue(make_order())
    for client, texts in [("many", 5)] * 3 + [("single", 1)] * 8:
        more = ((1,) * 10,) * (texts - 1)
        queue.add(waiting(client, 10, more_prompts=more, embed=True))
    taken_from = [taken(queue).request.client for _ in range(len(queue))]
    assert taken_from[:8] == ["many", *["single"] * 5, "many", "single"]


@pytest.mark.parametrize("clients", [1, 8])
def test_a_step_ranks_few_of_those_that_wait(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where requests come, go, are cancelled or pass their deadline."""
    ranked, rank = 0, Order.rank

    def counted(self: Order, state: RequestState) -> float:
        nonlocal ranked
        ranked += 1
        return rank(self, state)

    monkeypatch.setattr(Order, "rank", counted)
    target = SimulatedTarget(num_slots=2)
    scheduler = make_scheduler(target)
    deadlines = {0: 0.5, 1: 1e9}
    requests = [
        make_request(5, 3, deadline=deadlines[index % 2], client=str(index % clients))
        for index in range(600)
    ]
    for request in requests:
        scheduler.add(request)
    for request in requests[41::2]:
        scheduler.cancel(request.request_id)
    served = Served()
    while scheduler.busy:
        target.clock.now += 0.05
        before = ranked
        served.step(scheduler)
        assert ranked - before < 60
    ends = Counter(served.finish(request) for request in requests)
    assert ends[FinishReason.CANCELLED] == 280
    assert ends[FinishReason.LENGTH] >= 20
    assert ends.total() == ends[FinishReason.TIMEOUT] + ends[FinishReason.LENGTH] + 280


def test_a_prompt_that_becomes_known_or_unknown_while_it_waits_changes_its_place() -> None:
    target = SimulatedTarget(num_slots=2, context=2048, num_blocks=32)
    document, other = make_request(640).prompt_tokens, make_request(640).prompt_tokens
    queue = RequestQueue(make_order(target.cache))
    short, again, new = (
        make_state(make_request(prompt, 1, arrival=arrival))
        for prompt, arrival in ((200, 0.3), (document, 0.0), (other, 0.0))
    )
    for state in (short, again, new):
        queue.add(state)
    assert queue.first() is short
    serve(make_scheduler(target), make_request(document, 1))
    assert taken(queue) is short  # ranks are computed anew as slots are given
    assert queue.first() is again
    serve(make_scheduler(target), *(make_request(1500, 1) for _ in range(2)))  # its blocks go
    sooner = make_state(make_request(600, 1))
    queue.add(sooner)
    assert [taken(queue) for _ in range(3)] == [sooner, again, new]


def test_shares_hold_between_prompts_in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever got more goes behind, although its prompt is shorter and came first."""
    monkeypatch.setattr(order, "LEAD", 100)
    rule = make_order()
    early, late = waiting("ann", 50), waiting("bob", 200)
    for slot, state in enumerate((early, late)):
        state.slot = slot
        rule.admitted(state)
    prompts = [late, early]
    rule.sort(prompts)
    assert prompts == [early, late]
    rule.generated("ann", 60)
    rule.sort(prompts)
    assert prompts == [late, early]
    late.num_computed = 100  # now both got about as much
    rule.sort(prompts)
    assert prompts == [early, late]
