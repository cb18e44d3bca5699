"""A request for many embeddings is charged for all of its texts."""

from __future__ import annotations

from itertools import count

from specops.engine.request_queue import FairShares
from tests.simulated_target import make_request, make_sequence


def test_many_texts_in_one_request_bring_no_more_than_many_requests() -> None:
    queue, arrivals = FairShares(), count()

    def ask(client: str, texts: int) -> None:
        more = ((1,) * 10,) * (texts - 1)
        request = make_request(
            (1,) * 10,
            0,
            client=client,
            more_prompts=more,
            embed=True,
            arrival=float(next(arrivals)),
        )
        queue.add(make_sequence(request))

    for _ in range(3):
        ask("many", 5)
    for _ in range(8):
        ask("single", 1)
    order = [queue.next().request.client for _ in range(len(queue))]
    assert order[:8] == ["many", *["single"] * 5, "many", "single"]
