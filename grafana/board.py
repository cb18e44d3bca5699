"""The shared parts of all dashboards: title, state, links, variables, annotations, layout."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from empty import Empty
from panels import DATASOURCE, MEMORY, Json, curves, tile, words
from promql import ANSWERS, INSTANCES, now, now_by, part, series, states

TAG = "specops"
WIDTH = 24  # columns of Grafana's grid
Panels = Iterator[Json]  # rows and panels, in order

STATE_COLOURS = {"ready": "green", "idle": "blue", "failed": "red", Empty.UNREACHABLE: "red"}


def board(
    uid: str, question: str, description: str, sections: Iterable[Callable[[], Panels]]
) -> Json:
    """Build one dashboard, titled with the product's name and the `question` that it answers.

    It can be imported into another Grafana: data source and job are variables, whose defaults are
    the provisioned ones.

    Args:
        uid: the last part of the dashboard's id.
        question: the question, for the title.
        description: one sentence for Grafana's list.
        sections: each yields a row, then its panels, in order.
    """
    panels = []
    for section in sections:
        first, *others = section()
        if first.get("collapsed"):
            first["panels"], others = others, []  # a folded row contains its panels
        panels += [first, *others]
    _place(panels, 0, count(1))
    return {
        "id": None,  # Grafana's own number; a provisioned dashboard has none
        "uid": f"{TAG}-{uid}",
        "title": f"Spec-Ops: {question}",
        "description": description,
        "tags": [TAG],
        "editable": False,
        "schemaVersion": 36,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,  # a cross on all panels
        "links": [_the_others()],
        "templating": {"list": [*_variables()]},
        "annotations": {"list": [*_annotations()]},
        "panels": panels,
    }


def _place(panels: Iterable[Json], top: int, numbers: Iterator[int]) -> None:
    """Number the panels and lay them out from left to right, from `top` on.

    The panels of a folded row get places below it, but take no room.
    """
    left, height = 0, 0
    for panel in panels:
        grid = panel["gridPos"]
        if left + grid["w"] > WIDTH:
            left, top, height = 0, top + height, 0
        grid["x"], grid["y"] = left, top
        left, height = left + grid["w"], max(height, grid["h"])
        panel["id"] = next(numbers)
        _place(panel.get("panels", ()), top + 1, numbers)


def row(title: str, *, folded: bool = False) -> Json:
    """The title of the panels below; `folded` where most services have no data for them."""
    place = {"h": 1, "w": WIDTH}
    return {"type": "row", "title": title, "collapsed": folded, "gridPos": place, "panels": []}


def killed() -> str:
    """Processes of the service that the kernel killed for memory in the last hour."""
    return f"sum(increase({series('specops_oom_kills_total')}[1h]) {ANSWERS})"


def state(width: int = 3, *, title: str = "State", counted: bool = False) -> Json:
    """The service's state; with `counted`, the number of replicas in each state."""
    return words(
        title,
        "`ready`: the model answers requests. `idle`: it is ready, but no request came in the last "
        "minute. `unreachable`: Prometheus cannot scrape the API, so no panel has new data; is it "
        "running? Prometheus' page /targets says why. `failed`: GET /health says why. All other "
        "states lead to `ready`. With several replicas, it shows each of their states.",
        states(),
        STATE_COLOURS,
        width=width,
        other="yellow",
        counted=counted,
    )


def memory_of_the_cap(width: int = 3) -> Json:
    """How close the service is to being killed for memory."""
    return tile(
        "Memory of the cap",
        "Anonymous memory, which the kernel cannot drop, as a share of the limit. Above 90 % the "
        "kernel swaps, or kills the service: choose a smaller KV cache (SPECOPS_KV_TOKENS, "
        "SPECOPS_KV_DTYPE=int8) or smaller weights (SPECOPS_QUANT).",
        "percentunit",
        part("specops_memory_bytes", 'kind="anon"', 'kind="limit"'),
        width=width,
        warn=0.75,
        alarm=0.9,
        empty_when=Empty.UNREACHABLE,
    )


