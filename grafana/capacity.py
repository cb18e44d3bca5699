"""The dashboard "Will it fit?": memory, CPU and disk in use against the machine's limits, and how
replicas share the load.
"""

from board import (
    Panels,
    board,
    killed,
    memory_against_the_cap,
    memory_of_the_cap,
    row,
    state,
)
from empty import Empty
from panels import COUNT, MEAN, PER_SECOND, TIMES, Json, curves, tile
from promql import (
    ANSWERS,
    NOW,
    QUANTILE_WINDOW,
    WINDOW,
    enough,
    gauge,
    now,
    now_by,
    rate_by,
    rates,
    replicas_missing,
    series,
    share,
    time_share,
    time_share_by,
    total,
)

BYTES, DISK = "specops_memory_bytes", "specops_disk_bytes"
FREE, TOTAL = 'kind="free"', 'kind="total"'
STATES = "specops_state_bytes"
REQUESTS, REFUSED = "specops_requests_total", "specops_requests_rejected_total"
CACHED, COMPUTED = "specops_cached_prompt_tokens_total", "specops_prompt_tokens_total"
BY_LOAD = 'reason=~"queue_full|kv_tokens|memory|pressure"'
GENERATING = 'envoy_cluster_name="replicas"'  # one of the gateway's two routes to the replicas
EITHER = 'envoy_cluster_name=~"replicas|replicas_any"'
CLIENTS = 'envoy_http_conn_manager_prefix="gateway"'
OUT_OF_ROTATION = (
    f"sum(envoy_cluster_membership_total{{{GENERATING}}}) "
    f"- sum(envoy_cluster_membership_healthy{{{GENERATING}}})"
)


def _glance() -> Panels:
    yield state()
    yield memory_of_the_cap()
    yield tile(
        "Swap in use",
        "Memory that was moved to disk. A little that stays there is no problem; growing swap, "
        "together with memory pressure, makes every token slow.",
        "bytes",
        now(BYTES, 'kind="swap"'),
        warn=64 << 20,
        alarm=1 << 30,
        empty_when=Empty.UNREACHABLE,
    )
    yield tile(
        "Lost for memory",
        "Share of the time in which a task stood still because memory had to be freed first. "
        "Above a few percent the service crawls: lower SPECOPS_KV_TOKENS.",
        "percentunit",
        time_share("specops_memory_pressure_seconds_total", 'kind="some"', NOW),
        empty_when=Empty.NEVER,
        warn=0.02,
        alarm=0.1,
    )
    yield tile(
        "Processors used",
        "Share of the CPU time that affinity and quota grant the service. Near 100 % while it "
        "answers is right: inference uses all it gets. High without requests: see the API's log.",
        "percentunit",
        f"clamp_max({total('process_cpu_seconds_total', window=NOW)} "
        f"/ ({now('specops_cpus')} > 0), 1)",
        empty_when=Empty.UNREACHABLE,
    )
    yield tile(
        "Killed, last hour",
        "Processes of the service that the kernel killed for lack of memory. If any, lower "
        "SPECOPS_KV_TOKENS or choose smaller weights until memory stays below its limit.",
        COUNT,
        killed(),
        alarm=1,
        decimals=0,
        empty_when=Empty.UNREACHABLE,
    )
    yield tile(
        "Throttled",
        "Share of the accounting periods in which the CPU quota stopped the service. Above a few "
        "percent it runs more threads than the quota feeds: set SPECOPS_THREADS to the quota.",
        "percentunit",
        share("specops_cpu_throttled_periods_total", "specops_cpu_periods_total", window=NOW),
        empty_when=Empty.NO_QUOTA,
        warn=0.05,
        alarm=0.25,
    )
    yield tile(
        "Disk in use",
        "Share of the models' volume (SPECOPS_CACHE_DIR). Near 100 % a download or a conversion "
        "fails: remove unused models from that folder.",
        "percentunit",
        # The fullest volume: replicas share one, or have one each.
        f"max(1 - {gauge(DISK, FREE)} / ignoring (kind) ({gauge(DISK, TOTAL)} > 0))",
        warn=0.85,
        alarm=0.95,
        empty_when=Empty.UNREACHABLE,
    )


