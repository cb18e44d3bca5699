"""Requests through an engine of this process, to their ends."""

from collections.abc import Sequence
from itertools import count

from specops.engine.engine import Engine
from specops.request import GenerationRequest, GenerationStats, TokenOutput
from tests.simulated_target import Served, serve

_ids = count()


def run(engine: Engine, *requests: GenerationRequest) -> Served:
    """Run requests beside each other; none of them may end in an error."""
    served = serve(engine.scheduler, *requests)
    for request in requests:
        error = served.outputs[request.request_id][-1].error
        assert error is None, error
    return served


def generate(
    engine: Engine, prompt: str | Sequence[int], tokens: int, **fields: object
) -> tuple[list[TokenOutput], GenerationStats]:
    """Return `tokens` pieces that continue a prompt, past any end, and their figures."""
    request = GenerationRequest(
        request_id=f"generated {next(_ids)}",
        prompt_tokens=engine.encode(prompt) if isinstance(prompt, str) else tuple(prompt),
        max_new_tokens=tokens,
        ignore_eos=True,
        **fields,  # type: ignore[arg-type]
    )
    outputs = list(engine.generate(request))
    stats = outputs[-1].stats
    assert stats is not None
    pieces = [piece for output in outputs for piece in output.pieces]
    assert len(pieces) == tokens
    return pieces, stats
