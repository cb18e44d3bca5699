"""The panels' queries in PromQL. Where nothing was measured, they have no value.

A query has a value only while its instance answers Prometheus: each series is joined with `up`, so
one dead replica of three leaves a sum at once. A Prometheus that is stopped together with a service
marks no end of its series: they stay readable for five minutes, along with the series of the next
container. So `up` counts only while it is fresh.

A ratio has no value if its denominator did not increase, nor has a speed of 0. A share or a
quantile needs 20 events in its window, one of them recent: after a load test the last answers are
the slowest, and with fewer and fewer of them the figure would climb. Counts and rates may be 0.
"""

INSTANCES = 'job=~"$job", instance=~"$instance"'
FRESH = "> time() - 20"  # four scrapes
UP = f"up{{{INSTANCES}}} * timestamp(up{{{INSTANCES}}}) {FRESH}"
ANSWERS = f"and on (job, instance) up * timestamp(up) {FRESH}"
WINDOW = "$__rate_interval"
NOW = "1m"  # the window of current figures, whatever time range is shown
QUANTILE_WINDOW = "2m"  # a CPU answers few requests a minute: shorter windows hold too few
LATELY = "30s"  # without an event for that long, the load has ended
FEWEST = 20  # events that a share or a quantile needs
FEW = -1  # stands for a figure of fewer events; the panel maps it to a word, like the next
GONE = -2  # no instance answers
# A curve uses only the newest of these stand-ins: it would draw `few` as a figure.
NEWEST = " and on () vector(time()) > $__to / 1000 - 15"
_FIRING = 'ALERTS{alertstate="firing"}'
FIRING = f"({_FIRING} and timestamp({_FIRING}) {FRESH})"

# Each query of a panel: its legend and its expression.
Queries = dict[str, str]


def series(name: str, labels: str = "") -> str:
    """One metric of the chosen instances; `labels` are further matchers."""
    return f"{name}{{{', '.join(filter(None, (INSTANCES, labels)))}}}"


def gauge(name: str, labels: str = "") -> str:
    """A gauge of each instance that answers."""
    return f"({series(name, labels)} {ANSWERS})"


def now(name: str, labels: str = "", *, of: str = "sum") -> str:
    """A gauge over all instances."""
    return f"{of}{gauge(name, labels)}"


def now_by(label: str, name: str, labels: str = "", *, moved: bool = False) -> str:
    """A gauge for each value of `label`; with `moved`, only where it was above 0 in the range."""
    seen = f" and max_over_time({series(name, labels)}[$__range]) > 0" if moved else ""
    return f"sum by ({label}) ({gauge(name, labels)}{seen})"


def _of_passes(name: str) -> str:
    # NaN, where no request decoded in the last minute, is not above 0.
    return f"avg({gauge(name)} > 0)"


# Of the last minute, both: the estimated gain can be compared with tokens per pass, its maximum.
TOKENS_PER_PASS = _of_passes("specops_avg_jump")
GAIN = _of_passes("specops_estimated_speedup")


