"""Decides when drafting pays: which drafter to ask, and how many draft tokens to verify.

A pass over a few tokens costs little more than a pass over one, and all requests share it. So each
place in a pass, a position of a request's draft, is worth the probability that it is reached: that
its token and all draft tokens before it are accepted. The controller sorts all places by this
probability and admits the likeliest as long as the step brings more tokens per second with them.
Plain decoding is one of the choices. (SmartSpec, Liu et al. 2024,
https://arxiv.org/abs/2406.14066, chooses one length for all requests by the same goodput.)

A request whose drafts do not pay is tried again now and then, within a fixed share of the time: its
text may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, truediv

from specops.runtime.cost_model import CostModel, mean_with
from specops.speculation.acceptance import Acceptance, SpeculationState
from specops.speculation.drafters.base import LEAST_REACH

_WEIGHT = 1 / 48  # weight of the newest value in a running mean
# Share of the time that may go into asking drafters where that does not pay, and as much into
# verifying drafts that do not pay.
_PROBING = 0.005
_LEAST_PROBE = 0.05  # least cost of a probe, as a share of a pass over one token
_LEAST_STEPS = 64  # steps for which `Controller.least` stays as it was computed


@dataclass(slots=True)
class Proposal:
    """The draft tokens that one request could have verified in a step.

    Attributes:
        state: what speculation has brought to the request so far.
        position: number of tokens that the request's next token looks back at.
        sampled: its tokens are drawn; to draw a token takes far longer than to find the likeliest.
        fixed: all of its draft tokens are verified, whether that pays or not.
        drafter: name of the drafter that the draft tokens are from, or would be from.
        most: number of draft tokens that are there, or that a draft model may be asked for.
        promised: probability of each draft token to be accepted, as the drafter tells it; empty
            where the drafter tells none.
        backlog: number of tokens that a draft model has to compute before the first draft token;
            0 where the draft tokens are there already.
        asked: the controller said that it pays to ask the drafter, and that was done.
    """

    state: SpeculationState
    position: int = 0
    sampled: bool = False
    fixed: bool = False
    drafter: str = ""
    most: int = 0
    promised: Sequence[float] = ()
    backlog: int = 0
    asked: bool = False


class Controller:
    """Chooses draft lengths. Used by the engine's thread.

    Args:
        target: costs of the target's passes.
        draft: costs of the draft model's passes; None without a draft model.
        positions: length of the longest draft.
    """

    def __init__(self, target: CostModel, draft: CostModel | None, positions: int) -> None:
        self._target = target
        self._draft = draft
        self._positions = positions
        self._acceptance: dict[str, Acceptance] = {}  # by drafter, over all requests
        self._drawing = 0.0  # mean seconds to draw one token
        self._asking = 0.0  # mean seconds to ask for a request: to look up, and to weigh
        self._gain = target.cost(1)  # mean seconds that asking saves; hoped for at first
        self._spare = 0.0  # seconds that asking may lose
        self._requests = 1  # number of requests that decoded in the last step
        self._least: dict[tuple[int, int], float] = {}
        self._model_pays: dict[str, bool] = {}  # in this step, by drafter
        self._steps = 0
        self._seconds = self._plain_seconds = 0.0  # means of a step and of as much plain decoding
        self._credit = 0.0  # seconds that a probe may take
        self._probes = 0

    @property
    def estimated_speedup(self) -> float:
        """Tokens per second of the latest steps over plain decoding's; 1 at first. Any thread."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    # -- which drafter to ask --------------------------------------------------------------------

    def asking_pays(self, state: SpeculationState) -> bool:
        """Whether it is worth its time in this step to ask a request's drafter.

        A lookup takes some ten microseconds, and to weigh what a draft model may bring takes as
        long: nothing beside a pass of 20 ms, but a fifth of a token's time where eight requests
        share a pass of 0.4 ms. Where that does not pay, drafters are still asked within a fixed
        share of the time, to notice a text that can be drafted again. All requests are asked in
        the same steps, so that the other steps take no time for it. A new request is asked at
        least once: what other texts have brought says little about its own.
        """
        return self._spare >= 0 or self._expected_gain(state) >= 0

    def model_pays(self, drafter: str) -> bool:
        """Whether it would pay to verify a draft model's first token for each request."""
        if self._draft is None or drafter not in self._acceptance:
            return True
        if (pays := self._model_pays.get(drafter)) is None:
            plain, rate = self._target.cost(self._requests), self._acceptance[drafter].rates()[0]
            added = self._target.cost(2 * self._requests) - plain
            pays = rate * plain > added + self._draft.cost(self._requests)
            self._model_pays[drafter] = pays
        return pays

    def least(self, requests: int, prompt_tokens: int = 0) -> float:
        """The least probability to be reached with which a place can pay, whatever the others are.

        Args:
            requests: number of requests that decode in the pass.
            prompt_tokens: number of prompt tokens in it.
        """
        if (least := self._least.get((requests, prompt_tokens))) is None:
            first = requests + prompt_tokens
            begin, *wider = self._target.costs(first, requests * self._positions)
            added = min((cost - begin) / count for count, cost in enumerate(wider, 1))
            # To draw a token costs as much with draft tokens as without, and so cancels out.
            least = max(LEAST_REACH, added * requests / self._target.cost(requests))
            self._least[requests, prompt_tokens] = least
        return least

    # -- how many draft tokens to verify ---------------------------------------------------------

    def choose(self, proposals: Sequence[Proposal], prompt_tokens: int = 0) -> list[int]:
        """The number of draft tokens to verify of each request.

        Args:
            proposals: of all requests that decode in the pass.
            prompt_tokens: number of prompt tokens in the pass. They make it wide, and each draft
                token makes it wider.
        """
        lengths = [item.most if item.fixed else 0 for item in proposals]
        places = []
        for index, item in enumerate(proposals):
            if item.fixed or not item.most:
                continue
            reach = 1.0
            rates = item.promised or self._acceptance_of(item).rates()
            for position, rate in enumerate(rates[: item.most]):
                reach *= rate
                if reach < LEAST_REACH:
                    break
                places.append((-reach, index, position))
        if places:
            places.sort()
            for _, index, position in places[: self._admitted(proposals, places, prompt_tokens)]:
                lengths[index] = position + 1
        self._probe(proposals, lengths, prompt_tokens)
        return lengths

    def _admitted(
        self,
        proposals: Sequence[Proposal],
        places: Sequence[tuple[float, int, int]],
        prompt_tokens: int,
    ) -> int:
        """How many of the places, the likeliest first, bring the most tokens per second.

        Beside a prompt a pass costs what it adds to the prompt's, and is worth its tokens less
        what that time would bring in a pass without a prompt.
        """
        pair = self._target.attention_seconds(1)
        per_token = [item.position * pair + item.state.adjusting for item in proposals]
        tokens = len(proposals) + sum(item.most for item in proposals if item.fixed)
        drawing = [item.sampled * self._drawing for item in proposals]
        expected, extra = float(len(proposals)), sum(per_token) + sum(drawing)
        expected_tokens, extra_seconds = [expected], [extra]
        # Tokens and costs of the draft model's passes.
        widths, model_costs = [0] * self._positions, [0.0] * self._positions
        for missed, index, position in places:
            expected -= missed
            extra += per_token[index] - missed * drawing[index]  # drawn where it is reached
            if (backlog := proposals[index].backlog) and self._draft is not None:
                widths[position] += 1 if position else backlog
                cost = self._draft.cost(widths[position])
                extra += cost - model_costs[position]
                model_costs[position] = cost
            expected_tokens.append(expected)
            extra_seconds.append(extra)
        costs = map(add, self._target.costs(tokens, len(places)), extra_seconds)
        worth = list(map(truediv, expected_tokens, costs))
        if prompt_tokens:
            rate = max(worth)
            costs = map(add, self._target.costs(tokens + prompt_tokens, len(places)), extra_seconds)
            worth = [
                value - rate * cost for value, cost in zip(expected_tokens, costs, strict=True)
            ]
        return worth.index(max(worth))

    def _probe(self, proposals: Sequence[Proposal], lengths: list[int], prompt_tokens: int) -> None:
        """Have one draft token verified that does not seem to pay, if there is time for it.

        Promised draft tokens need no probe: the drafter learns from every token that comes.
        """
        waiting = [
            index
            for index, item in enumerate(proposals)
            if item.most and not lengths[index] and not item.promised
        ]
        if not waiting:
            return
        index = waiting[self._probes % len(waiting)]  # all in turn: each text may change
        tokens, backlog = len(proposals) + prompt_tokens, proposals[index].backlog
        cost = self._target.cost(tokens + 1) - self._target.cost(tokens)
        cost = max(cost, _LEAST_PROBE * self._target.cost(1))
        if backlog and self._draft is not None:
            cost += self._draft.cost(backlog)
        if self._credit >= cost:
            self._credit = 0.0
            self._probes += 1
            lengths[index] = 1

    # -- what came of it -------------------------------------------------------------------------

    def drawn(self, tokens: int, seconds: float) -> None:
        """Take in how long it took to draw so many tokens from logits that were adjusted before."""
        self._drawing = mean_with(self._drawing, seconds / tokens, _WEIGHT)

    def adjusted(self, state: SpeculationState, positions: int, seconds: float) -> None:
        """Take in how long it took to adjust a request's logits at so many positions."""
        state.adjusting = mean_with(state.adjusting, seconds / positions, _WEIGHT)

    def verified(self, proposal: Proposal, draft_tokens: int, accepted: int) -> None:
        """Take in one draft: the number of verified draft tokens, and of accepted ones."""
        if not proposal.promised:
            self._acceptance_of(proposal).observe(draft_tokens, accepted)
            self._acceptance[proposal.drafter].observe(draft_tokens, accepted)

    def stepped(
        self,
        proposals: Sequence[Proposal],
        tokens: Sequence[int],
        widths: Sequence[int],
        *,
        draft_seconds: float,
        asking_seconds: float,
        model_seconds: float = 0.0,
    ) -> None:
        """Take in a step.

        Args:
            proposals: of all requests that decoded.
            tokens: number of tokens that each request got.
            widths: number of tokens that each request had in the pass.
            draft_seconds: measured time to get the draft tokens.
            asking_seconds: the part of it that looking up and weighing took for the requests that
                were asked.
            model_seconds: the part of it that draft models took.
        """
        count, width = len(proposals), sum(widths)
        alone, together = self._target.cost(count), self._target.cost(width)
        token, added = alone / count, (together - alone) / max(1, width - count)
        seconds, plain_seconds = together + draft_seconds, 0.0
        if asked := sum(item.asked for item in proposals):
            self._asking = mean_with(self._asking, asking_seconds / asked, _WEIGHT)
        by_model = [
            item.backlog > 0 and own > 1 for item, own in zip(proposals, widths, strict=True)
        ]
        net = costs = 0.0  # gains and costs of asking where it did not seem to pay
        drafting = model_seconds / max(1, sum(by_model))  # for each of these requests
        for item, got, own, drafted in zip(proposals, tokens, widths, by_model, strict=True):
            state, drawing = item.state, self._drawing if item.sampled else 0.0
            choosing = got * drawing + own * state.adjusting
            cost = alone / count + (own - 1) * added + choosing
            plain = got * (token + drawing + state.adjusting)
            state.seconds += cost + draft_seconds * own / width
            state.plain_seconds += plain
            seconds += choosing
            plain_seconds += plain
            if item.asked:
                asking = self._asking + drafted * drafting
                gain = plain - cost - asking
                if (expected := self._expected_gain(state)) < 0:
                    net, costs = net + gain, costs + max(asking, -expected)
                state.gain = expected + _WEIGHT * (gain - expected)
                self._gain += _WEIGHT * (gain - self._gain)
        if not self._steps % _LEAST_STEPS:
            self._least.clear()
        self._model_pays.clear()
        self._steps += 1
        self._requests = count
        most = self._target.cost(1)
        # A single draft that was wrong counts no more than the usual loss, one that was right as
        # what it saved, so asking soon begins again where a text can be drafted again.
        self._spare = min(self._spare + max(net, -costs) + _PROBING * seconds, most)
        self._credit = min(self._credit + _PROBING * seconds, most)
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._plain_seconds += _WEIGHT * (plain_seconds - self._plain_seconds)

    def _expected_gain(self, state: SpeculationState) -> float:
        """The mean seconds that asking a request's drafter saves, less what it takes."""
        if state.gain is None:
            state.gain = max(0.0, self._gain)
        return state.gain

    def _acceptance_of(self, proposal: Proposal) -> Acceptance:
        drafter, own = proposal.drafter, proposal.state.acceptance
        if drafter not in own:
            common = self._acceptance.setdefault(drafter, Acceptance(self._positions))
            own[drafter] = Acceptance(self._positions, common)
        return own[drafter]
