"""The engine's loop: a step drops cancelled requests, admits, and runs one forward pass for all.

`running` gives slots and KV blocks, `planner` plans the pass, `postprocessor` turns its logits into
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from specops.engine.planner import PlannedStep, Planner
from specops.engine.postprocessor import Postprocessor, Progress
from specops.engine.proposer import Proposer
from specops.engine.request_queue import FirstComeFirstServed, RequestQueue
from specops.engine.request_state import RequestState
from specops.engine.slots import SlotManager
from specops.engine.token_budget import TokenBudget
from specops.request import FinishReason, GenerationRequest, Output, StepResult, StepStats
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Drafter
from specops.text.grammar import Grammars
from specops.text.tokenizer import Tokenizer

_NO_BOUND = float("inf")
_DEADLINES_KEPT = 64  # deadlines of ended requests before they are removed


class Scheduler:
    """Owns the requests in flight. Used by one thread.

    Args:
        target: the model that answers.
        drafters: sources of draft tokens by name.
        controller: chooses how many draft tokens pay.
        cost_model: of the target's passes.
        tokenizer: the target's.
        draft_cost_model: of the draft model's passes; None without one.
        end_tokens: tokens that end a text.
        max_batched_tokens: most tokens of a pass.
        max_inter_token_latency: seconds between two tokens of a stream that prompts may cause.
        waiting: the order in which requests get slots; first come, first served by default.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        cost_model: CostModel,
        tokenizer: Tokenizer,
        *,
        draft_cost_model: CostModel | None = None,
        end_tokens: frozenset[int],
        max_batched_tokens: int,
        max_inter_token_latency: float = _NO_BOUND,
        waiting: RequestQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.cost_model = cost_model
        self.draft_cost_model = draft_cost_model
        self.waiting: RequestQueue = FirstComeFirstServed() if waiting is None else waiting
        self.grammars = Grammars(tokenizer, target.vocab_size, end_tokens)
        self._running = SlotManager(target.cache, drafters)
        self._postprocessor = Postprocessor(target, controller, clock)
        self._budget = TokenBudget(
            cost_model,
            draft_cost_model,
            max_inter_token_latency=max_inter_token_latency,
            max_batched_tokens=max_batched_tokens,
        )
        self._proposer = Proposer(
            target.cache, drafters, controller, clock, max_tokens=max_batched_tokens
        )
        self._planner = Planner(target.cache, self._running, self._proposer, self._budget, clock)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._clock = clock
        self._in_flight: dict[str, RequestState] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap, with ended requests in it
        self._left: list[RequestState] = []  # sequences that ended while they waited

    @property
    def controller(self) -> Controller:
        """Chooses draft lengths; another one may take over between two steps."""
        return self._proposer.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self._proposer.controller = self._postprocessor.controller = controller

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._in_flight)

    @property
    def running(self) -> list[RequestState]:
        """The sequences with a slot, in the order of admission."""
        return list(self._running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request that fits into the context."""
        sequence = RequestState(
            request,
            self._tokenizer,
            end_tokens=self._end_tokens,
            clock=self._clock,
            grammars=self.grammars,
        )
        self._in_flight[request.request_id] = sequence
        heappush(self._deadlines, (request.deadline, request.request_id))
        self.waiting.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step. A request that has ended already is no error."""
        self._end_one(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: str) -> None:
        """End a request at the next step whose answer is whole, as its stop string does."""
        self._end_one(request_id, FinishReason.STOP)

    def cancel_all(self) -> None:
        """End every request at the next step."""
        for sequence in self._in_flight.values():
            self._end(sequence, FinishReason.CANCELLED)

    def step(self) -> StepResult:
        """Drop cancelled and expired requests, admit, and run one pass for all that are running."""
        started = self._clock()
        self._expire(started)
        outputs = list(self._retire())
        preempted = self._running.preemptions
        self._running.admit(self.waiting)
        planned = self._planner.plan(started)
        stats = None
        if planned.batch.spans:
            stats = self._run(planned, started, self._running.preemptions - preempted)
            for sequence in self._running:
                if not sequence.finish and (output := self._output(sequence)):
                    outputs.append(output)
        outputs += self._retire()
        cache = self.target.cache
        return StepResult(
            stats=stats,
            outputs=tuple(outputs),
            running=len(self._running),
            waiting=len(self.waiting) + self._running.in_line,
            kv_tokens=cache.tokens,
            kept_tokens=cache.kept_tokens,
            used_blocks=cache.used_blocks,
            shared_blocks=cache.shared_blocks,
            kept_blocks=cache.kept_blocks,
        )

    # -- requests --------------------------------------------------------------------------------

    def _end_one(self, request_id: str, reason: FinishReason) -> None:
        if (sequence := self._in_flight.get(request_id)) is not None:
            self._end(sequence, reason)

    def _end(self, sequence: RequestState, reason: FinishReason) -> None:
        if not sequence.finish:
            sequence.finish = reason
            if self.waiting.remove(sequence):
                self._left.append(sequence)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heappop(self._deadlines)
            sequence = self._in_flight.get(request_id)
            if sequence is not None and sequence.request.deadline < now:
                self._end(sequence, FinishReason.TIMEOUT)

    def _retire(self) -> Iterator[Output]:
        """Take out finished sequences and free their slots."""
        left, self._left = self._left, []
        for sequence in (*left, *self._running.remove_finished()):
            output = self._output(sequence)
            if output is None:
                raise AssertionError("a finished sequence always has a last output")
            del self._in_flight[output.request_id]
            yield output
        if len(self._deadlines) > 2 * len(self._in_flight) + _DEADLINES_KEPT:
            here = self._in_flight.values()
            self._deadlines = [(item.request.deadline, item.request.request_id) for item in here]
            heapify(self._deadlines)

    def _output(self, sequence: RequestState) -> Output | None:
        output = sequence.output()
        if output is not None:
            self.waiting.generated(sequence.request.client, len(output.pieces))
        return output

    # -- the pass --------------------------------------------------------------------------------

    def _run(self, step: PlannedStep, started: float, preempted: int) -> StepStats:
        batch = step.batch
        begun = self._clock()
        logits = self.target.forward(batch)
        seconds = self._clock() - begun
        self.cost_model.observe(batch.num_tokens, batch.attention_work, seconds)
        progress = self._postprocessor.process(step, logits)
        self._learn(step, progress, self._clock() - started)
        return StepStats(
            step.kind,
            seconds,
            decoding=len(step.proposals),
            prompt_tokens=sum(chunk.tokens for chunk in step.chunks),
            budget_tokens=step.budget,
            cached_tokens=step.cached,
            prefix_hits=step.prefix_hits,
            emitted_tokens=sum(progress.decoded) + progress.first_tokens,
            first_tokens=progress.first_tokens,
            drafts=tuple(progress.drafts),
            draft_seconds=step.drafting.total + step.reading_seconds,
            missed_drafters=tuple(item.missed for item in step.proposals if item.missed),
            declined_drafters=tuple(item.declined for item in step.proposals if item.declined),
            preempted=preempted,
        )

    def _learn(self, step: PlannedStep, progress: Progress, took: float) -> None:
        """Tell budget and controller the step's tokens and times."""
        if not step.proposals:
            return
        if step.chunks:
            self._budget.observe(step.batch, took)
        self.controller.stepped(
            step.proposals,
            progress.decoded,
            [1 + len(proposal.tokens) for proposal in step.proposals],
            draft_seconds=step.drafting.total,
            model_seconds=step.drafting.model,
            asking_seconds=step.drafting.asking,
        )