def rates(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Events per second of each series whose instance answers."""
    return f"rate({series(counter, labels)}[{window}]) {ANSWERS}"


def total(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Events per second, all instances and labels together; 0 is a count."""
    return f"sum({rates(counter, labels, window)})"


def speed(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Tokens per second; no value while it is 0."""
    return f"{total(counter, labels, window)} > 0"


def rate_by(label: str, counter: str, labels: str = "") -> str:
    """Events per second for each value of `label` that had one in the time range."""
    moved = f"increase({series(counter, labels)}[$__range]) > 0"
    return f"sum by ({label}) ({rates(counter, labels)} and {moved})"


def time_share(counter: str, labels: str = "", window: str = WINDOW) -> str:
    """Seconds counted per second, on the instance with the most."""
    return f"clamp_max(max({rates(counter, labels, window)}), 1)"


def time_share_by(label: str, counter: str) -> str:
    """`time_share` for each value of `label` that had any in the time range."""
    moved = f"increase({series(counter)}[$__range]) > 0"
    return f"clamp_max(max by ({label}) ({rates(counter)} and {moved}), 1)"


def ratio(
    numerator: str, denominator: str, top: str = "", bottom: str = "", window: str = WINDOW
) -> str:
    """Increase of one counter divided by that of another, which must increase."""
    return f"{total(numerator, top, window)} / ({speed(denominator, bottom, window)})"


def ratio_by(
    label: str, numerator: str, denominator: str, labels: str = "", window: str = WINDOW
) -> str:
    """`ratio` for each value of `label`."""
    return (
        f"sum by ({label}) ({rates(numerator, labels, window)}) "
        f"/ (sum by ({label}) ({rates(denominator, labels, window)}) > 0)"
    )


def each_per(label: str, counter: str, steps: str, window: str = WINDOW) -> str:
    """A counter for each value of `label`, divided by a counter without that label."""
    return (
        f"(sum by ({label}) ({rates(counter, window=window)}) > 0) "
        f"/ on () group_left () ({speed(steps, window=window)})"
    )


def share(part: str, whole: str, top: str = "", bottom: str = "", window: str = WINDOW) -> str:
    """One counter as a share of another, given enough events."""
    return _share(
        _count(part, top, window), _count(whole, bottom, window), _count(whole, bottom, LATELY)
    )


def share_and(part: str, rest: str, top: str = "", bottom: str = "", window: str = WINDOW) -> str:
    """One counter as a share of the sum of two, given enough events."""
    either, lately = (
        f"{_count(part, top, over)} + {_count(rest, bottom, over)}" for over in (window, LATELY)
    )
    return _share(_count(part, top, window), either, lately)


def share_by(label: str, part: str, whole: str, window: str = WINDOW) -> str:
    """`share` for each value of `label`, which both counters have."""
    by = f" by ({label}) "
    return _share(_count(part, "", window, by), _count(whole, "", window, by))


def each_share(label: str, part: str, whole: str, window: str = WINDOW) -> str:
    """`share` for each value of `label`, which the whole does not have; above 0."""
    counted = f"({_count(part, '', window, f' by ({label}) ')} > 0)"
    return _share(counted, _count(whole, "", window), over="/ on () group_left ()")


def _count(counter: str, labels: str, window: str, by: str = "") -> str:
    return f"sum{by}(increase({series(counter, labels)}[{window}]) {ANSWERS})"


def _share(part: str, whole: str, lately: str = "", over: str = "/") -> str:
    # `increase` extrapolates each series separately, so 20 of 20 may become 20.3 of 20.
    goes_on = f" and on () {lately} > 0" if lately else ""
    return f"clamp_max({part} {over} ({whole} >= {FEWEST}{goes_on}), 1)"


def or_few(expr: str, *counters: str, window: str = QUANTILE_WINDOW) -> str:
    """The figure; `FEW` where it has no value although its window has such events."""
    seen = " + ".join(_count(counter, "", window) for counter in counters)
    return f"{expr} or vector({FEW}) and on () {seen} > 0"


def part(name: str, labels: str, whole: str) -> str:
    """The gauge's value with `labels`, as a share of its value with `whole`."""
    return f"{now(name, labels)} / ({now(name, whole)} > 0)"


def quantile(q: float, histogram: str, labels: str = "") -> str:
    """A quantile of a histogram's observations, given enough of them."""
    buckets = rates(f"{histogram}_bucket", labels, QUANTILE_WINDOW)
    count = series(f"{histogram}_count", labels)
    return f"histogram_quantile({q}, sum by (le) ({buckets})) and on () {enough(count)}"


def told_quantile(q: float, histogram: str) -> str:
    """A quantile for a tile: `FEW` if there were too few observations."""
    return or_few(quantile(q, histogram), f"{histogram}_count")


def quantiles(histogram: str) -> Queries:
    """Median, 95th and 99th percentile."""
    return {f"p{q * 100:g}": quantile(q, histogram) for q in (0.5, 0.95, 0.99)}


def mean(histogram: str) -> str:
    """The mean of a histogram's observations, given enough of them."""
    sums, counts = (total(f"{histogram}_{kind}", "", QUANTILE_WINDOW) for kind in ("sum", "count"))
    return f"({sums} / {counts} and on () {enough(series(f'{histogram}_count'))})"


def enough(counters: str, window: str = QUANTILE_WINDOW) -> str:
    """Whether there were enough events in the window, one of them recent."""
    counted, lately = (f"sum(increase({counters}[{one}]) {ANSWERS})" for one in (window, LATELY))
    return f"{counted} >= {FEWEST} and on () {lately} > 0"


def buckets(histogram: str) -> str:
    """Observations in each bucket since the previous step, for a heatmap.

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
    """The same series in the numeric order of the label: Prometheus sorts 10 before 2.

    Numbers of up to three digits get leading blanks, which browsers do not show.
    """
    for blanks, digits in (("  ", "(.)"), (" ", "(..)")):
        expr = f'label_replace({expr}, "{label}", "{blanks}$1", "{label}", "{digits}")'
    return expr


def or_unreachable(expr: str, label: str = "") -> str:
    """The expression; `GONE` if none of the instances answers.

    `label` names the expression's series in the legend; `GONE` gets a blank name.
    """
    gone = f"vector({GONE})"
    if label:
        gone = f'label_replace({gone}, "{label}", " ", "", "")'
    return f"{expr} or {gone} unless on () {UP}"


def replicas_missing() -> str:
    """How many fewer instances answer than in the last half hour, for at least two minutes.

    For less than that, a container and its successor may both be seen.
    """
    answering = f"count({UP})"
    return f"max_over_time(min_over_time({answering}[2m:15s])[30m:1m]) - {answering}"


def states() -> Queries:
    """How many of the instances are in each state; a ready one without a request is idle."""
    every, ready = (
        f"{gauge('specops_model_state', labels)} == 1" for labels in ("", 'state="ready"')
    )
    here = f"{series('specops_requests_running')} + {series('specops_requests_waiting')}"
    lately = f"increase({series('specops_requests_total')}[{NOW}]) > 0"
    idle = f"{ready} and on (job, instance) ({here} == 0) unless on (job, instance) ({lately})"
    silent = f"up{{{INSTANCES}}} == 0 and timestamp(up{{{INSTANCES}}}) {FRESH}"
    return {
        "{{state}}": f"count by (state) ({every} unless ({idle}))",
        "idle": f"count({idle})",
        # A failed scrape, or no instance at all: a removed container leaves no name behind.
        "unreachable": f"count({silent}) or absent({UP})",
    }