def _memory() -> Panels:
    yield row("Does it fit into memory?")
    yield memory_against_the_cap()
    yield curves(
        "Swap",
        "Swap in use, and its limit. Without a limit the machine has no swap; swap-setup.sh adds "
        "some where the host allows it. Growing: the service is too large for this machine.",
        "bytes",
        {
            "swap": now(BYTES, 'kind="swap"'),
            "swap limit": now(BYTES, 'kind="swap_limit"') + " > 0",
        },
        limits={"swap limit": "swap"},
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "Time lost for lack of memory",
        "Share of the time in which some or all (`full`) of the service's tasks stood still "
        "because memory had to be freed first. `full` above 0 for minutes: the kernel will soon "
        "kill the service; lower SPECOPS_KV_TOKENS now.",
        "percentunit",
        {"{{kind}}": time_share_by("kind", "specops_memory_pressure_seconds_total")},
        named=("some", "full"),
        warn=0.02,
        alarm=0.1,
        empty_when=Empty.NEVER,
    )
    yield curves(
        "Page faults per second",
        "`major`: a page was read from disk. If this happens during generation, the memory limit "
        "is too low to keep the weights in the page cache: choose smaller weights (SPECOPS_QUANT). "
        "`minor` (on the right): the page was in memory already; harmless.",
        PER_SECOND,
        {"{{kind}}": rate_by("kind", "specops_page_faults_total")},
        right={"minor": PER_SECOND},
        named=("major", "minor"),
        width=12,
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "Kills and restarts, last hour",
        "Processes that the kernel killed in the service's cgroup, and restarts, in the last "
        "hour. If any, lower SPECOPS_KV_TOKENS or choose smaller weights until memory stays below "
        "its limit.",
        COUNT,
        {
            "killed": killed(),
            "restarts": f"sum(changes({series('process_start_time_seconds')}[1h]) {ANSWERS})",
        },
        alarm=1,
        width=12,
        empty_when=Empty.UNREACHABLE,
    )


def _cache() -> Panels:
    yield row("Does the KV cache suffice?")
    yield curves(
        "Tokens in the KV cache",
        "`running`: tokens of running requests. `kept`: left by finished requests for prompts that "
        "begin alike. If running ones are at capacity while requests wait: raise "
        "SPECOPS_KV_TOKENS, set SPECOPS_KV_DTYPE=int8, shorten requests, or raise the memory "
        "limit.",
        COUNT,
        {
            "running": now("specops_kv_tokens"),
            "kept": now("specops_kv_kept_tokens"),
            "capacity": now("specops_kv_capacity_tokens"),
        },
        limits={"capacity": "running"},
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "KV blocks",
        "Blocks of 64 tokens: `used` by running requests, `shared` by several of them, `kept` "
        "from finished ones until their room is needed, or `free`. No free block is fine while "
        "some are kept. Without either, requests preempt each other: see `Preemptions`. None "
        "shared although prompts begin alike: see SPECOPS_PREFIX_CACHE.",
        COUNT,
        {"{{state}}": now_by("state", "specops_kv_blocks", moved=True)},
        named=("used", "shared", "kept", "free"),
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "Preemptions",
        "Requests per second that gave up their KV blocks to others and are computed again "
        "later. It should be 0. If not, the cache is too small for the running requests: raise "
        "SPECOPS_KV_TOKENS, set SPECOPS_KV_DTYPE=int8, or lower SPECOPS_SLOTS.",
        PER_SECOND,
        {"preemptions": total("specops_preemptions_total")},
        warn=0.1,
        alarm=1,
        empty_when=Empty.UNREACHABLE,
    )


def _states() -> Panels:
    yield row("Do recurrent layers have room? (LFM2, Qwen3.5, Granite 4.0 H)", folded=True)
    yield curves(
        "Memory of states",
        "States of recurrent layers: `slots` for running requests, whatever their length, and "
        "`snapshots` from which prompts with the same beginning continue. Snapshots at their limit "
        "are fine unless many are dropped: see `Snapshots of states`.",
        "bytes",
        {
            "{{kind}}": now_by("kind", STATES, 'kind=~"slots|snapshots"') + " > 0",
            "limit of snapshots": now(STATES, 'kind="limit"') + " > 0",
        },
        limits={"limit of snapshots": "snapshots"},
        named=("slots", "snapshots"),
        width=12,
        empty_when=Empty.NO_STATES,
    )
    yield curves(
        "Snapshots of states",
        "Snapshots per second: `taken` where messages and prompts end, `used` by prompts that "
        "continued from one, `dropped` to make room. If hardly any are used and as many dropped "
        "as taken, chats compute their history again: give snapshots more memory with fewer "
        "SPECOPS_SLOTS or SPECOPS_KV_TOKENS, or a larger limit.",
        PER_SECOND,
        {"{{event}}": rate_by("event", "specops_state_snapshots_total")},
        width=12,
        empty_when=Empty.NEVER,
    )


