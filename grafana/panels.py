"""Building blocks of the dashboards: no panel can be made without a unit and an explanation.

Down, idle and zero look different. No value is filled in: where nothing was measured, a panel says
why in a word (`empty_when`). A tile queries the current value only: of a range, Grafana would show
the last value, however old. A tile is red and says `unreachable` if no instance answers. A name has
the same colour on every panel (`COLOURS`).
"""

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from empty import Empty
from promql import FEW, GONE, NEWEST, Queries, or_unreachable

Json = dict[str, Any]  # in Grafana's schema; tests compare all of it with Grafana's types

# The variable of each dashboard that names the data source; grafana/board.py has it.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Units that Grafana does not have; it writes the text after `suffix:` behind the figure.
TOKENS_PER_SECOND, TIMES, PER_SECOND = "suffix:tok/s", "suffix:x", "suffix:/s"
COUNT, MEAN = "none", "short"  # whole numbers, and numbers that are not
TALL = 9  # rows of Grafana's grid
QUANTILES = {"p50": "green", "p95": "yellow", "p99": "orange"}
PASSES = {"prefill": "blue", "mixed": "purple", "decode": "green", "verify": "yellow"}
MEMORY = {"anon": "orange", "file": "blue"}
ENDS = {
    **{"stop": "green", "length": "semi-dark-green", "grammar": "light-green"},
    **{"cancelled": "yellow", "timeout": "orange", "error": "red", "refused": "purple"},
}
REASONS = {
    **{"queue_full": "purple", "kv_tokens": "light-purple", "memory": "dark-purple"},
    **{"pressure": "semi-dark-purple", "not_ready": "orange"},
}
# Patterns of the legend `endpoint status`; if several match, the last one counts.
STATUSES = {
    **{"/ 2..$/": "green", "/ 4..$/": "orange", "/ 429$/": "purple", "/ 499$/": "yellow"},
    **{"/ 5..$/": "red", "/ 503$/": "semi-dark-orange"},
}
DRAFTERS = {
    **{"suffix": "blue", "cascade": "purple", "draft": "orange", "head": "yellow"},
    "grammar": "light-green",
}
FOUND = {name: DRAFTERS[name] for name in ("draft", "head", "grammar")} | {
    **{"text": "green", "history": "blue", "table": "purple"},
}
COLOURS = QUANTILES | PASSES | MEMORY | ENDS | REASONS | DRAFTERS | FOUND | {
    **{"generated": "green", "prompt": "blue", "wasted": "red", "decoded": "green"},
    **{"verified": "yellow", "accepted": "green", "drafting": "orange"},
    **{"queue": "yellow", "generating": "green", "computed": "blue", "known": "green"},
    **{"running": "green", "waiting": "yellow", "kept": "blue", "used": "green"},
    **{"all passes": "text", "offered": "blue", "requests per pass": "orange"},
    **{"mean acceptance length": "blue"},
    **{"shared": "purple", "free": "text", "swap": "purple", "major": "red", "minor": "blue"},
    **{"some": "yellow", "full": "red", "killed": "red", "restarts": "yellow"},
    **{"now": "yellow", "last minute": "green", "of all tokens": "green"},
    **{"tokens per pass": "green", "gain over plain decoding": "purple"},
    **{"5m": "green", "30m": "yellow", "1h": "blue", "6h": "orange"},
}  # fmt: skip
# The end of an axis whose values are all 0. Without it Grafana uses 100, whatever the unit; with a
# larger one, small values would lie at the bottom.
MIN_RANGE = {
    **{"percentunit": 0.01, "s": 0.0001, "bytes": 1024, "reqps": 0.01},
    **{TOKENS_PER_SECOND: 0.1, PER_SECOND: 0.01, TIMES: 0.1, COUNT: 1, MEAN: 0.1},
}
HEAT_COLUMNS = 60
_LAST = {"calcs": ["last"], "values": False}  # empty if the last point is


def thresholds(warn: float | None, alarm: float | None, *, low_is_bad: bool = False) -> Json:
    """Green, yellow from `warn`, red from `alarm`; below them if low is bad."""
    if low_is_bad:
        named = [(None, "yellow"), (warn, "green")]
        if alarm is not None:
            named = [(None, "red"), (alarm, "yellow"), (warn, "green")]
    else:
        steps = ((warn, "yellow"), (alarm, "red"))
        named = [(None, "green"), *(step for step in steps if step[0] is not None)]
    return _coloured(*named)


def _coloured(*steps: tuple[float | None, str]) -> Json:
    return {"mode": "absolute", "steps": [{"value": at, "color": name} for at, name in steps]}


