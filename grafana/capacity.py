"""The dashboard "Will it fit?": memory, processor and disk against what the machine grants."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board, state
from panels import COUNT, MEAN, PER_SECOND, UNREACHABLE, curves, tile
from promql import (
    ANSWERS,
    NOW,
    gauge,
    now,
    now_by,
    part,
    rate_by,
    series,
    share,
    time_share,
    time_share_by,
    total,
)

MEMORY, DISK = "specops_memory_bytes", "specops_disk_bytes"
FREE, TOTAL = 'kind="free"', 'kind="total"'
STATES, NO_STATES = "specops_state_bytes", "this model has no states"
NO_QUOTA = "no quota"


def _glance() -> Panels:
    yield state()
    yield tile(
        "Memory of the cap",
        "Anonymous memory, which cannot be dropped, as a share of the limit. Above 90 % the kernel "
        "swaps or kills: a smaller KV cache (SPECOPS_KV_TOKENS, SPECOPS_KV_DTYPE=int8) or "
        "smaller weights (SPECOPS_QUANT).",
        "percentunit",
        part(MEMORY, 'kind="anon"', 'kind="limit"'),
        warn=0.75,
        alarm=0.9,
    )
    yield tile(
        "Swap in use",
        "Memory that was moved to disk. A little that does not move is no problem; growing "
        "swap, together with pressure, makes every token slow.",
        "bytes",
        now(MEMORY, 'kind="swap"'),
        warn=64 << 20,
        alarm=1 << 30,
    )
    yield tile(
        "Lost for memory",
        "Share of the time in which some task stood still because memory had to be freed "
        "first. Above a few percent it crawls: lower SPECOPS_KV_TOKENS.",
        "percentunit",
        time_share("specops_memory_pressure_seconds_total", 'kind="some"', NOW),
        nothing="unknown",
        warn=0.02,
        alarm=0.1,
    )
    yield tile(
        "Processors used",
        "Share of the processor time that affinity and quota leave the service. Near 100 % "
        "while it answers is right: inference uses what it gets. High without requests: "
        "look at the API's log.",
        "percentunit",
        f"clamp_max({total('process_cpu_seconds_total', window=NOW)} "
        f"/ ({now('specops_cpus')} > 0), 1)",
    )
    yield tile(
        "Throttled",
        "Share of the accounting periods in which the processor quota stopped the service. "
        "Above a few percent it runs more threads than it may: set SPECOPS_THREADS to the "
        "quota.",
        "percentunit",
        share("specops_cpu_throttled_periods_total", "specops_cpu_periods_total", window=NOW),
        nothing=NO_QUOTA,
        warn=0.05,
        alarm=0.25,
    )
    yield tile(
        "Disk in use",
        "Of the volume that models are kept on (SPECOPS_CACHE_DIR). Near 100 % a download or "
        "a conversion fails: remove models that are not used any more from that folder.",
        "percentunit",
        # The fullest volume: replicas share one, or have one each.
        f"max(1 - {gauge(DISK, FREE)} / ignoring (kind) ({gauge(DISK, TOTAL)} > 0))",
        warn=0.85,
        alarm=0.95,
    )


def _memory() -> Panels:
    yield Row("Does it fit into memory?")
    yield curves(
        "Memory against the cap",
        "`anon` cannot be dropped and must stay below the limit; `file` is page cache, weights "
        "among it, and is dropped when needed, at the price of reading them again. A total "
        "near the limit is no problem by itself.",
        "bytes",
        {
            "{{kind}}": now_by("kind", MEMORY, 'kind=~"anon|file"'),
            "limit": now(MEMORY, 'kind="limit"'),
        },
        limits=("limit",),
        stacked=True,
        nothing=UNREACHABLE,
    )
    yield curves(
        "Swap",
        "Swap in use against what there is. No limit: there is none; "
        "swap-setup.sh makes some where the host allows it. Growing: too much for this "
        "machine.",
        "bytes",
        {
            "used": now(MEMORY, 'kind="swap"'),
            "limit": now(MEMORY, 'kind="swap_limit"') + " > 0",
        },
        limits=("limit",),
        nothing=UNREACHABLE,
    )
    yield curves(
        "Time lost for lack of memory",
        "Share of the time in which some, or all, of the service's tasks stood still because "
        "memory had to be freed first. `full` above 0 for minutes: it is about to be killed "
        "or useless; lower SPECOPS_KV_TOKENS now.",
        "percentunit",
        {"{{kind}}": time_share_by("kind", "specops_memory_pressure_seconds_total")},
        warn=0.02,
        alarm=0.1,
        nothing="no time was lost",
    )
    yield curves(
        "Page faults per second",
        "`major`: a page was read from disk. Some of them while it generates: the weights do "
        "not stay in the page cache, so the cap is too tight for them; smaller weights "
        "(SPECOPS_QUANT) help. `minor` (on the right): the page was in memory already; "
        "harmless.",
        PER_SECOND,
        {"{{kind}}": rate_by("kind", "specops_page_faults_total")},
        right={"minor": PER_SECOND},
        colours={"major": "red"},
        width=12,
        nothing=UNREACHABLE,
    )
    yield curves(
        "Killed for memory, and restarts",
        "Processes that the kernel killed in the service's cgroup, and restarts in the last "
        "hour. Any of them: lower SPECOPS_KV_TOKENS or the weights' size until the memory "
        "panel above stays below its limit.",
        COUNT,
        {
            "killed": now("specops_oom_kills_total"),
            "restarts": f"sum(changes({series('process_start_time_seconds')}[1h]) {ANSWERS})",
        },
        alarm=1,
        width=12,
        nothing=UNREACHABLE,
    )


def _cache() -> Panels:
    yield Row("Does the KV cache suffice?")
    yield curves(
        "Tokens in the KV cache",
        "Tokens of running requests, and those that finished ones left for prompts that begin "
        "alike, against the room for them. Running ones at capacity with requests waiting: "
        "more SPECOPS_KV_TOKENS, SPECOPS_KV_DTYPE=int8, shorter requests, or a larger memory "
        "limit.",
        COUNT,
        {
            "running": now("specops_kv_tokens"),
            "kept": now("specops_kv_kept_tokens"),
            "capacity": now("specops_kv_capacity_tokens"),
        },
        limits=("capacity",),
        nothing=UNREACHABLE,
    )
    yield curves(
        "KV blocks",
        "Blocks of 64 tokens: `used` by running requests, `shared` by several of them; `kept` "
        "from finished ones until their room is needed; `free`. No `free` is fine as long as "
        "some are `kept`. Neither: requests preempt each other, see the next panel. No `shared` "
        "although prompts begin alike: see SPECOPS_PREFIX_CACHE.",
        COUNT,
        {"{{state}}": now_by("state", "specops_kv_blocks", moved=True)},
        nothing=UNREACHABLE,
    )
    yield curves(
        "Preemptions",
        "Requests per second that gave their KV blocks up to others and are computed again "
        "later. It should be 0. Above it for long: the cache is too small for the running "
        "requests; more SPECOPS_KV_TOKENS, SPECOPS_KV_DTYPE=int8, or fewer SPECOPS_SLOTS.",
        PER_SECOND,
        {"preemptions": total("specops_preemptions_total")},
        warn=0.1,
        alarm=1,
        nothing=UNREACHABLE,
    )
    yield curves(
        "Memory of states",
        "What recurrent layers keep (LFM2, Qwen3.5, Granite 4.0 H): `slots` for the running "
        "requests, whatever their length, and `snapshots` from which prompts with the same "
        "beginning continue. Snapshots at their limit are fine, unless many are dropped: see the "
        "next panel.",
        "bytes",
        {
            "{{kind}}": now_by("kind", STATES, 'kind=~"slots|snapshots"') + " > 0",
            "limit of snapshots": now(STATES, 'kind="limit"') + " > 0",
        },
        limits=("limit of snapshots",),
        width=12,
        nothing=NO_STATES,
    )
    yield curves(
        "Snapshots of states",
        "Snapshots per second: `taken` where messages and prompts end, `used` by prompts that "
        "continued from one, `dropped` to make room. Hardly any used and as many dropped as taken: "
        "chats compute their history again; leave snapshots more memory: fewer SPECOPS_SLOTS or "
        "SPECOPS_KV_TOKENS, or a larger limit.",
        PER_SECOND,
        {"{{event}}": rate_by("event", "specops_state_snapshots_total")},
        width=12,
        nothing="none were taken",
    )


def _rest() -> Panels:
    yield Row("Is there enough of the rest?")
    yield curves(
        "Processors",
        "Processors in use, against those that affinity and quota leave. At the limit while "
        "requests wait: the machine is the bottleneck. Far below it while requests wait: "
        "memory or disk is.",
        MEAN,
        {
            "used": total("process_cpu_seconds_total"),
            "granted": now("specops_cpus"),
        },
        limits=("granted",),
        nothing=UNREACHABLE,
        width=6,
    )
    yield curves(
        "Stopped by the processor quota",
        "Seconds of each second for which the quota stopped the service. Above 0.05: more "
        "threads than the quota can feed; set SPECOPS_THREADS, or raise the quota.",
        "s",
        {
            "stopped": f"{time_share('specops_cpu_throttled_seconds_total')} "
            f"and on () {now('specops_cpu_periods_total')} > 0"
        },
        warn=0.05,
        alarm=0.25,
        nothing=NO_QUOTA,
        width=6,
    )
    yield curves(
        "Disk of the models",
        "The volume of SPECOPS_CACHE_DIR: free, and in all. A first start needs room for the "
        "download, its conversion and the weights as the processor wants them, about three "
        "times the model.",
        "bytes",
        {
            "free": now(DISK, FREE, of="min"),
            "total": now(DISK, TOTAL, of="min"),
        },
        limits=("total",),
        nothing=UNREACHABLE,
        width=6,
    )
    yield curves(
        "Model on its way",
        "Share of each model's files that has been downloaded, for presets that are not "
        "bundled. Stuck below 100 %: GET /health says what the service waits for.",
        "percentunit",
        {
            "{{model}}": f"{now_by('model', 'specops_download_bytes')} "
            f"/ ({now_by('model', 'specops_download_total_bytes')} > 0)"
        },
        maximum=1,
        nothing="nothing is downloaded",
        width=6,
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "capacity",
        "Will it fit?",
        "Memory, processor and disk against what the machine grants.",
        (_glance, _memory, _cache, _rest),
    )