def _cpu_and_disk() -> Panels:
    yield row("Do CPU and disk suffice?")
    yield curves(
        "Processors",
        "CPUs in use, and those that affinity and quota grant. At the limit while requests wait: "
        "the CPU is the bottleneck. Far below it while requests wait: memory or disk is.",
        MEAN,
        {
            "used": total("process_cpu_seconds_total"),
            "granted": now("specops_cpus"),
        },
        limits={"granted": "used"},
        empty_when=Empty.UNREACHABLE,
        width=6,
    )
    yield curves(
        "Stopped by the processor quota",
        "Seconds per second for which the quota stopped the service. Above 0.05: more threads "
        "than the quota can feed; set SPECOPS_THREADS, or raise the quota.",
        "s",
        {
            "stopped": f"{time_share('specops_cpu_throttled_seconds_total')} "
            f"and on () {now('specops_cpu_periods_total')} > 0"
        },
        warn=0.05,
        alarm=0.25,
        empty_when=Empty.NO_QUOTA,
        width=6,
    )
    yield curves(
        "Disk of the models",
        "The volume of SPECOPS_CACHE_DIR: free, and total. A first start needs room for the "
        "download, its conversion and the weights in the CPU's layout, about three times the "
        "model.",
        "bytes",
        {
            "free": now(DISK, FREE, of="min"),
            "total": now(DISK, TOTAL, of="min"),
        },
        limits={"total": "free"},
        empty_when=Empty.UNREACHABLE,
        width=6,
    )
    yield curves(
        "Downloads",
        "Share of each model's files that has been downloaded, for models that are not bundled. "
        "Stuck below 100 %: GET /health says what the service waits for.",
        "percentunit",
        {
            "{{model}}": f"{now_by('model', 'specops_download_bytes')} "
            f"/ ({now_by('model', 'specops_download_total_bytes')} > 0)"
        },
        maximum=1,
        empty_when=Empty.NEVER,
        width=6,
    )


def _gateway(counter: str, labels: str = EITHER, window: str = WINDOW) -> str:
    """Events per second at the gateway."""
    return f"sum(rate({counter}{{{labels}}}[{window}]) {ANSWERS})"


def _seconds(histogram: str, labels: str, q: float) -> str:
    """A quantile of one of the gateway's histograms, which count milliseconds."""
    rate = f"rate({histogram}_bucket{{{labels}}}[{QUANTILE_WINDOW}]) {ANSWERS}"
    count = f"{histogram}_count{{{labels}}}"
    return f"histogram_quantile({q}, sum by (le) ({rate})) / 1000 and on () {enough(count)}"


def _mean(histogram: str, labels: str) -> str:
    """The mean of one of the gateway's histograms, in seconds, given enough requests."""
    total, number = (
        _gateway(f"{histogram}_{part}", labels, QUANTILE_WINDOW) for part in ("sum", "count")
    )
    return f"{total} / {number} / 1000 and on () {enough(f'{histogram}_count{{{labels}}}')}"


def _cached_share() -> str:
    """Cached tokens as a share of all prompt tokens, by replica."""
    cached, computed = (f"sum by (instance) ({rates(name)})" for name in (CACHED, COMPUTED))
    return f"{cached} / ({cached} + {computed} > 0)"


def _replicas() -> Panels:
    yield row("How is the load spread?", folded=True)
    yield state(8, title="Replicas, by state", counted=True)
    yield tile(
        "Replicas missing",
        "Replicas that answered Prometheus in the last half hour, but do not now. If none was "
        "removed on purpose: is its process running, and what does its log say?",
        COUNT,
        replicas_missing(),
        warn=1,
        alarm=1,
        width=8,
        empty_when=Empty.TOO_EARLY,
    )
    per_replica = f"sum by (instance) ({rates(REQUESTS, window='5m')})"
    yield tile(
        "Most over mean",
        "Requests of the busiest replica divided by the mean of all, over five minutes. 1 is "
        "even; the gateway limits concurrent requests to 1.25 times the mean. Above 1.5 for long: "
        "few sessions make most of the load, or one replica answers faster than the others.",
        TIMES,
        f"max({per_replica}) / avg({per_replica}) and on () {enough(series(REQUESTS), '5m')}",
        warn=1.5,
        alarm=2.5,
        decimals=2,
        width=8,
    )
    yield curves(
        "Requests by replica",
        "Requests per second that each replica finished. If lines stay far apart, see what runs "
        "and waits at each. A line at 0 while others are not: it is out of rotation.",
        PER_SECOND,
        {"{{instance}}": rate_by("instance", REQUESTS)},
        width=6,
        empty_when=Empty.NO_REQUESTS,
    )
    yield curves(
        "Prompt tokens from the cache, by replica",
        "Share of prompt tokens that each replica found in its prefix cache. One far below the "
        "others: it gets conversations that belong elsewhere, or its cache is too small "
        "(SPECOPS_KV_TOKENS). All low: clients send no X-Session-ID, and prompts differ from their "
        "beginning.",
        "percentunit",
        {"{{instance}}": _cached_share()},
        maximum=1,
        width=6,
    )
    yield curves(
        "Running and waiting, by replica",
        "Requests that run or wait at each replica now. If one queue is long while others are "
        "empty, check whether requests bypass the gateway. All long: add a replica.",
        COUNT,
        {
            "{{instance}} runs": now_by("instance", "specops_requests_running"),
            "{{instance}} waits": now_by("instance", "specops_requests_waiting", moved=True),
        },
        width=6,
        empty_when=Empty.UNREACHABLE,
    )
    yield curves(
        "Refused, by replica",
        "429 answers per second of each replica. The gateway then tries another one, so clients "
        "see fewer. If a single replica refuses, it is slower or smaller than the others.",
        PER_SECOND,
        {"{{instance}}": rate_by("instance", REFUSED, BY_LOAD)},
        width=6,
        empty_when=Empty.NEVER,
    )


