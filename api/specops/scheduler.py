"""Which request gets the next forward pass. Moves requests; knows neither tensors nor HTTP.

One step is at most one chunk of one prompt, then one pass per sequence that is past its prompt:
those with guesses verify them row by row, the others share a pass. `rows` knows who is in which
row, `waiting` whose turn it is, `pacing` how long a chunk may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from specops.controller import Controller
from specops.decoder import Decoder
from specops.drafters.base import Drafter
from specops.pacing import Pace
from specops.request import (
    FinishReason,
    GenerationRequest,
    Output,
    StepKind,
    StepResult,
    StepStats,
)
from specops.rows import PrefixCache, Rows, Slot
from specops.sequence import Sequence
from specops.speculation import Turn, jump, plan_round, reader
from specops.tokenizer import Tokenizer
from specops.waiting import ByArrival, Waiting

_NO_BOUND = float("inf")


class Scheduler:
    """Owns the rows and the requests in flight. Used by one thread.

    Args:
        target: the model that answers.
        drafters: sources of guesses by name.
        controller: chooses how many guesses pay.
        tokenizer: the target's.
        end_tokens: tokens that end a text.
        prefill_chunk: most prompt tokens per pass.
        exact_align: width of exact passes, see `exactness`.
        longest_pause: seconds between two tokens of a running request that prompts may cause.
        prefix_cache: whose prompts may begin with what an earlier request has computed.
        waiting: the order in which requests get rows; first come, first served by default.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        target: Decoder,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        prefill_chunk: int,
        exact_align: int,
        longest_pause: float = _NO_BOUND,
        prefix_cache: PrefixCache = PrefixCache.CLIENT,
        waiting: Waiting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.controller = controller
        self.waiting: Waiting = ByArrival() if waiting is None else waiting
        self.rows = Rows(target.cache, reuse=prefix_cache, one_graph=target.one_graph)
        self._pace = Pace(controller.costs, longest_pause=longest_pause, most=prefill_chunk)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._exact_align = exact_align
        self._clock = clock

    @property
    def busy(self) -> bool:
        """There is something to do."""
        return bool(len(self.waiting) or len(self.rows))

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a row."""
        return [slot.taken for slot in self.rows]

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Its length was checked against the context before."""
        self.waiting.add(
            Sequence(request, self._tokenizer, end_tokens=self._end_tokens, clock=self._clock)
        )

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; one that is not here any more is no error."""
        for sequence in self._sequences():
            if sequence.request.request_id == request_id:
                sequence.finish = FinishReason.CANCELLED

    def cancel_all(self) -> None:
        """End every request at the next step."""
        for sequence in self._sequences():
            sequence.finish = FinishReason.CANCELLED

    def step(self) -> StepResult:
        """Drop who left or ran out of time, admit, prefill one chunk, decode one round."""
        self._expire()
        outputs = list(self._retire())
        self._admit()
        # Whoever has just got its first token shows it before it is given another pass.
        decoding = list(self.rows.decoding)
        stats: list[StepStats] = []
        if self.rows.prefilling:
            stats.append(self._prefill(self.rows.prefilling[0]))
        else:
            self._let_a_drafter_read(decoding)
        stats += self._decode_round(decoding)
        for sequence in self.running:
            if not sequence.finish and (output := self._output(sequence)):
                outputs.append(output)
        outputs += self._retire()
        return StepResult(
            stats=tuple(stats),
            outputs=tuple(outputs),
            running=len(self.rows),
            waiting=len(self.waiting),
            kv_tokens=self.rows.tokens,
            kept_tokens=self.rows.kept_tokens,
        )

    def _sequences(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.running

    def _expire(self) -> None:
        now = self._clock()
        for sequence in self._sequences():
            if not sequence.finish and now > sequence.request.deadline:
                sequence.finish = FinishReason.TIMEOUT
        for sequence in self.waiting:
            if not sequence.finish and now > sequence.request.start_by:
                sequence.finish = FinishReason.TIMEOUT

    def _retire(self) -> Iterator[Output]:
        """Take out the finished, free their rows."""
        ended = [sequence for sequence in self.waiting if sequence.finish]
        for sequence in ended:
            self.waiting.remove(sequence)
        for slot in [slot for slot in self.rows if slot.taken.finish]:
            ended.append(slot.taken)
            self.rows.give_back(slot)
            if self.rows.reuse is PrefixCache.OFF:
                for drafter in self.drafters.values():
                    drafter.release(slot.number)
        for sequence in ended:
            output = self._output(sequence)
            if output is None:
                raise AssertionError("a finished sequence always has a last output")
            yield output

    def _output(self, sequence: Sequence) -> Output | None:
        output = sequence.output()
        if output is not None:
            self.waiting.generated(sequence.request.client, len(output.pieces))
        return output

    def _admit(self) -> None:
        while len(self.waiting) and not self.rows.full:
            sequence = self.waiting.next()
            sequence.start()
            self._start_drafters(self.rows.take(sequence))

    def _start_drafters(self, slot: Slot) -> None:
        """The slot's prompt begins with what is in its row, copied or left there."""
        like = self.rows.share(slot)
        for drafter in self.drafters.values():
            drafter.start(slot.number, slot.taken.request.prompt_tokens, like.number)

    def _prefill(self, slot: Slot) -> StepStats:
        """Feed the next chunk of a prompt; the last one brings the first token."""
        sequence = slot.taken
        request, first = sequence.request, not sequence.begun
        if first:  # who came at the same time may have computed the same beginning by now
            self._start_drafters(slot)
        watched = self._watched()
        most = self._pace.chunk(sequence.prefilled, watched)
        chunk = request.prompt_tokens[sequence.prefilled : sequence.prefilled + most]
        start = self._clock()
        logits = self.target.prefill(slot.row, chunk, align=self._exact_align)
        seconds = self._clock() - start
        self._pace.read(sequence.prefilled, len(chunk), seconds, watched=watched > 0)
        sequence.begun = True
        sequence.prefilled += len(chunk)
        emitted = 0
        if not sequence.prefilling:
            emitted = sequence.append([sequence.next_token(logits[-1])], 0, None, logits[-1:])
        if not (sequence.prefilling or sequence.finish):
            self.rows.prompt_read(slot)
        return StepStats(
            StepKind.PREFILL,
            seconds,
            1,
            prompt_tokens=len(chunk),
            cached_tokens=sequence.cached if first else 0,
            emitted_tokens=emitted,
        )

    def _watched(self) -> int:
        """Rows that decode; 0 where nobody would see them pause: all get their answers whole."""
        seen = any(slot.taken.request.stream for slot in self.rows.decoding)
        return len(self.rows.decoding) if seen else 0

    def _let_a_drafter_read(self, slots: list[Slot]) -> None:
        """Let one draft model read a chunk of a prompt; its request's first token is out."""
        for slot in slots:
            drafter = reader(slot.taken, self.drafters, self.controller)
            if drafter is not None:
                break
        else:
            return
        prompt = slot.taken.request.prompt_tokens
        lag = drafter.backlog(slot.number, len(prompt))
        chunk = min(lag, self._pace.draft_chunk(self._watched()))
        start = self._clock()
        drafter.prefill(slot.number, prompt[: len(prompt) - lag + chunk])
        self._pace.draft_read(chunk, self._clock() - start)

    def _decode_round(self, slots: list[Slot]) -> Iterator[StepStats]:
        """One jump for every sequence that is past its prompt."""
        active = [(slot.row, slot.taken) for slot in slots]
        if not active:
            return
        start = self._clock()
        shared: list[Turn] = []
        for turn in plan_round(active, self.drafters, self.controller, self._exact_align):
            if turn.draft.tokens or turn.candidate.alone:
                yield jump(turn, self.target, self.controller)
            else:
                shared.append(turn)
        if shared:
            yield self._decode(shared, slots)
        self.controller.round_ended()
        self._pace.decoded(len(active), self._clock() - start)

    def _decode(self, turns: list[Turn], slots: list[Slot]) -> StepStats:
        """One token for each of several rows, in one pass.

        A pass takes adjacent rows, so those between them that verified come along, and forget it:
        a second pass would read all weights once more.

        Args:
            turns: by row.
            slots: all that decode, by row, beginning with row 0.
        """
        first, last = turns[0].row, turns[-1].row
        taken = slots[first : last + 1]
        idle = {slot.row for slot in taken} - {turn.row for turn in turns}
        lengths = {row: self.target.cache.lengths[row] for row in idle}
        start = self._clock()
        found = self.target.decode(first, [slot.taken.tokens[-1] for slot in taken])
        seconds = self._clock() - start
        for row, length in lengths.items():
            self.target.cache.truncate(row, length)
        logits = found[[turn.row - first for turn in turns]] if idle else found
        emitted, missed, declined = 0, [], []
        for index, turn in enumerate(turns):
            sequence = turn.sequence
            token = sequence.next_token(logits[index])
            emitted += sequence.append([token], 0, None, logits[index : index + 1])
            sequence.count_step(asked=turn.asked)
            if turn.missed and (name := turn.drafter):
                missed.append(name)
            elif name := turn.declined:
                declined.append(name)
        took = self._clock() - start
        self.controller.decoded([turn.candidate for turn in turns], took, rows=len(taken))
        return StepStats(
            StepKind.DECODE,
            seconds,
            len(turns),
            emitted_tokens=emitted,
            draft_seconds=sum(turn.seconds for turn in turns),
            missed_drafters=tuple(missed),
            declined_drafters=tuple(declined),
        )
