"""Dashboards and alerts over idle times, loads and restarts: the right figure at every step."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from grafana.promql import FEW, GONE
from tests.stack import queries
from tests.stack.recorded import (
    MEMORY,
    QUEUE,
    SCRAPE,
    SLOTS,
    Case,
    Recording,
    Sample,
    Service,
    one,
    query,
)

IDLE, LOAD, AFTER = 60, 300, 10 * 60  # seconds
USERS = 40  # more than there is room for
SPEED, TOKENS = 8.0, 2.0  # tokens per second with all slots taken, and per pass
ANSWERS = SLOTS / 6.6  # a second
NONE: list[Sample] = []


def measured(*units: str) -> list[str]:
    """The expressions of all panels of these units, but for the machine's."""
    return [
        queries.filled(target["expr"])
        for name, panel in queries.panels()
        for target in queries.targets(panel)
        if panel["fieldConfig"]["defaults"]["unit"] in units and name != "capacity"
    ]


def over(kind: str, promql: str, begin: float, end: float) -> str:
    """Minimum, maximum or count of an expression at the scrapes after `begin` until `end`."""
    return f"{kind}_over_time(({promql})[{end - begin - 1:g}s:{SCRAPE}s] @ {end:g})"


def never_above(promql: str, most: float, begin: float, end: float) -> Case:
    """What the expression is at no scrape."""
    return end, f"{over('max', promql, begin, end)} > {most}", NONE


def always(promql: str, value: float, begin: float, end: float) -> list[Case]:
    """What the expression is at every scrape."""
    scrapes = math.floor(end / SCRAPE) - math.floor(begin / SCRAPE)
    least, most, count = (over(kind, promql, begin, end) for kind in ("min", "max", "count"))
    return [(end, least, one(value)), (end, most, one(value)), (end, count, one(scrapes))]


def near(promql: str, value: float, at: float, tolerance: float) -> Case:
    """About what the expression is at one time."""
    return at, f"count(abs(({promql}) - {value}) <= {tolerance})", one(1)


@pytest.fixture(scope="module")
def load() -> tuple[Recording, Service]:
    """A minute without a request, five with too many, and ten without any."""
    recording, service = Recording(), Service()
    recording.scrape(api=service)
    recording.play(IDLE, api=service)
    recording.play(LOAD, USERS, api=service)
    service.gain = 5.0  # of its latest steps
    recording.play(AFTER, api=service)
    return recording, service


def test_under_load_each_figure_is_what_happened_or_says_few(
    load: tuple[Recording, Service], tmp_path: Path
) -> None:
    recording, service = load
    bounds = service.bounds("specops_latency_seconds")
    tile, p95 = query("Latency, p95", board="latency"), query("Latency over time", "p95")
    cases: list[Case] = [(IDLE, tile, NONE)]
    for at in range(IDLE + SCRAPE, IDLE + LOAD, SCRAPE):
        lately = sorted(latency for end, latency in service.ended if at - 120 < end <= at)
        answers = len(lately)
        if answers < 19:
            cases += [(at, p95, NONE), (at, tile, one(FEW) if lately else NONE)]
        elif answers > 20:
            slow = lately[math.ceil(0.95 * answers) - 1]
            ((low, high),) = ((low, high) for low, high in pairwise(bounds) if low < slow <= high)
            cases += [(at, f"count(({it}) > {low} <= {high})", one(1)) for it in (p95, tile)]
            refused = sum(at - 120 <= when < at for when in service.refused)
            cases += [near(query("Refused"), refused / (refused + answers), at, 0.02)]
    cases += always(query("Tokens per second"), SPEED, IDLE + 60, IDLE + LOAD)
    recording.check(cases, tmp_path)
    assert len(cases) > 100


