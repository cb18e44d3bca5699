"""Combines a run's figures with its limits, for the terminal, the page and the files."""

from argparse import Namespace
from typing import Any

import options as load_options
import slo
from record import Figures, Recorder
from traces import survey
from workload import EDITOR


def short(value: float | None, scale: float = 1) -> str:
    """A number with three significant digits or no decimals; "-" if nothing was measured."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


MAX_REPEATED = 0.2  # share of repeated prompts above which the report warns


def found_in(figures: Figures) -> str:
    """Where accepted draft tokens were found, most frequent first; empty if no answer says."""
    places = sorted(figures["found_in"].items(), key=lambda item: -item[1])
    total = sum(number for _, number in places) or 1
    shares = [(place, number / total) for place, number in places if number / total >= 0.005]
    return ", ".join(f"{place} {share:.0%}" for place, share in shares)


class Report:
    """The figures of a run so far.

    Attributes:
        whole, stages: figures from `record.summary`.
        over_time: figures from `Recorder.over_time`.
        gates: verdicts on the whole run.
        objectives: limits of a stage; without those on streams if the run has no streams.
        knee: the stage of the knee; None: there is none.
        errors: number of users of the load test that ended with an error.
        lost: number of workers that no longer answer.
    """

    def __init__(
        self, recorder: Recorder, options: Namespace, host: str, errors: int = 0, lost: int = 0
    ) -> None:
        self.seed = getattr(options, "load_seed", options.seed)
        path = load_options.dataset(options)
        self.dataset = f"{path.name}: {survey(path)}" if path else ""
        self.options, self.host, self.errors, self.lost = options, host, errors, lost
        self.whole, self.stages = recorder.whole(), recorder.rows()
        self.over_time, self.started = recorder.over_time(), recorder.started
        self.gates = slo.judge(self.whole, slo.limits(slo.GATES, options.gate or ()))
        usual = dict(slo.OBJECTIVES)
        if not load_options.streams(options):
            del usual["ttft_p95"]
        self.objectives = slo.limits(usual, options.objective or ())
        self.is_ramp = len(recorder.stages) > 1 and recorder.stages[0].open_loop
        self.knee = slo.knee(self.stages, self.objectives) if self.is_ramp else None

    def missed(self, stage: Figures) -> str:
        """The objectives that a stage misses, and by how much; empty if none."""
        verdicts = slo.judge(stage, self.objectives)
        return ", ".join(dict.fromkeys(v.fault for v in verdicts if not v.good))

    @property
    def cancelled(self) -> str:
        """A clause that says why requests were cancelled, for the end of a sentence."""
        if self.options.kind_of_prompt == EDITOR:
            return "suggestions were cancelled by the next key"
        return "requests were cut off at the end of the run"

    @property
    def warning(self) -> str:
        """A warning that the figures are too favourable; empty if they are not."""
        repeated = self.whole["repeated_share"] or 0
        if repeated <= MAX_REPEATED:
            return ""
        return (
            f"{repeated:.0%} of the prompts were sent before: "
            "caches and drafts make these figures better than new prompts would"
        )

    @property
    def knee_text(self) -> str:
        """The arrival rate at the knee, or "none"."""
        return f"{self.knee['arrived_per_second']:.1f}" if self.knee else "none"

    @property
    def status(self) -> int:
        """The exit status: 1 if anything failed or nothing succeeded, 2 if a gate is missed."""
        whole = self.whole
        broken = self.errors or self.lost
        if whole["failed"] or whole["unsent"] or broken or not whole["answered"]:
            return 1
        return 0 if all(verdict.good for verdict in self.gates) else 2

    def data(self) -> dict[str, Any]:
        """The report for JSON."""
        options = self.options
        return {
            "shape": load_options.shape(options),
            "host": self.host,
            "started": self.started,
            "drafter": options.drafter,
            "api": options.protocol,
            "category": options.kind_of_prompt,
            "seed": self.seed,
            "dataset": self.dataset,
            "goodput": options.goodput,
            "objectives": self.objectives,
            "gates": {verdict.name: verdict.good for verdict in self.gates},
            "whole": self.whole,
            "stages": self.stages,
            "over_time": self.over_time,
            "knee": self.knee,
        }

    def lines(self) -> list[str]:
        """The lines for the terminal."""
        whole = self.whole
        milliseconds = {
            name: " / ".join(short(whole[f"{name}_p{q}"], 1000) for q in (50, 95))
            for name in ("ttft", "tpot", "itl", "latency")
        }
        lines = [
            f"{whole['answered']} answered, {whole['refused']} refused (429), "
            f"{whole['failed']} failed; {whole['output_tokens']} tokens, "
            f"{whole['output_tokens_per_second']:.1f} per second",
            f"ms, p50 / p95: TTFT {milliseconds['ttft']}, TPOT {milliseconds['tpot']}, "
            f"ITL {milliseconds['itl']}, end to end {milliseconds['latency']}",
            f"goodput: {whole['good_per_second']:.2f} requests per second "
            f"({short(whole['good_share'], 100)} %) within {self.options.goodput}",
        ]
        lines.append(
            f"prompts: {self.dataset or 'made'}; {short(whole['repeated_share'], 100)} % were sent"
            f" before, {whole['cut']} cut to the context; --seed {self.seed} makes the same again"
        )
        drafts = found_in(whole)
        lines.append(
            f"prompt tokens known: {short(whole['cached_share'], 100)} %, tokens a pass: "
            f"{short(whole['tokens_per_pass'])}{drafts and f', accepted drafts from: {drafts}'}"
        )
        if self.warning:
            lines.append(f"warning: {self.warning}")
        if whole["cancelled"]:
            lines.append(
                f"{whole['cancelled']} {self.cancelled} ({short(whole['cancelled_share'], 100)} %)"
            )
        if whole["unsent"]:
            lines.append(f"{whole['unsent']} requests were not sent: too many in flight")
        if self.errors:
            lines.append(f"errors of the load test itself: {self.errors}; see the log")
        if self.lost:
            lines.append(f"workers lost, with a part of the requests and figures: {self.lost}")
        lines += [f"gate: {verdict}" for verdict in self.gates]
        if self.is_ramp:
            rate = f"{self.knee_text} per second" if self.knee else self.knee_text
            lines.append(f"knee: {rate}")
        return lines
