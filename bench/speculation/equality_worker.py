"""One engine in a separate process, which answers many requests at once in a repeatable order.

Threads and kernels are per process, so each choice of them needs a process. Call `load` first, then
`run` as often as needed. Clients arrive and leave by steps and tokens, not by seconds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.tools.worker import serve
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest, Output, SamplingParams
from specops.runtime import kernels

Token = tuple[int, float, tuple[tuple[int, float], ...]]
"""A token, its log-probability, and the most likely tokens at its position with theirs."""


def _tokens(outputs: Sequence[Output]) -> list[Token]:
    """The tokens of a request's outputs, with their exact log-probabilities."""
    found: list[Token] = []
    for piece in (piece for output in outputs for piece in output.pieces):
        top = tuple((token, float(value)) for token, value in piece.logprob.top)
        found.append((piece.token, float(piece.logprob.chosen), top))
    return found


def run(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run requests together, each from its step of arrival.

    Args:
        engine: runs them.
        requests: fields of `GenerationRequest`, and two more: `arrives` is a step, `leaves` the
            number of tokens after which the client leaves, or None.

    Returns:
        For each request its `tokens` and its number of `preemptions`.
    """
    scheduler = engine.scheduler
    arriving = sorted(range(len(requests)), key=lambda index: requests[index]["arrives"])
    outputs: dict[str, list[Output]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    leaves = {str(index): request["leaves"] for index, request in enumerate(requests)}
    step = 0
    while arriving or scheduler.busy:
        while arriving and (requests[arriving[0]]["arrives"] <= step or not scheduler.busy):
            index = arriving.pop(0)
            scheduler.add(engine.admit(_request(str(index), requests[index])))
        for output in scheduler.step().outputs:
            name = output.request_id
            outputs[name].append(output)
            counts[name] += len(output.pieces)
            if leaves[name] is not None and not output.finish and counts[name] >= leaves[name]:
                scheduler.cancel(name)
                leaves[name] = None
        step += 1
    found = (outputs[str(index)] for index in range(len(requests)))
    return [
        {"tokens": _tokens(parts), "preemptions": parts[-1].stats.preemptions} for parts in found
    ]


def _request(name: str, fields: Mapping[str, Any]) -> GenerationRequest:
    values = {key: value for key, value in fields.items() if key not in ("arrives", "leaves")}
    values["prompt_tokens"] = tuple(values["prompt_tokens"])
    values["sampling"] = SamplingParams(**values["sampling"])
    return GenerationRequest(request_id=name, ignore_eos=True, logprobs=1, **values)


class EqualityWorker:
    """The methods of the process: `load` first, then `run`; see `bench.tools.worker`."""

    def load(self, kernel: str, settings: Mapping[str, Any]) -> tuple[str, int]:
        """Load the engine with one of the kernels; returns its kernel and threads."""
        kernels.force(kernel)
        self._engine = Engine.load(replace(Settings(), **settings))
        info = self._engine.info
        return str(info.kernels), info.threads

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See `run`."""
        return run(self._engine, requests)


if __name__ == "__main__":
    serve(EqualityWorker())