def test_no_share_is_more_than_the_whole_and_no_gain_more_than_the_tokens_per_pass(
    load: tuple[Recording, Service], tmp_path: Path
) -> None:
    recording, service = load
    shares = measured("percentunit")
    assert len(shares) > 10
    times = range(IDLE, IDLE + 2 * LOAD, 3 * SCRAPE)
    cases: list[Case] = [(at, f"({promql}) > 1", NONE) for promql in shares for at in times]
    # Each prompt's beginning was known. While the queue fills, more have begun than have ended.
    known = query("Requests with a known beginning", board="latency")
    cases += always(known, 1, IDLE + 60, IDLE + LOAD)
    gain = query("Gain over plain decoding", "gain over plain decoding", "speculation")
    bound = query("Gain over plain decoding", "tokens per pass", "speculation")
    assert service.gain > TOKENS
    cases += [never_above(f"{gain} - {bound}", 0, 0, recording.now)]
    cases += [(IDLE + LOAD + SCRAPE, promql, one(TOKENS)) for promql in (gain, bound)]
    recording.check(cases, tmp_path)


def test_after_a_load_curves_stop_or_fall(load: tuple[Recording, Service], tmp_path: Path) -> None:
    recording, service = load
    latest = max(end for end, _ in service.ended)
    end = math.ceil(latest / SCRAPE) * SCRAPE  # the scrape that saw the last answer
    cases: list[Case] = [
        (end, f"count({query('Latency over time', 'p50')})", one(1)),
        (end, f"count({query('Error budget burn', '5m')})", one(1)),
    ]
    for promql in measured("s", "percentunit", "suffix:x", "suffix:tok/s", "reqps", "short"):
        last = f"last_over_time(({promql})[{SCRAPE - 1}s:{SCRAPE}s] @ {end})"
        for at in (*range(end + SCRAPE, end + 45, SCRAPE), *range(end + 60, end + 500, 60)):
            # The window of a quantile moves on for as long as the latest answer counts as of now.
            cases += [(at, f"({promql}) > 1.02 * {last} or ({promql}) unless {last}", NONE)]
    for title in ("Latency over time", "Time to first token", "Time between tokens"):
        cases += [(end + 35, query(title, q), NONE) for q in ("p50", "p95", "p99")]
    cases += [
        (end + minutes * 60, query("Error budget burn", window), NONE)
        for window, minutes in (("5m", 2), ("30m", 4), ("1h", 6), ("6h", 6))
    ]
    cases += [
        (end + 300, query("Latency, p95", board="latency"), NONE),
        (end + 65, query("State", "idle"), one(1)),
    ]
    recording.check(cases, tmp_path)


