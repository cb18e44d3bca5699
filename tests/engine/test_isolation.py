"""What a client has asked saves no other client work: neither the target's nor a draft model's."""

import pytest

from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.speculation.drafters.draft_model import DraftModelDrafter
from tests.simulated_target import (
    VOCAB,
    SimulatedTarget,
    Text,
    make_request,
    make_scheduler,
    serve,
    tinyllama,
)

PROMPT = tuple(range(1, 60)) * 4


@pytest.mark.parametrize(
    ("reuse", "shared"),
    [
        (PrefixSharing.OFF, set[str]()),
        (PrefixSharing.CLIENT, {"ann"}),
        (PrefixSharing.ALL, {"ann", "bob"}),
    ],
)
def test_only_clients_that_share_skip_work(reuse: PrefixSharing, shared: set[str]) -> None:
    """One slot: each gets what the last one has left. Work is counted in tokens computed."""
    models = [SimulatedTarget(num_slots=1, text=Text(seed=seed), reuse=reuse) for seed in (0, 1)]
    target, draft = models
    drafter = DraftModelDrafter(draft, tinyllama(0.1), vocab_size=VOCAB)  # type: ignore[arg-type]
    scheduler = make_scheduler(target, [drafter], draft_costs=tinyllama(0.1))

    def work(client: str) -> list[int]:
        before = [model.computed for model in models]
        fields = {"client": client, "drafter": "draft", "k_draft": 3, "adaptive": False}
        serve(scheduler, make_request(PROMPT, 20, **fields))
        return [model.computed - was for model, was in zip(models, before, strict=True)]

    first = work("ann")
    assert min(first) > len(PROMPT)
    for client in ("bob", "ann"):
        again = work(client)
        if client in shared:
            assert all(now < was - len(PROMPT) / 2 for now, was in zip(again, first, strict=True))
        else:
            assert again == first
