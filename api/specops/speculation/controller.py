"""How many draft tokens a pass verifies: chosen by what passes cost and drafts have earned.

A pass over T tokens costs little more than one over one, up to a point, and all requests share it.
So every place in it, a (request, position) pair, is worth the probability that it is reached: that
all draft tokens before it and its own are accepted. Places are admitted by that probability, the
likeliest first, as long as the pass brings more tokens per second by it. No draft tokens is always
among the choices. (SmartSpec, Liu et al. 2024, https://arxiv.org/abs/2406.14066, chooses one length
for all requests by the same goodput.)

What does not pay is tried again now and then, within a fixed share of the time: a text may turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specops.runtime.cost_model import CostModel, mean_with
from specops.speculation.acceptance import Acceptance, Promises, SpeculationState
from specops.speculation.drafters.base import LEAST_REACH
from specops.speculation.look_ups import LookUps

_PROBING = 0.005  # share of the time that may go into verifying what does not pay
_WEIGHT = 1 / 48  # of a step in a mean
_WORTHWHILE = 0.25  # share of steps from which on a draft model is worth feeding beforehand
_LINE_STEPS = 64  # for which the least probability that can pay stays as it was found
_LEAST_PROBE = 0.05  # of a pass over one token: where passes seem to cost alike, a probe costs this


@dataclass(slots=True)
class Candidate:
    """A request that decodes in the pass.

    Attributes:
        state: what its drafts have been worth.
        position: tokens that it looks back at.
        drafter: that proposes; None where none does, and nothing is to be decided.
        source: of the draft at hand, where that is not the drafter itself.
        promised: what the drafter promises of the draft at hand, see `Draft.promised`.
        most: draft tokens at hand, or that may be asked for.
        backlog: tokens that a draft model has to take in for the first of them; 0: they are at
            hand and cost no pass.
        fixed: all of them are verified, whether that pays or not.
        sampled: its tokens are drawn, which takes far longer than to find the likeliest.
        looked_up: its text was looked up because that seems to pay, by no model.
    """

    state: SpeculationState
    position: int = 0
    drafter: str | None = None
    source: str | None = None
    promised: Sequence[float] = ()
    most: int = 0
    backlog: int = 0
    fixed: bool = False
    sampled: bool = False
    looked_up: bool = False

    @property
    def key(self) -> str:
        """Whose drafts are expected to do like this one."""
        return self.source or self.drafter or ""


class Controller:
    """Chooses draft lengths. Used by the engine's thread.

    Args:
        target: costs of the target's passes.
        draft: of the draft model's; None without one.
        positions: longest draft.

    Attributes:
        look_ups: says where they are worth their time.
    """

    def __init__(self, target: CostModel, draft: CostModel | None, positions: int) -> None:
        self._target = target
        self._draft = draft
        self._positions = positions
        self.look_ups = LookUps()
        self._common: dict[str, Acceptance] = {}  # over all requests
        self._promises: defaultdict[str, Promises] = defaultdict(Promises)  # by source
        self._paying: dict[str, float] = {}  # share of steps in which a drafter's model was asked
        self._lines: dict[tuple[int, int], float] = {}  # by requests and tokens beside them
        self._steps = 0
        self._rows = {False: 0.0, True: 0.0}  # seconds to choose a token, drawn or not
        self._seconds = self._plain_seconds = 0.0  # mean of a step, and of plain ones for as much
        self._credit = 0.0  # time that may go into what does not pay
        self._probed = 0  # how often it did

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int = 0) -> list[int]:
        """Draft tokens to verify per request, 0 for none.

        Args:
            candidates: all that decode in the pass.
            prompt_tokens: that will be in it, too: every draft token then makes a wide pass wider.
        """
        lengths = [item.most if item.fixed else 0 for item in candidates]
        line = self.line(len(candidates), (item.sampled for item in candidates), prompt_tokens)
        places = self._places(candidates, line)
        if places:
            for _, index, position in self._admitted(candidates, lengths, places, prompt_tokens):
                lengths[index] = position + 1
        without = []
        for index, item in enumerate(candidates):
            if item.most and not item.fixed:
                self._note_paying(item, lengths[index] > 0)
                if not lengths[index] and not item.promised:  # promises are judged in any case
                    without.append(index)
        if without:
            index = without[self._probed % len(without)]  # all in turn: each text may turn
            if self._probes(candidates[index], len(candidates) + prompt_tokens):
                lengths[index] = 1
                self._probed += 1
        return lengths

    def pays(self, drafter: str) -> bool:
        """Whether a drafter's model has been worth asking of late, over all requests."""
        return self._paying.get(drafter, 1.0) > _WORTHWHILE

    @property
    def estimated_speedup(self) -> float:
        """Tokens per second of late over plain decoding's; 1 at first. For any thread."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    def line(self, requests: int, sampled: Iterable[bool], prompt_tokens: int = 0) -> float:
        """No place that is reached less often can pay, whatever the others are.

        If it could, so many like it would bring more tokens for their time than the pass brings
        without them: at the least time that a token ever adds to it.

        Args:
            requests: that decode in the pass.
            sampled: of each of them, see `Candidate`.
            prompt_tokens: see `choose`.
        """
        if (line := self._lines.get((requests, prompt_tokens))) is None:
            first = requests + prompt_tokens
            rows = [self._rows[item] for item in sampled]
            begin, *wider = self._target.costs(first, requests * self._positions)
            added = min((cost - begin) / count for count, cost in enumerate(wider, 1)) + min(rows)
            rate = requests / (self._target.cost(requests) + requests * max(rows))
            line = self._lines[requests, prompt_tokens] = max(LEAST_REACH, added * rate)
        return line

    # -- choosing --------------------------------------------------------------------------------

    def _places(self, candidates: Sequence[Candidate], line: float) -> list[tuple[float, int, int]]:
        """Probability to be missed, index and position of every place, the likeliest first.

        Places that are reached with less than the probability `line` are left out.
        """
        places = []
        for index, item in enumerate(candidates):
            if not item.most or item.fixed:
                continue
            reach = 1.0
            for position, rate in enumerate(self._rates(item)[: item.most]):
                reach *= rate
                if reach < line:
                    break
                places.append((1 - reach, index, position))
        places.sort()
        return places

    def _admitted(
        self,
        candidates: Sequence[Candidate],
        lengths: Sequence[int],
        places: Sequence[tuple[float, int, int]],
        prompt_tokens: int,
    ) -> Sequence[tuple[float, int, int]]:
        """The first so many places with which the pass is worth most.

        `rate`, in tokens per second, is the best that a pass without prompts comes to. Beside a
        prompt a pass costs what it adds, and its worth is its tokens less what they cost at that
        rate; without one the two are the same choice.
        """
        pair, drafting = self._target.pairs(1), _Drafting(self._draft)
        tokens = len(candidates) + sum(lengths)
        expected = float(len(candidates))  # those that are fixed count the same in every choice
        values = [item.position * pair + self._rows[item.sampled] for item in candidates]
        beside = sum(values)
        steps = [(expected, beside)]
        for missed, index, position in places:
            expected += 1 - missed
            beside += values[index]
            if backlog := candidates[index].backlog:
                beside += drafting.add(position, backlog)
            steps.append((expected, beside))
        costs = self._target.costs(tokens, len(places))
        worth = [value / (cost + extra) for cost, (value, extra) in zip(costs, steps, strict=True)]
        rate = max(worth)
        if prompt_tokens:
            costs = self._target.costs(tokens + prompt_tokens, len(places))
            worth = [
                value - rate * (cost + extra)
                for cost, (value, extra) in zip(costs, steps, strict=True)
            ]
        return places[: worth.index(max(worth))]

    def _probes(self, item: Candidate, tokens: int) -> bool:
        """Whether one draft token is verified although it does not seem to pay."""
        least = _LEAST_PROBE * self._target.cost(1)
        cost = max(least, self._target.cost(tokens + 1) - self._target.cost(tokens))
        if item.backlog:
            cost += _Drafting(self._draft).add(0, item.backlog)
        if self._credit < cost:
            return False
        self._credit = 0.0
        return True

    # -- what it is told -------------------------------------------------------------------------

    def verified(
        self, candidate: Candidate, draft_tokens: int, accepted: int, seconds: float
    ) -> None:
        """Take in what became of a request's draft, if it had one.

        Args:
            candidate: whose it was.
            draft_tokens: that were verified; 0: only the target's own token was chosen.
            accepted: of them.
            seconds: that choosing and comparing took.
        """
        row = seconds / (draft_tokens + 1)
        self._rows[candidate.sampled] = mean_with(self._rows[candidate.sampled], row, _WEIGHT)
        if not draft_tokens:
            return
        self._acceptance(candidate).observe(draft_tokens, accepted)
        if candidate.promised:
            self._promises[candidate.key].observe(candidate.promised[:draft_tokens], accepted)
        else:
            self._common[candidate.key].observe(draft_tokens, accepted)

    def stepped(
        self,
        candidates: Sequence[Candidate],
        tokens: Sequence[int],
        widths: Sequence[int],
        *,
        draft_seconds: float,
    ) -> None:
        """Take in a step in which these decoded.

        Args:
            candidates: that decoded.
            tokens: that each of them got.
            widths: tokens of each in the pass.
            draft_seconds: that draft tokens took, as measured.
        """
        cost, count, width = self._target.cost, len(candidates), sum(widths)
        rows = [self._rows[item.sampled] for item in candidates]
        alone, together = cost(count), cost(width)
        plain = (alone + sum(rows)) / count
        seconds = together + draft_seconds
        seconds += sum(row * own for row, own in zip(rows, widths, strict=True))
        token, added = alone / count, (together - alone) / max(1, width - count)
        saved = []  # by the look-ups of the step
        for item, row, got, own in zip(candidates, rows, tokens, widths, strict=True):
            state = item.state
            state.seconds += seconds * own / width
            state.plain_seconds += got * plain
            if item.looked_up:
                saved.append((state, (got - 1) * (token + row) - (own - 1) * (added + row)))
        # Where a draft model ran, too, nobody knows what the look-ups took.
        if saved and draft_seconds and not any(item.backlog for item in candidates):
            self.look_ups.observe(saved, draft_seconds / len(saved), token)
        self.look_ups.stepped()
        if not self._steps % _LINE_STEPS:
            self._lines.clear()
        self._steps += 1
        self._credit = min(self._credit + _PROBING * seconds, self._target.cost(1))
        self._seconds += _WEIGHT * (seconds - self._seconds)
        self._plain_seconds += _WEIGHT * (sum(tokens) * plain - self._plain_seconds)

    # -- what it keeps ---------------------------------------------------------------------------

    def _note_paying(self, item: Candidate, worthwhile: bool) -> None:
        if item.backlog and item.drafter is not None:
            before = self._paying.get(item.drafter, 1.0)
            self._paying[item.drafter] = before + _WEIGHT * (worthwhile - before)

    def _rates(self, candidate: Candidate) -> list[float]:
        """The chance of each draft token, given that those before it are accepted."""
        if candidate.promised:
            return self._promises[candidate.key].kept(candidate.promised)
        return self._acceptance(candidate).rates

    def _acceptance(self, candidate: Candidate) -> Acceptance:
        key, seen = candidate.key, candidate.state.seen
        if (common := self._common.get(key)) is None:
            common = self._common[key] = Acceptance(self._positions)
        found = seen.get(key)
        # A request that has tried nothing believes what others have learned meanwhile.
        if found is None or (not found.drafts and found.rates != common.rates):
            found = seen[key] = common.heir()
        return found


class _Drafting:
    """What a draft model's passes cost as draft tokens are added: one pass for each position."""

    def __init__(self, draft: CostModel | None) -> None:
        self._draft = draft
        self._widths: dict[int, int] = {}  # position: tokens of the pass that makes it

    def add(self, position: int, backlog: int) -> float:
        """Seconds that one more draft token at a position adds."""
        if self._draft is None:
            return 0.0
        before = self._widths.get(position, 0)
        after = self._widths[position] = before + (backlog if position == 0 else 1)
        return self._draft.cost(after) - self._draft.cost(before)
