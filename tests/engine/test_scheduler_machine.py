"""Whatever comes, leaves, is preempted or shared: everybody gets what he would get alone."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specops.request import FinishReason, GenerationRequest, SamplingParams
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from tests.engine.test_scheduler import DRAFTERS, drafters
from tests.runtime.kvcache.naive import check_integrity
from tests.simulated_target import (
    VOCAB,
    Served,
    SimulatedTarget,
    expected,
    make_request,
    make_scheduler,
)

CONTEXT = 4 * BLOCK_TOKENS - 6
RNG = np.random.default_rng(1)
# Prompts begin alike, in all clients' requests.
BEGINNINGS = [tuple(RNG.integers(1, VOCAB, 200).tolist()) for _ in range(2)]

options = st.fixed_dictionaries(
    {
        "drafter": st.sampled_from(DRAFTERS),
        "k_draft": st.integers(0, 8),
        "adaptive": st.booleans(),
        "stream": st.booleans(),
        "client": st.sampled_from(["", "ann", "bob"]),
        "sampling": st.just(SamplingParams())
        | st.builds(SamplingParams, st.just(1.2), st.just(6), seed=st.integers(0, 3)),
    }
)


class Serving(RuleBasedStateMachine):
    """Requests come and go at random, on a machine with few slots and few blocks."""

    @initialize(
        slots=st.integers(1, 4),
        spare=st.integers(0, 4) | st.just(20),
        reuse=st.sampled_from(PrefixSharing),
        budget=st.sampled_from([16, 50, 96]),
        pause=st.sampled_from([0.05, float("inf")]),
    )
    def begin(
        self,
        *,
        slots: int,
        spare: int,
        reuse: PrefixSharing,
        budget: int,
        pause: float,
    ) -> None:
        blocks = -(-CONTEXT // BLOCK_TOKENS) + spare  # one request of any length always fits
        self.target = SimulatedTarget(
            num_slots=slots, context=CONTEXT, num_blocks=blocks, reuse=reuse
        )
        self.scheduler = make_scheduler(
            self.target,
            drafters(self.target.text),
            max_inter_token_latency=pause,
            max_batched_tokens=budget,
        )
        self.served = Served()
        self.requests: list[GenerationRequest] = []
        self.answers: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        shared=st.integers(0, 190),
        tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=9),
        output=st.integers(1, 45),
        fields=options,
    )
    def add(
        self,
        beginning: tuple[int, ...],
        shared: int,
        tail: list[int],
        output: int,
        fields: dict[str, object],
    ) -> None:
        request = make_request((*beginning[:shared], *tail), output, **fields)
        self.answers[request.request_id] = expected(self.target.text, request)
        self.requests.append(request)
        self.scheduler.add(request)

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.requests)).request_id
        self.scheduler.cancel(name)
        self.cancelled.add(name)

    @rule()
    def cancel_all(self) -> None:
        self.scheduler.cancel_all()
        self.cancelled |= {request.request_id for request in self.requests}

    def step(self) -> None:
        passes = len(self.target.passes)
        before = [
            item
            for item in self.scheduler.running
            if not item.num_uncomputed_tokens and not item.finish
        ]
        lengths = [len(item.tokens) for item in before]
        result = self.served.step(self.scheduler)
        assert not self.cancelled & self.scheduler._in_flight.keys()  # they left within the step
        assert len(self.target.passes) - passes == (result.kind is not None)
        for sequence, length in zip(before, lengths, strict=True):
            assert len(sequence.tokens) > length or sequence.preemptions
        assert result.running == len(self.scheduler.running) <= self.target.cache.num_slots

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "served"):
            return
        cache, running = self.target.cache, self.scheduler.running
        assert len({sequence.slot for sequence in running}) == len(running)
        assert all(sequence.slot >= 0 for sequence in running)
        waiting = [sequence.slot for sequence in self.scheduler.waiting]
        assert waiting == [-1] * len(waiting)
        assert cache.tokens == sum(sequence.num_computed for sequence in running)
        check_integrity(cache)
        most = sum(-(-(len(item.tokens) + 9) // BLOCK_TOKENS) for item in running)
        assert cache.used_blocks <= most
        for request in self.requests:
            found = self.served.tokens(request)
            assert found == self.answers[request.request_id][: len(found)]

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        bound = 50 + sum(len(item.prompt_tokens) + item.max_new_tokens for item in self.requests)
        for _ in range(4 * bound):
            if not self.scheduler.busy:
                break
            self.step()
        for request in self.requests:
            finish = self.served.finish(request)
            if finish is FinishReason.CANCELLED:
                assert request.request_id in self.cancelled
            else:
                assert finish is FinishReason.LENGTH
                assert self.served.tokens(request) == self.answers[request.request_id]
        assert not self.scheduler.busy
        assert self.target.cache.used_blocks == self.target.cache.tokens == 0


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestServing = Serving.TestCase
