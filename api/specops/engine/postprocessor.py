"""Turns a pass's logits into tokens: verifies drafts, appends what is accepted, and counts both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specops.engine.request_state import RequestState
from specops.engine.scheduled import Scheduled
from specops.request import GRAMMAR, Draft, Step
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.controller import Controller
from specops.speculation.verifier import Verdict, compare, verify


class Postprocessor:
    """Turns logits into tokens. Used by the engine's thread.

    Args:
        target: the model that computed the logits.
        controller: learns from each verified draft; may be exchanged.
        clock: seconds.
    """

    def __init__(
        self, target: ModelRunner, controller: Controller, clock: Callable[[], float]
    ) -> None:
        self._target = target
        self._clock = clock
        self.controller = controller

    def process(self, step: Step, scheduled: Sequence[Scheduled], logits: Floats) -> None:
        """Give every request of a pass its tokens. A request that raises an error fails alone.

        Args:
            step: gets the counts of tokens and drafts.
            scheduled: the requests of the pass that was computed.
            logits: [n, V], of the tokens that needed them, in the order of the spans.
        """
        row, decoding = 0, scheduled[: step.decoding]
        likeliest: list[int] | None = None
        if not any(item.sampling.temperature > 0 for item in decoding):
            rows = sum(item.num_logits for item in decoding)
            likeliest = logits[:rows].argmax(axis=-1).tolist()
        for item in scheduled:
            own, start = logits[row : row + item.num_logits], self._clock()
            try:
                if item.is_prompt:
                    self._process_prompt(step, item, own, row)
                else:
                    self._process_decoded(step, item, own, row, likeliest)
                    item.state.note_choosing(self._clock() - start)
            except Exception as error:
                item.state.fail(error)
            step.emitted_tokens += item.emitted
            row += item.num_logits

    def _process_decoded(
        self,
        step: Step,
        item: Scheduled,
        logits: Floats,
        row: int,
        likeliest: Sequence[int] | None,
    ) -> None:
        """Verify a draft. Append its accepted tokens and the target's own token after them.

        Args:
            step: gets the verified drafts.
            item: the request's part in the pass.
            logits: [k + 1, V], after the text's last token, or the last forced one, and after
                each of the k draft tokens. Where the request wants probabilities, the logits of the
                forced tokens come before these.
            row: of the first of them among the pass's logits.
            likeliest: [n], the likeliest token of each of the pass's rows; None where a request
                draws its tokens.
        """
        state, draft, forced = item.state, item.draft, item.forced
        drafted, before = len(draft.tokens), len(logits) - 1 - len(draft.tokens)
        if likeliest is not None and not state.adjusts:
            verdict = compare(likeliest[row + before : row + len(logits)], draft.tokens)
        else:
            start = self._clock()
            adjusted = state.adjusted(logits[before:], draft.tokens, forced)
            if state.adjusts:
                begun, start = start, self._clock()
                self.controller.adjusted(state.speculation, drafted + 1, start - begun)
            verdict = _verify(item, adjusted)
            if item.sampling.temperature > 0:
                self.controller.drawn(verdict.accepted + 1, self._clock() - start)
        accepted = verdict.accepted
        if drafted:
            self.controller.verified(item, accepted)
        tokens = [*forced, *draft.tokens[:accepted], verdict.next_token]
        item.emitted = state.append(tokens, len(tokens) - 1, draft.drafter, logits, len(forced))
        # Where the request ends inside of the accepted tokens, the rest was never output.
        kept = min(len(tokens) - 1, item.emitted)
        # The cache's entries of rejected tokens are overwritten by the next pass.
        self._computed(state, 1 + kept)
        last = row + before + accepted
        self._target.keep_hidden_state(state.slot, last, state.num_computed, state.tokens[-1])
        drafts = []
        if forced:
            drafts.append(Draft(forced, drafter=GRAMMAR, accepted=min(len(forced), kept)))
        if drafted:
            draft.accepted, draft.adaptive = max(0, kept - len(forced)), item.adaptive
            judged = draft.accepted + (draft.accepted == accepted)
            draft.accept_probs, draft.probs = draft.accept_probs[:judged], None
            drafts.append(draft)
        state.count_step(drafts, missed=item.missed is not None)
        step.drafts += drafts

    def _process_prompt(self, step: Step, item: Scheduled, logits: Floats, row: int) -> None:
        """Note a computed piece of a prompt; `logits` [num_logits, V] follow its last tokens."""
        state, rows = item.state, item.num_logits
        self._computed(state, len(item.tokens))
        if state.reader is not None and rows:
            hidden, begun = self._target.hidden_states(row, rows), self._clock()
            state.reader.read(item.start, logits, hidden)
            state.reader.note_seconds(rows, self._clock() - begun)
        if item.ends_prompt and state.request.embed:
            if state.next_prompt():
                cache = self._target.cache
                cache.release(state.slot)
                cache.begin(state.slot, state.tokens, share=False)
        elif item.ends_prompt:
            token = _verify(item, state.adjusted(logits[-1:], ())).next_token
            row += rows - 1
            self._target.keep_hidden_state(state.slot, row, state.num_computed, token)
            item.emitted = state.append([token], 0, "", logits[-1:])
            step.first_tokens += 1

    def _computed(self, state: RequestState, tokens: int) -> None:
        state.num_computed += tokens
        self._target.cache.commit(state.slot, state.tokens, state.num_computed)


def _verify(item: Scheduled, logits: Floats) -> Verdict:
    """Verify a request's draft behind its forced tokens; without a draft, choose its next token."""
    draft, position = item.draft, len(item.state.tokens) + len(item.forced)
    return verify(
        logits,
        draft.tokens,
        draft.probs,
        sampling=item.sampling,
        rng=item.rng,
        position=position,
    )