def memory_against_the_cap() -> Json:
    """The same over time, with the page cache."""
    return curves(
        "Memory against the cap",
        "`anon` cannot be dropped and must stay below the limit. `file` is page cache, which holds "
        "the weights; the kernel drops it when it needs the memory, and reads it again later. A "
        "total near the limit is no problem by itself.",
        "bytes",
        {
            "{{kind}}": now_by("kind", "specops_memory_bytes", 'kind=~"anon|file"'),
            "limit": now("specops_memory_bytes", 'kind="limit"'),
        },
        limits={"limit": "anon"},
        named=MEMORY,
        stacked=True,
        empty_when=Empty.UNREACHABLE,
    )


def _the_others() -> Json:
    return {
        "type": "dashboards",
        "title": "Questions",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "tooltip": "the other dashboards, with the same time range and variables",
        **{"icon": "", "targetBlank": False, "url": ""},
    }


def _variables() -> Iterator[Json]:
    def chosen(text: object, value: object) -> Json:
        return {"current": {"selected": True, "text": text, "value": value}}

    def query(name: str, label: str, description: str, query: str, **more: object) -> Json:
        return {
            **{"type": "query", "name": name, "label": label, "description": description},
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # whenever the time range changes
            "sort": 1,  # alphabetically
            **more,
        }

    yield {
        **{"type": "datasource", "name": "datasource", "label": "Data source"},
        "description": "the Prometheus that scrapes the API",
        "query": "prometheus",
        **chosen("Prometheus", "prometheus"),
    }
    several = {"multi": True, "includeAll": True, **chosen(["All"], ["$__all"])}
    jobs = "label_values(specops_model_state, job)"
    yield query("job", "Job", "Prometheus' name for the API", jobs, **chosen("specops", "specops"))
    models = 'label_values(specops_model_info{job=~"$job"}, name)'
    yield query("model", "Model", "what is served", models, **several, allValue=".*")
    # Only the instances that serve the chosen models: so the model filters every panel.
    instances = 'label_values(specops_model_info{job=~"$job", name=~"$model"}, instance)'
    yield query("instance", "Instance", "which API", instances, **several)


def _begins(expr: str, selector: str) -> str:
    """Where the expression begins to have a value: Grafana then draws a line there, instead of a
    region that tints every panel. `selector` is the only series that the expression reads.
    """
    return f"{expr} unless {expr.replace(selector, f'{selector} offset $__interval')}"


def _annotations() -> Iterator[Json]:
    """The marks at the time axis; Grafana fills in {{label}}."""
    load = f"{series('specops_load_test_requests_total')}[$__rate_interval]"
    up, firing = f"up{{{INSTANCES}}}", 'ALERTS{alertstate="firing"}'
    none = f'label_replace(absent({up}), "instance", "the API", "", "")'

    def mark(name: str, colour: str, of: str, text: str, expr: str, **more: object) -> Json:
        return {
            **{"name": name, "datasource": DATASOURCE, "enable": True, "iconColor": colour},
            **{"titleFormat": f"{name}: {{{{{of}}}}}", "textFormat": text},
            # Grafana's own step is a minute: too long for an outage.
            "target": {"expr": expr, "refId": "Anno", "interval": "5s"},
            **more,
        }

    # Grafana marks where the value is above 0, or with useValueForTime the time that the value is.
    yield mark(
        *("Unreachable", "red", "instance", "Prometheus cannot scrape this API."),
        _begins(f"(1 - {up} > 0 or {none})", up),
    )
    yield mark(
        *("Alert", "orange", "alertname", "Prometheus' page /alerts says what to do."),
        _begins(f"(max by (alertname) ({firing}))", firing),
    )
    yield mark(
        *("Ready", "green", "instance", "The service has started, and its model is ready."),
        f"({series('specops_model_ready_timestamp_seconds')} > 0) * 1000",
        useValueForTime=True,
    )
    yield mark(
        *("Load test", "blue", "shape", "Locust began a load test of this shape."),
        _begins(f"(sum by (shape) (increase({load})) > 0)", load),
    )
