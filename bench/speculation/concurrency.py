"""Does adaptive speculation gain with several requests at once, and does it ever lose?

All requests of a batch share each pass, including their draft tokens. So verifying costs little as
long as a pass is short. Whether a draft token pays depends on the load and on the text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bench.models import BenchModel
from bench.prompts import CODE, Prompt
from bench.speculation import ways
from bench.speculation.ways import FIXED, Config, Measured, Runner, Sizes
from bench.tools.report import Outcome

_OF_PLAIN = {(CODE, 1): 1.5, (CODE, 4): 1.5, (CODE, 8): 1.3}
_NO_LOSS = 0.97  # of plain decoding on any other text or load, and of the best fixed length


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: each number of requests at once in `loads`, on all prompts."""

    each: int
    sizes: Sizes
    loads: tuple[int, ...] = (1, 4, 8)


FULL = Plan(16, Sizes(new_tokens=128, rounds=20))
QUICK = Plan(2, Sizes(new_tokens=16), loads=(2,))

Loads = dict[str, dict[int, Measured]]  # by text, then by requests at once


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Measure plain decoding, and fixed and adaptive speculation, under each load."""
    slots = max(model.settings.slots, *plan.loads)
    runner = Runner.load(replace(model, settings=replace(model.settings, slots=slots)))
    configs = runner.ways(FIXED)
    found: Loads = {}
    for text in dict.fromkeys(prompt.category for prompt in prompts):
        texts = [prompt for prompt in prompts if prompt.category == text]
        found[text] = {
            load: ways.measure(runner, configs, texts, replace(plan.sizes, at_once=load))
            for load in plan.loads
        }
    return outcome(model, found, plan, runner.own)


def outcome(model: BenchModel, found: Loads, plan: Plan, own: Config) -> Outcome:
    """The table and the targets.

    Args:
        model: the model.
        found: results by text and number of requests at once.
        plan: how much was measured.
        own: the default way.
    """
    parts, targets = {}, []
    for text, loads in found.items():
        for load, measured in loads.items():
            parts[where := f"{text}, {load} at once"] = measured
            of_plain = _OF_PLAIN.get((text, load), _NO_LOSS)
            targets += ways.judged(where, measured, own, of_plain=of_plain, of_best=_NO_LOSS)
    table = ways.rows_table(
        f"Requests at once: {model.title}",
        "text",
        parts,
        f"{plan.each} prompts of each kind of text in batches, {plan.sizes.new_tokens} new tokens "
        f"each, {plan.sizes.rounds} rounds; each batch is sent at once",
    )
    result = {"model": model.key, **asdict(plan.sizes), "loads": ways.record(parts)}
    return Outcome(result, [table], targets=targets)
