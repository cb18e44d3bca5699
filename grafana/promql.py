"""The panels' queries in PromQL. Where nothing was measured they have no value.

A query has a value only while its instance answers Prometheus. Gauges end with the first scrape
that fails; a rate would go on over its window, so it is joined with `up`, series by series: one
dead replica of three is missing from a sum at once. A ratio whose denominator did not move has no
value, nor has a quantile without observations, nor a speed of nothing. Counts and rates of events
may be 0.
"""

from __future__ import annotations

INSTANCES = 'job=~"$job", instance=~"$instance"'
UP = f"up{{{INSTANCES}}} == 1"
ANSWERS = "and on (job, instance) up == 1"
WINDOW = "$__rate_interval"
NOW = "1m"  # the window of a figure that says how it is now, whatever time range is shown
QUANTILE_WINDOW = "2m"  # a CPU answers few requests a minute: shorter windows hold too few

# Each query of a panel: its legend and its expression.
Queries = dict[str, str]


def series(name: str, labels: str = "") -> str:
    """One metric of the chosen instances; `labels` are further matchers."""
    return f"{name}{{{', '.join(filter(None, (INSTANCES, labels)))}}}"


def now(gauge: str, labels: str = "", *, of: str = "sum") -> str:
    """A gauge over all instances."""
    return f"{of}({series(gauge, labels)})"


def now_by(label: str, gauge: str, labels: str = "", *, moved: bool = False) -> str:
    """A gauge for each value of `label`; with `moved` only where it was above 0 in the range."""
    one = series(gauge, labels)
    seen = f" and max_over_time({one}[$__range]) > 0" if moved else ""
    return f"sum by ({label}) ({one}{seen})"


def rates(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Events per second of each series whose instance answers."""
    return f"rate({series(counter, labels)}[{window}]) {ANSWERS}"


def total(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Events per second, all instances and labels together; 0 is a count."""
    return f"sum({rates(counter, labels, window)})"


def speed(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Tokens per second; no value while there are none."""
    return f"{total(counter, labels, window)} > 0"


def rate_by(label: str, counter: str, labels: str = "") -> str:
    """Events per second for each value of `label` for which there was one in the time range."""
    moved = f"increase({series(counter, labels)}[$__range]) > 0"
    return f"sum by ({label}) ({rates(counter, labels)} and {moved})"


def ratio(
    numerator: str, denominator: str, top: str = "", bottom: str = "", window: str = WINDOW
) -> str:
    """Increase of one counter per step of another, which moves."""
    return f"{total(numerator, top, window)} / ({speed(denominator, bottom, window)})"


def ratio_by(
    label: str, numerator: str, denominator: str, labels: str = "", window: str = WINDOW
) -> str:
    """`ratio` for each value of `label`."""
    return (
        f"sum by ({label}) ({rates(numerator, labels, window)}) "
        f"/ (sum by ({label}) ({rates(denominator, labels, window)}) > 0)"
    )


def share_by(label: str, part: str, whole: str, window: str = WINDOW) -> str:
    """A counter for each value of `label` per step of a counter without this label."""
    return (
        f"sum by ({label}) ({rates(part, window=window)} > 0) "
        f"/ on () group_left () ({speed(whole, window=window)})"
    )


def part(gauge: str, labels: str, whole: str) -> str:
    """The gauge's value with `labels` as a share of that with `whole`."""
    return f"sum({series(gauge, labels)}) / (sum({series(gauge, whole)}) > 0)"


def quantile(q: float, histogram: str, labels: str = "") -> str:
    """A quantile of a histogram; without observations it would be NaN, which `>=` leaves out."""
    buckets = rates(f"{histogram}_bucket", labels, QUANTILE_WINDOW)
    return f"histogram_quantile({q}, sum by (le) ({buckets})) >= 0"


def quantiles(histogram: str) -> Queries:
    """Median, 95th and 99th percentile."""
    return {f"p{q * 100:g}": quantile(q, histogram) for q in (0.5, 0.95, 0.99)}


def mean(histogram: str, window: str = WINDOW) -> str:
    """The mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", window=window)


def buckets(histogram: str) -> str:
    """Observations in each bucket since the step before, for a heatmap.

    The difference of two values one step apart counts each observation once. A `rate` or `increase`
    needs a window of at least two scrapes, so it counts an observation in several columns.
    """
    counts = series(f"{histogram}_bucket")
    seen = f"increase({series(f'{histogram}_count')}[$__range])"
    return (
        f"sum by (le) (clamp_min({counts} - {counts} offset $__interval, 0)) "
        f"and on () sum({seen}) > 0"
    )


def ordered(label: str, expr: str) -> str:
    """The same series in the order of the label's numbers: Prometheus sorts 10 before 2.

    A number of up to three digits gets leading blanks, which no browser shows.
    """
    for blanks, digits in (("  ", "(.)"), (" ", "(..)")):
        expr = f'label_replace({expr}, "{label}", "{blanks}$1", "{label}", "{digits}")'
    return expr


def or_unreachable(expr: str, label: str = "") -> str:
    """The expression; NaN, which the panel maps to a word, if none of the instances answers.

    `label` is what the series of the expression are named by: NaN gets a blank for it.
    """
    nan = f'label_replace(vector(NaN), "{label}", " ", "", "")' if label else "vector(NaN)"
    return f"{expr} or {nan} unless on () {UP}"


def states() -> Queries:
    """How many of the instances are in each state; a ready one without a request is idle."""
    every, ready = (
        f"{series('specops_model_state', labels)} == 1" for labels in ("", 'state="ready"')
    )
    here = f"{series('specops_requests_running')} + {series('specops_requests_waiting')}"
    lately = f"increase({series('specops_requests_total')}[{NOW}]) > 0"
    idle = f"{ready} and on (job, instance) ({here} == 0) unless on (job, instance) ({lately})"
    return {
        "{{state}}": f"count by (state) ({every} unless ({idle}))",
        "idle": f"count({idle})",
        # A scrape that fails, or no instance at all: a container that is gone has no name left.
        "unreachable": f"count(up{{{INSTANCES}}} == 0) or absent(up{{{INSTANCES}}})",
    }