# What comes between: seconds without an answer, and seconds without Prometheus, which then marks no
# end of its series. Several replicas in Compose are named by addresses, which change meanwhile.
ONE, TWO = ("api",), ("172.18.0.3:8000", "172.18.0.4:8000")
INTERRUPTIONS = {
    "restart": (15, 0, ONE, ONE),
    "kill": (40, 0, ONE, ONE),
    "down and up": (0, 10, ONE, ONE),
    "down and up elsewhere": (0, 20, ("172.18.0.3:8000",), ("172.19.0.2:8000",)),
    "two, down and up": (0, 20, TWO, ("172.19.0.2:8000", "172.19.0.3:8000")),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_a_service_and_its_successor_count_once(how: str, tmp_path: Path) -> None:
    silent, gone, before, after = INTERRUPTIONS[how]
    recording = Recording()
    recording.play(150, SLOTS, **{name: Service() for name in before})
    recording.play(silent, **dict.fromkeys(before))
    recording.stop(gone)
    begin = recording.scrapes * SCRAPE
    recording.play(330, SLOTS, **{name: Service(now=begin) for name in after})
    end, count = recording.now, len(after)
    whole = {
        query("Queue", "slots"): SLOTS,
        query("Queue", "room to wait"): QUEUE,
        query("Memory against the cap", "limit"): MEMORY,
        query("Tokens in the KV cache", "capacity", "capacity"): 4096,
        query("Processors", "granted", "capacity"): 2,
        f"sum({query('State', '{{state}}')})": 1,
    }
    cases: list[Case] = []
    for promql, each in whole.items():
        cases += [never_above(promql, count * each, 0, end)]
        cases += always(promql, count * each, begin + SCRAPE, end)
    cases += always(query("Memory of the cap"), 0.25, begin + SCRAPE, end)
    cases += [
        never_above(query("Tokens per second, by use", "generated"), 1.1 * count * SPEED, 0, end)
    ]
    cases += always(query("Replicas missing", board="capacity"), 0, begin + SCRAPE, end)
    cases += [(end, over("max", firing("ReplicasMissing"), 0, end), NONE)]
    cases += [
        (at, f"({promql}) > 1", NONE)
        for promql in measured("percentunit")
        for at in range(begin, begin + 120, 3 * SCRAPE)
    ]
    restarts = query("Kills and restarts, last hour", "restarts", "capacity")
    cases += [(end, restarts, one(float(before == after)))]
    recording.check(cases, tmp_path)


def firing(alert: str) -> str:
    """When an alert fires, with `over`."""
    return f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'


def test_a_service_that_was_killed_for_memory_is_told_from_one_that_restarts(
    tmp_path: Path,
) -> None:
    recording, service = Recording(), Service()
    recording.play(180, SLOTS, api=service)
    service.anon = MEMORY - MEMORY // 16
    recording.play(180, SLOTS, api=service)
    killed = recording.now
    recording.play(15, api=None)
    recording.play(300, SLOTS, api=Service(now=killed + 15))
    share = query("Memory of the cap")
    cases = always(share, 15 / 16, 185, killed) + always(share, 0.25, killed + 20, recording.now)
    cases += [
        (killed, firing("MemoryNearCap"), one(1)),
        (killed, firing("OutOfMemoryRestart"), NONE),
    ]
    cases += always(firing("OutOfMemoryRestart"), 1, killed + 25, recording.now)
    cases += [(killed + 120, firing("MemoryNearCap"), NONE)]
    cases += [(killed + 10, share, one(GONE))]
    cases += always(query("State", "unreachable"), 1, killed + 1, killed + 15)
    recording.check(cases, tmp_path)


def test_of_two_replicas_one_is_left(tmp_path: Path) -> None:
    """Its container is gone: no series of it is left, nor a failed scrape."""
    recording, left = Recording(), Service()
    recording.play(300, SLOTS, a=left, b=Service())
    gone = recording.now
    recording.play(5 * 60, SLOTS, a=left)
    slots, missing = query("Queue", "slots"), query("Replicas missing", board="capacity")
    cases = always(slots, 2 * SLOTS, 5, gone) + always(slots, SLOTS, gone, recording.now)
    cases += always(missing, 1, gone, recording.now)
    speed = query("Tokens per second, by use", "generated")
    cases += [near(speed, 2 * SPEED, gone, 0.1), near(speed, SPEED, gone + SCRAPE, 0.1)]
    cases += [(gone + 100, firing("ReplicasMissing"), NONE)]
    cases += always(firing("ReplicasMissing"), 1, gone + 130, recording.now)
    recording.check(cases, tmp_path)


def test_one_dead_replica_of_three_is_missing_from_sums_at_once(tmp_path: Path) -> None:
    recording, others = Recording(), {name: Service() for name in "bc"}
    recording.play(150, SLOTS, a=Service(), **others)
    requests = query("Requests per second")
    before = recording.now
    recording.play(2 * SCRAPE, SLOTS, a=None, **others)
    cases: list[Case] = [
        near(requests, 3 * ANSWERS, before, 0.3),
        near(requests, 2 * ANSWERS, recording.now, 0.3),
        near(query("Tokens per second, by use", "generated"), 2 * SPEED, recording.now, 0.1),
        (recording.now, query("State", "unreachable"), one(1)),
        (recording.now, query("State", "{{state}}"), [{"labels": '{state="ready"}', "value": 2}]),
        (recording.now, query("Replicas missing", board="capacity"), one(1)),
    ]
    recording.check(cases, tmp_path)
