"""The engine's loop. A step expires, admits, plans, runs one forward pass for all, and retires.

`slots` gives slots and KV blocks, `planner` plans the pass. What comes of its logits is here:
drafts are verified, and requests get their tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from specops.engine.drafting import Drafting
from specops.engine.order import Order
from specops.engine.pass_budget import MANY_ROWS, PassBudget
from specops.engine.planner import Planner
from specops.engine.request_queue import RequestQueue
from specops.engine.request_state import RequestState
from specops.engine.scheduled import Scheduled
from specops.engine.slots import SlotManager
from specops.request import GRAMMAR, Draft, FinishReason, GenerationRequest, Step
from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel, mean_with
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import NO_DRAFT, Drafter
from specops.speculation.safeguard import Safeguard
from specops.speculation.verifier import Verdict, compare, verify
from specops.text.grammar import Grammars
from specops.text.tokenizer import Tokenizer

_NO_BOUND = float("inf")
_LATEST = 1 / 8  # weight of the newest pass in the mean times to choose and to read tokens


class Scheduler:
    """Owns the requests in flight. Used by one thread.

    Args:
        target: the model that answers.
        drafters: whom each name in a request asks for draft tokens, in their order.
        controller: chooses how many draft tokens pay.
        cost_model: of the target's passes.
        tokenizer: the target's.
        draft_cost_model: of the passes of a draft model or head; None where there are none.
        end_tokens: tokens that end a text.
        max_batched_tokens: most tokens of a pass.
        most_rows: of logits in a pass, of requests that decode.
        max_inter_token_latency: seconds between two tokens of a stream that prompts may cause.
        order: who goes first.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafters: Mapping[str, tuple[Drafter, ...]],
        controller: Controller,
        cost_model: CostModel,
        tokenizer: Tokenizer,
        *,
        draft_cost_model: CostModel | None = None,
        end_tokens: frozenset[int],
        max_batched_tokens: int,
        most_rows: int = MANY_ROWS,
        max_inter_token_latency: float = _NO_BOUND,
        order: Order | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.cost_model = cost_model
        self.draft_cost_model = draft_cost_model
        self._order = order or Order(target.cache, cost_model.reading)
        self.waiting = RequestQueue(self._order)
        self.grammars = Grammars(tokenizer, target.vocab_size, end_tokens)
        self._safeguard = Safeguard()
        self._slots = SlotManager(
            target.cache,
            self._order,
            max_batched_tokens,
            self._safeguard,
            lambda state, drafter: self.controller.reads(drafter.name, state.speculation),
        )
        self._budget = PassBudget(
            cost_model,
            draft_cost_model,
            max_batched_tokens=max_batched_tokens,
            most_rows=most_rows,
            max_inter_token_latency=max_inter_token_latency,
        )
        self._drafting = Drafting(
            *(target.cache, self._slots, drafters, controller),
            budget=self._budget,
            safeguard=self._safeguard,
            clock=clock,
        )
        self._followers = {one for chain in drafters.values() for one in chain if one.follows}
        self._planner = Planner(target.cache, self._slots, self._drafting, self._budget, clock)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._clock = clock
        self._in_flight: dict[str, RequestState] = {}
        self._next_deadline = _NO_BOUND  # no request in flight has an earlier one
        self._left: list[RequestState] = []  # requests that ended while they waited
        self._ends = False  # a request has ended between two steps
        # The latest step that only decoded, and where its seconds are counted from, until the next
        # one begins; see `Controller.observe`. A request that comes or ends takes as long as many
        # tokens: such steps do not count.
        self._decoded: tuple[int, int, int, float, float] | None = None
        self._choosing = 0.0  # seconds in this step to choose tokens, and to learn from drafts

    @property
    def controller(self) -> Controller:
        """Chooses draft lengths; another one may take over between two steps."""
        return self._drafting.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self._drafting.controller = controller

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._in_flight)

    @property
    def running(self) -> list[RequestState]:
        """The requests with a slot, in the order of admission."""
        return list(self._slots)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request that fits into the context."""
        state = RequestState(
            request,
            self._tokenizer,
            end_tokens=self._end_tokens,
            clock=self._clock,
            grammars=self.grammars,
            drafters=self.drafters.get(request.drafter, ()),
        )
        self._in_flight[request.request_id] = state
        self._decoded = None
        self._next_deadline = min(self._next_deadline, request.deadline)
        self.waiting.add(state)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step. A request that has ended already is no error."""
        self._end_one(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: str) -> None:
        """End a request at the next step whose answer is whole, as its stop string does."""
        self._end_one(request_id, FinishReason.STOP)

    def cancel_all(self) -> None:
        """End every request at the next step."""
        for state in self._in_flight.values():
            self._end(state, FinishReason.CANCELLED)

    def step(self) -> Step:
        """Run one forward pass for all requests that run, or none where there is nothing to do."""
        step, started = Step(), self._clock()
        step.draft_seconds = reading = self._drafting.count_reading()
        if self._decoded is not None:
            requests, drafted, tokens, seconds, begun = self._decoded
            outside = started - begun - reading
            self.controller.observe(requests, drafted, tokens, seconds, outside)
        self._decoded, self._choosing = None, 0.0
        preempted, before = self._slots.preemptions, len(self._in_flight)
        self._expire(step, started)
        self._slots.admit(self.waiting)
        batch, scheduled = self._planner.plan(step, started)
        step.preempted = self._slots.preemptions - preempted
        if scheduled:
            self._run(step, batch, scheduled, started)
        self._retire(step)
        self._note_load(step)
        if step.decoding and not step.prompt_tokens and len(self._in_flight) == before:
            begun = started + step.seconds + step.draft_seconds - reading + self._choosing
            drafted, tokens = step.draft_tokens, step.emitted_tokens
            self._decoded = step.decoding, drafted, tokens, step.seconds, begun
        return step

    # -- requests --------------------------------------------------------------------------------

    def _end_one(self, request_id: str, reason: FinishReason) -> None:
        if (state := self._in_flight.get(request_id)) is not None:
            self._end(state, reason)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        if not state.finish:
            state.finish, self._ends = reason, True
            if self.waiting.remove(state):
                self._left.append(state)

    def _expire(self, step: Step, now: float) -> None:
        """Take out cancelled requests, and requests whose deadline has passed."""
        if self._next_deadline < now:
            later = _NO_BOUND
            for state in self._in_flight.values():
                if (deadline := state.request.deadline) < now:
                    self._end(state, FinishReason.TIMEOUT)
                else:
                    later = min(later, deadline)
            self._next_deadline = later
        if self._ends:
            self._ends = False
            self._retire(step)

    def _retire(self, step: Step) -> None:
        """Take out finished requests and free their slots."""
        left, self._left = self._left, []
        for state in (*left, *self._slots.remove_finished()):
            self._emit_output(step, state)
            del self._in_flight[state.request.request_id]

    def _emit_output(self, step: Step, state: RequestState) -> None:
        """Add a request's new output to the step's."""
        if (output := state.output(step.ended)) is not None:
            step.outputs.append(output)

    def _run(self, step: Step, batch: Batch, scheduled: list[Scheduled], started: float) -> None:
        """Run the pass, give requests their tokens, and learn the times of both."""
        begun = self._clock()
        logits = self.target.forward(batch)
        step.ended = self._clock()
        step.seconds = step.ended - begun
        work, spans = batch.attention_work, len(batch.spans)
        self.cost_model.observe(batch.num_tokens, work, step.seconds, spans, batch.num_logits)
        self._process(step, scheduled, logits)
        for client, tokens in step.client_tokens.items():
            self._order.generated(client, tokens)
            step.emitted_tokens += tokens
        if step.decoding and step.prompt_tokens:
            self._budget.observe(batch, self._clock() - started)
        if step.decoding:
            decoding = scheduled[: step.decoding]
            proposals = [item.proposal for item in decoding if item.proposal is not None]
            past = sum([item.start for item in decoding])
            self._choosing += self._drafting.learn(step, proposals, past)
        for item in scheduled:
            if not item.state.finish:
                self._emit_output(step, item.state)

    def _note_load(self, step: Step) -> None:
        safeguard = self._safeguard
        step.failed_drafters, safeguard.switched_off = safeguard.switched_off, []
        step.running = len(self._slots)
        if (kept := self.target.cache.recurrent) is not None:
            step.snapshots = dict(kept.events)
            kept.events.clear()

    # -- from logits to tokens ---------------------------------------------------------------------

    def _process(self, step: Step, scheduled: Sequence[Scheduled], logits: Floats) -> None:
        """Give every request of a pass its tokens. A request that raises an error fails alone.

        Args:
            step: gets the counts of tokens and drafts.
            scheduled: the requests of the pass that was computed.
            logits: [n, V], of the tokens that needed them, in the order of the spans.
        """
        decoding = scheduled[: step.decoding]
        row, chosen = 0, _likeliest(decoding, logits)
        for item in decoding:
            state, end = item.state, row + item.num_logits
            state.guarded(self._process_decoded, step, item, logits, row, chosen)
            if state.adjusts:
                state.settle(step.seconds)
            row = end
        place = row  # in the hidden states
        for item in scheduled[step.decoding :]:
            end = row + item.num_logits if item.scored else row
            item.state.guarded(self._process_prompt, step, item, logits[row:end], place)
            if item.state.adjusts:
                item.state.settle(step.seconds)
            row, place = end, place + item.num_logits

    def _process_decoded(
        self,
        step: Step,
        item: Scheduled,
        logits: Floats,
        row: int,
        likeliest: Sequence[int],
    ) -> None:
        """Verify a draft. Append its accepted tokens and the target's own token after them.

        Args:
            step: gets the verified drafts.
            item: the request's part in the pass.
            logits: [n, V], of the pass.
            row: of the request's first logits. Its last k + 1 come after the text's last token, or
                the last forced one, and after each of the k draft tokens. Where the request wants
                probabilities, the logits of the forced tokens come before these.
            likeliest: [n], the likeliest token of each row; none where a request of the pass draws
                its tokens, or logits are not finite.
        """
        state, forced, proposal = item.state, item.forced, item.proposal
        if proposal is None:
            if not likeliest or state.adjusts:
                token = self._choose(item, NO_DRAFT, logits[row : row + 1]).next_token
            else:
                token = likeliest[row]
            self._emit(step, item, [token], logits, row)
            self._computed(state, 1)
            state.count_step()
            return
        draft = proposal.draft
        drafted, end = len(draft.tokens), row + item.num_logits
        first = end - 1 - drafted
        if not likeliest or state.adjusts:
            accepted, token = self._choose(item, draft, logits[first:end])
        elif drafted:
            accepted, token = compare(likeliest[first:end], draft.tokens)
        else:
            accepted, token = 0, likeliest[first]
        came = [*draft.tokens[:accepted], token] if accepted else [token]
        tokens = [*forced, *came] if forced else came
        emitted = self._emit(step, item, tokens, logits, row)
        # Where the request ends inside of the accepted tokens, the rest was never output.
        kept = min(len(tokens) - 1, emitted)
        # The cache's entries of rejected tokens are overwritten by the next pass.
        self._computed(state, 1 + kept)
        drafts = []
        if forced:
            drafts.append(Draft(forced, drafter=GRAMMAR, accepted=min(len(forced), kept)))
        if drafted:
            draft.accepted, draft.adaptive = max(0, kept - len(forced)), state.request.adaptive
            judged = draft.accepted + (draft.accepted == accepted)
            draft.accept_probs, draft.probs = draft.accept_probs[:judged], None
            drafts.append(draft)
        if drafts:
            step.drafts += drafts
        state.count_step(drafts, missed=proposal.missed is not None)
        proposal.came, proposal.emitted = came, emitted

    def _choose(self, item: Scheduled, draft: Draft, logits: Floats) -> Verdict:
        """Adjust logits, draw tokens, and learn how long that takes."""
        state, begun = item.state, self._clock()
        adjusted, drawing = state.adjusted(logits, draft.tokens, item.forced), self._clock()
        if state.adjusts:
            self.controller.adjusted(state.speculation, len(logits), drawing - begun)
        verdict, end = _verify(state, draft, adjusted, len(item.forced)), self._clock()
        if state.speculation.sampled:
            self.controller.drawn(verdict.accepted + 1, end - drawing)
        self._choosing += end - begun
        state.choosing_seconds = mean_with(state.choosing_seconds, end - begun, _LATEST)
        return verdict

    def _process_prompt(self, step: Step, item: Scheduled, logits: Floats, place: int) -> None:
        """Note a computed piece of a prompt.

        Args:
            step: gets the counts of tokens.
            item: the piece.
            logits: of its last tokens, where these need logits.
            place: of these tokens' first hidden state.
        """
        state, rows = item.state, item.num_logits
        self._computed(state, len(item.tokens))
        if item.ends_prompt:
            self.target.cache.take_snapshot(state.slot)
        if (reader := state.reader) is not None and rows:
            hidden, begun = self.target.hidden_states(place, rows), self._clock()
            reader.read(item.start, logits, hidden)
            seconds = (self._clock() - begun) / rows
            reader.seconds = mean_with(reader.seconds, seconds, _LATEST)
        if item.ends_prompt and state.request.embed:
            if state.next_prompt():
                cache = self.target.cache
                cache.release(state.slot)
                cache.allocate(state.slot, state.tokens, share=False)
        elif item.ends_prompt and not state.remaining:
            state.finish = FinishReason.LENGTH
        elif item.ends_prompt:
            token = _verify(state, NO_DRAFT, state.adjusted(logits[-1:], ())).next_token
            self._emit(step, item, [token], logits, len(logits) - 1)
            step.first_tokens += 1

    def _emit(
        self, step: Step, item: Scheduled, tokens: list[int], logits: Floats, row: int
    ) -> int:
        """Append a request's new tokens to it, and count them; see `RequestState.append`.

        `row` is of the first token's logits.
        """
        state = item.state
        request, before = state.request, state.last_token
        drafter = item.proposal.draft.drafter if item.proposal else ""
        wanted = None if request.logprobs is None else logits[row : row + len(tokens)]
        count = state.append(tokens, drafter, wanted, step.ended, len(item.forced))
        client = request.client
        step.client_tokens[client] = step.client_tokens.get(client, 0) + count
        if before is not None:
            each = (step.ended - before) / count
            step.intervals[each] = step.intervals.get(each, 0) + count
        return count

    def _computed(self, state: RequestState, tokens: int) -> None:
        state.num_computed += tokens
        self.target.cache.commit(state.slot, state.tokens, state.num_computed)
        for drafter in self._followers:
            self._safeguard.call(
                drafter, None, self.target.publish_hidden_states, state.slot, state.num_computed
            )


def _likeliest(decoding: Sequence[Scheduled], logits: Floats) -> list[int]:
    """The likeliest token of each row; none where a request draws, or logits are not finite."""
    if not decoding or any(item.state.speculation.sampled for item in decoding):
        return []
    rows = range(sum([item.num_logits for item in decoding]))
    chosen: list[int] = logits[: len(rows)].argmax(axis=-1).tolist()
    finite = all(map(math.isfinite, map(logits.item, rows, chosen)))
    return chosen if finite else []  # then each request finds out alone


def _verify(state: RequestState, draft: Draft, logits: Floats, forced: int = 0) -> Verdict:
    """Verify a request's draft after its forced tokens; without a draft, choose its next token."""
    return verify(
        logits,
        draft.tokens,
        draft.probs,
        sampling=state.request.sampling,
        noise=state.noise,
        rng=state.rng,
        position=len(state.tokens) + forced,
    )