def _gateway_row() -> Panels:
    yield row("What does the gateway do?", folded=True)
    yield tile(
        "Out of rotation",
        "Replicas that the gateway skips: their health checks fail, or a connection broke. If it "
        "lasts for minutes, GET /health of each says which one it is, and its log says why.",
        COUNT,
        OUT_OF_ROTATION,
        warn=1,
        empty_when=Empty.NO_GATEWAY,
        width=6,
    )
    yield tile(
        "Tried again",
        "Requests per second that the gateway sent to another replica, because the first could not "
        "be reached, broke the connection before its answer, or was full. More than a few percent: "
        "see `Ejected and unhealthy`.",
        PER_SECOND,
        _gateway("envoy_cluster_upstream_rq_retry", window=NOW),
        decimals=1,
        empty_when=Empty.NO_GATEWAY,
        width=6,
    )
    yield tile(
        "Refused to clients",
        "4xx answers per second through the gateway. 429: every replica that it tried was full, or "
        "one client exceeded its rate. Many: add a replica.",
        PER_SECOND,
        _gateway("envoy_http_downstream_rq_xx", f'{CLIENTS}, envoy_response_code_class="4"', NOW),
        decimals=1,
        empty_when=Empty.NO_GATEWAY,
        width=6,
    )
    yield tile(
        "The gateway's part",
        "The time that the gateway adds to a mean request, receiving the request included. Under a "
        "millisecond is usual; retries, or clients that send slowly, add more.",
        "s",
        f"({_mean('envoy_http_downstream_rq_time', CLIENTS)}) - "
        f"({_mean('envoy_cluster_upstream_rq_time', EITHER)}) >= 0",
        warn=0.05,
        empty_when=Empty.NO_GATEWAY,
        width=6,
    )
    yield curves(
        "Tried again, and with success",
        "Requests per second that went to another replica, and those that it answered. Far apart: "
        "no replica had room, or none could be reached.",
        PER_SECOND,
        {
            "tried again": _gateway("envoy_cluster_upstream_rq_retry"),
            "answered": _gateway("envoy_cluster_upstream_rq_retry_success"),
        },
        empty_when=Empty.NO_GATEWAY,
    )
    yield curves(
        "Ejected and unhealthy",
        "Replicas ejected after a broken connection or a 503, and all that are out of rotation. A "
        "spike at a restart is right. If it lasts, that replica's log says why.",
        COUNT,
        {
            "ejected": f"sum(envoy_cluster_outlier_detection_ejections_active{{{GENERATING}}})",
            "out of rotation": OUT_OF_ROTATION,
        },
        empty_when=Empty.NO_GATEWAY,
    )
    yield curves(
        "Latency, with and without the gateway",
        "Time that the gateway's clients wait for a whole answer, and the replicas' part of it. "
        "The lines should coincide; a gap means retries, or clients that read slowly.",
        "s",
        {
            f"{name} {q}": _seconds(histogram, labels, quantile)
            for q, quantile in (("p50", 0.5), ("p95", 0.95))
            for name, histogram, labels in (
                ("with", "envoy_http_downstream_rq_time", CLIENTS),
                ("without", "envoy_cluster_upstream_rq_time", EITHER),
            )
        },
        empty_when=Empty.NO_GATEWAY,
    )


def build() -> Json:
    """The whole dashboard."""
    return board(
        "capacity",
        "Will it fit?",
        "Memory, CPU and disk in use against the machine's limits; load by replica.",
        (_glance, _memory, _cache, _cpu_and_disk, _states, _replicas, _gateway_row),
    )
