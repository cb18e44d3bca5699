"""The panels' queries in PromQL, which are never NaN and never empty.

Ratios leave out divisions by zero and fill in 0, and quantiles drop NaN. Everything is read from
the chosen instances only. So each query has a value from the first scrape on.
"""

from __future__ import annotations

QUANTILE_WINDOW = "2m"  # a CPU answers few requests a minute: shorter windows hold too few
INSTANCES = 'instance=~"$instance"'
WINDOW = "$__rate_interval"

# Each query of a panel: its legend and its expression.
Queries = dict[str, str]


def series(name: str, labels: str = "") -> str:
    """One metric of the chosen instances; `labels` are further matchers."""
    return f"{name}{{{', '.join(filter(None, (INSTANCES, labels)))}}}"


def now(gauge: str, labels: str = "", *, of: str = "sum") -> str:
    """A gauge over all instances; 0 if it is missing."""
    return f"{of}({series(gauge, labels)}) or vector(0)"


def now_by(label: str, gauge: str, labels: str = "") -> str:
    """A gauge for each value of `label`."""
    return f"sum by ({label}) ({series(gauge, labels)})"


def _rate(counter: str, labels: str = "", window: str = WINDOW) -> str:
    return f"rate({series(counter, labels)}[{window}])"


def rate(counter: str, labels: str = "") -> str:
    """Events per second, all instances and labels together."""
    return f"sum({_rate(counter, labels)}) or vector(0)"


def rate_by(label: str, counter: str, labels: str = "") -> str:
    """Events per second for each value of `label`."""
    return (
        f"sum by ({label}) ({_rate(counter, labels)}) "
        f"or 0 * sum by ({label}) ({series(counter, labels)})"
    )


def ratio(numerator: str, denominator: str, top: str = "", bottom: str = "") -> str:
    """Increase of one counter per step of another; 0 while the other does not change."""
    return f"sum({_rate(numerator, top)}) / (sum({_rate(denominator, bottom)}) > 0) or vector(0)"


def ratio_by(label: str, numerator: str, denominator: str, labels: str = "") -> str:
    """`ratio` for each value of `label`."""
    return (
        f"sum by ({label}) ({_rate(numerator, labels)}) "
        f"/ (sum by ({label}) ({_rate(denominator, labels)}) > 0) "
        f"or 0 * sum by ({label}) ({series(denominator, labels)})"
    )


def part(gauge: str, labels: str, whole: str) -> str:
    """The gauge's value with `labels` as a share of that with `whole`; 0 without a value."""
    return f"sum({series(gauge, labels)}) / (sum({series(gauge, whole)}) > 0) or vector(0)"


def quantile(q: float, histogram: str, labels: str = "") -> str:
    """A quantile of a histogram; 0 without observations."""
    buckets = _rate(f"{histogram}_bucket", labels, QUANTILE_WINDOW)
    return f"histogram_quantile({q}, sum by (le) ({buckets})) >= 0 or vector(0)"


def quantiles(histogram: str) -> Queries:
    """Median, 95th and 99th percentile."""
    return {f"p{q * 100:g}": quantile(q, histogram) for q in (0.5, 0.95, 0.99)}


def mean(histogram: str) -> str:
    """The mean of a histogram's observations; 0 without observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def buckets(histogram: str) -> str:
    """Observations per bucket and step, for a heatmap."""
    counts = series(f"{histogram}_bucket")
    return f"sum by (le) (increase({counts}[{WINDOW}])) or 0 * sum by (le) ({counts})"