def _panel(
    kind: str,
    title: str,
    description: str,
    *,
    size: tuple[int, int],
    field: Mapping[str, Any],
    options: Json,
    targets: Sequence[Json],
    overrides: Sequence[Json] = (),
) -> Json:
    """A panel of a width and a height; the field's configuration leaves out what is None."""
    width, height = size
    defaults = {"thresholds": thresholds(None, None), **field}
    given = {name: value for name, value in defaults.items() if value is not None}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"h": height, "w": width},
        "fieldConfig": {"defaults": given, "overrides": [*overrides]},
        "options": options,
        "targets": [*targets],
    }


def _targets(
    queries: Queries, *, instant: bool = False, exemplars: str | None = None
) -> list[Json]:
    """The queries; the one with the legend `exemplars` also fetches single requests."""
    kind = "instant" if instant else "range"
    return [
        {"refId": ref, "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, kind: True}
        | ({"exemplar": True} if legend == exemplars else {})
        for ref, (legend, expr) in zip(ascii_uppercase, queries.items(), strict=False)
    ]


def tile(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    width: int = 3,
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
    decimals: int | None = None,
    empty_when: Empty = Empty.IDLE,
) -> Json:
    """A large number: the current value."""
    if decimals is None and unit == "percentunit":
        decimals = 1
    field = {
        **_said(empty_when, unit),
        "decimals": decimals,
        "thresholds": thresholds(warn, alarm, low_is_bad=low_is_bad),
    }
    targets = _targets({title.lower(): or_unreachable(expr)}, instant=True)
    return _panel(
        "stat",
        title,
        description,
        size=(width, 4),
        field=field,
        options=_figure("value"),
        targets=targets,
    )


def headline(
    title: str,
    description: str,
    queries: Queries,
    units: Sequence[str],
    *,
    decimals: int | None = None,
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
) -> Json:
    """A third of the width: the current value, above its curve over the last fifteen minutes.

    `units` has one unit per query.
    """
    unit, *others = units
    asked = {name: or_unreachable(expr) + NEWEST for name, expr in queries.items()}
    # Without a measurement a series has no point, and `last` would be an old one. Joined with a
    # clock, it has an empty point now, and a gap where there was none.
    asked["clock"] = f"vector(1){NEWEST}"
    field = {
        **_said(Empty.IDLE, unit),
        "decimals": decimals,
        "min": 0,
        "thresholds": thresholds(warn, alarm, low_is_bad=low_is_bad),
    }
    options = _figure("value_and_name" if others else "value", graphMode="area")
    options["reduceOptions"] = {**_LAST, "fields": f"/^({'|'.join(queries)})$/"}
    overrides = [
        _override(name, [{"id": "unit", "value": its_unit}])
        for name, its_unit in zip([*queries][1:], others, strict=True)
    ]
    join = {"id": "joinByField", "options": {"byField": "Time", "mode": "outer"}}
    panel = _panel(
        "stat",
        title,
        description,
        size=(8, 7),
        field=field,
        options=options,
        targets=_targets(asked),
        overrides=overrides,
    )
    return {**panel, "timeFrom": "15m", "transformations": [join]}


def words(
    title: str,
    description: str,
    queries: Queries,
    colours: Mapping[str, str],
    *,
    width: int,
    other: str,
    counted: bool = False,
) -> Json:
    """The legends of the current series, in their colours; with `counted`, their values too.

    The tile is blank unless one of the queries has a value. Legends not among `colours` have the
    colour `other`.
    """
    field = {**_said(Empty.UNREACHABLE, COUNT), "thresholds": _coloured((None, other))}
    options = _figure("name")
    if counted:
        options = _figure("value_and_name", colorMode="background")
    overrides = [_override(name, [_colour(colour)]) for name, colour in colours.items()]
    return _panel(
        "stat",
        title,
        description,
        size=(width, 4),
        field=field,
        options=options,
        targets=_targets(queries, instant=True),
        overrides=overrides,
    )


def _figure(text: str, **more: str) -> Json:
    """The options of a tile."""
    return {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": _LAST,
        "textMode": text,
        **more,
    }


def _said(empty_when: Empty, unit: str) -> Json:
    """The words shown in place of a figure: unreachable, nothing measured, or too few events."""
    nothing = {"match": "null", "result": {"text": empty_when, "color": "text"}}
    instead = {
        str(FEW): {"text": "few", "color": "text"},
        str(GONE): {"text": Empty.UNREACHABLE, "color": "red"},
    }
    mappings = [{"type": "special", "options": nothing}, {"type": "value", "options": instead}]
    return {"unit": unit, "noValue": empty_when, "mappings": mappings}


def curves(
    title: str,
    description: str,
    unit: str,
    queries: Queries,
    *,
    width: int = 8,
    stacked: bool = False,
    maximum: float | None = None,
    limits: Mapping[str, str] | None = None,
    right: Mapping[str, str] | None = None,
    named: Iterable[str] = (),
    matching: Mapping[str, str] | None = None,
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
    exemplars: str | None = None,
    empty_when: Empty = Empty.IDLE,
) -> Json:
    """Lines over time, with the last and the greatest value of each; thresholds are dashed.

    `limits` maps a dashed series to the one that it limits, whose colour it shares. `right` maps
    series of another magnitude to their units: they get an axis on the right. `named` lists the
    names that a legend such as {{kind}} stands for, so that each gets its colour; `matching` maps
    patterns of names to colours. `exemplars` names the series shown with single requests.
    """
    limits, right = limits or {}, right or {}
    custom: Json = {
        "axisSoftMax": MIN_RANGE[unit],
        # A stack has no lines: the line of a series at 0 would look like the series below it.
        "lineWidth": 0 if stacked else 1,
        "fillOpacity": 60 if stacked else 8,
        "showPoints": "never",
        "thresholdsStyle": {"mode": "off" if warn is None and alarm is None else "dashed"},
    }
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    field = {
        **{"unit": unit, "noValue": empty_when, "custom": custom, "min": 0, "max": maximum},
        "decimals": 0 if unit == COUNT else None,
        "thresholds": thresholds(warn, alarm, low_is_bad=low_is_bad),
    }
    overrides = []
    for name in dict.fromkeys([*queries, *named]):
        colour = COLOURS.get(limits.get(name, name))
        changes = [] if colour is None else [_colour(colour)]
        changes += _LIMIT if name in limits else []
        changes += _on_the_right(right[name]) if name in right else []
        if changes:
            overrides.append(_override(name, changes))
    for pattern, colour in (matching or {}).items():
        overrides.append(_override(pattern, [_colour(colour)], "byRegexp"))
    legend = {"displayMode": "list", "placement": "bottom", "calcs": ["last", "max"]}
    options: Json = {
        "legend": {**legend, "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel(
        "timeseries",
        title,
        description,
        size=(width, TALL),
        field=field,
        options=options,
        targets=_targets(queries, exemplars=exemplars),
        overrides=overrides,
    )


def bars(
    title: str,
    description: str,
    label: str,
    name: str,
    expr: str,
    *,
    width: int = 8,
    empty_when: Empty,
) -> Json:
    """A bar for the current value of each series; values are shares, so bars end at 1.

    `name` labels each bar, with `$1` for the value of `label`.
    """
    named = f'label_replace({expr}, "{label}", "{name}", "{label}", "(.+)")'
    targets = _targets({f"{{{{{label}}}}}": or_unreachable(named, label)}, instant=True)
    options = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": _LAST,
        "showUnfilled": False,  # it would draw a grey box without a value
        "minVizHeight": 10,
        "minVizWidth": 0,
        "valueMode": "color",
    }
    field = {**_said(empty_when, "percentunit"), "min": 0, "max": 1}
    return _panel(
        "bargauge",
        title,
        description,
        size=(width, TALL),
        field=field,
        options=options,
        targets=targets,
    )


def heat(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    width: int = 12,
    empty_when: Empty = Empty.IDLE,
) -> Json:
    """Number of observations in each bucket, over time, in columns wide enough to see."""
    (target,) = _targets({"{{le}}": expr})
    colour = {"mode": "scheme", "scheme": "Oranges", "exponent": 0.5, "steps": 64}
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {**colour, "fill": "", "reverse": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "le"},
        "showValue": "auto",
        "tooltip": {"mode": "single"},
        "yAxis": {"unit": unit},
    }
    panel = _panel(
        "heatmap",
        title,
        description,
        size=(width, TALL),
        field={"unit": unit, "noValue": empty_when},
        options=options,
        targets=[{**target, "format": "heatmap"}],
    )
    return {**panel, "maxDataPoints": HEAT_COLUMNS}


def _override(name: str, properties: list[Json], by: str = "byName") -> Json:
    return {"matcher": {"id": by, "options": name}, "properties": properties}


def _colour(name: str) -> Json:
    return {"id": "color", "value": {"mode": "fixed", "fixedColor": name}}


def _custom(**values: Any) -> list[Json]:
    return [{"id": f"custom.{name}", "value": value} for name, value in values.items()]


_LINE: Json = {"lineWidth": 1, "fillOpacity": 0, "stacking": {"mode": "none"}}
_LIMIT = _custom(**_LINE, lineStyle={"fill": "dash", "dash": [8, 8]})


def _on_the_right(unit: str) -> list[Json]:
    own = _custom(**_LINE, axisPlacement="right", axisSoftMax=MIN_RANGE.get(unit, 1))
    return [{"id": "unit", "value": unit}, *own]
