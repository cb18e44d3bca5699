"""Building blocks of the dashboards: panels that cannot be made without a unit and an explanation.

Down, idle and zero look different. Nothing is filled in, so where nothing was measured a panel says
why in words (`empty_when`). A tile asks for the value of now alone: of a range, Grafana would show
the last value that there was. A tile is red and says `unreachable` if no instance answers. What has
one name has one colour, whichever panel it is on (`COLOURS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.builders import heatmap as heatmaps
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphTresholdsStyleMode,
    HeatmapCellLayout,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    GridPos,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from empty import Empty
from promql import FEW, NEWEST, Queries, or_unreachable

# The variable of each dashboard that names the data source; grafana/board.py has it.
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Units that Grafana does not know; it writes the text after `suffix:` behind the figure.
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
# Of the legend `endpoint status`; of two that match the later one counts.
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
# Where an axis ends if every value is 0. Without it Grafana takes 100, whatever the unit; if it
# were larger, small values would lie at the bottom.
SMALLEST_RANGE = {
    **{"percentunit": 0.01, "s": 0.0001, "bytes": 1024, "reqps": 0.01},
    **{TOKENS_PER_SECOND: 0.1, PER_SECOND: 0.01, TIMES: 0.1, COUNT: 1, MEAN: 0.1},
}
HEAT_COLUMNS = 60


AnyPanel = TypeVar("AnyPanel", stat.Panel, timeseries.Panel, bargauge.Panel, heatmaps.Panel)


def _begun(panel: AnyPanel, title: str, description: str, unit: str, empty_when: Empty) -> AnyPanel:
    """The panel with the shared parts of all panels; it is green until it gets thresholds."""
    return (
        panel.title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(empty_when)
        .thresholds(thresholds(None, None))
    )


def thresholds(
    warn: float | None, alarm: float | None, *, low_is_bad: bool = False
) -> dashboard.ThresholdsConfig:
    """Green, yellow from `warn`, red from `alarm`; below them if low is bad."""
    if low_is_bad:
        named = [(None, "yellow"), (warn, "green")]
        if alarm is not None:
            named = [(None, "red"), (alarm, "yellow"), (warn, "green")]
    else:
        steps = ((warn, "yellow"), (alarm, "red"))
        named = [(None, "green"), *(step for step in steps if step[0] is not None)]
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=colour) for value, colour in named])
    )


def _targets(
    queries: Queries, *, instant: bool = False, exemplars: str | None = None
) -> list[prometheus.Dataquery]:
    """The queries; that with the legend `exemplars` asks for single requests beside it."""
    targets = []
    for ref, (legend, expr) in zip(ascii_uppercase, queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(ref).datasource(DATASOURCE).expr(expr)
        target = (target.instant() if instant else target.range()).legend_format(legend)
        targets.append(target.exemplar(legend == exemplars))
    return targets


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
) -> stat.Panel:
    """A large number: how it is now."""
    panel = (
        _tile(title, description, unit, width, empty_when)
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .text_mode(BigValueTextMode.VALUE)
        .targets(_targets({title.lower(): or_unreachable(expr)}, instant=True))
    )
    if decimals is None and unit == "percentunit":
        decimals = 1
    return panel if decimals is None else panel.decimals(decimals)


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
) -> stat.Panel:
    """A third of the width: how it is now, above the curve of the last fifteen minutes.

    `units` has one for each of the queries.
    """
    names = "|".join(queries)
    unit, *others = units
    asked = {name: or_unreachable(expr) + NEWEST for name, expr in queries.items()}
    panel = (
        _tile(title, description, unit, 8, Empty.IDLE)
        .grid_pos(GridPos(h=7, w=8))
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .min(0)
        .graph_mode(BigValueGraphMode.AREA)
        .text_mode(BigValueTextMode.VALUE_AND_NAME if others else BigValueTextMode.VALUE)
        .reduce_options(
            common.ReduceDataOptions().calcs(["last"]).values(False).fields(f"/^({names})$/")
        )
        .time_from("15m")
        # A series has no point where nothing was measured, and `last` would be the last one that
        # there was. Joined with a clock it has an empty one.
        .targets(_targets({**asked, "clock": "vector(1)"}))
        .transformations(
            [
                DataTransformerConfig(
                    id_val="joinByField", options={"byField": "Time", "mode": "outer"}
                )
            ]
        )
    )
    for name, its_unit in zip(list(queries)[1:], others, strict=True):
        panel.override_by_name(name, [DynamicConfigValue("unit", its_unit)])
    return panel if decimals is None else panel.decimals(decimals)


def words(
    title: str,
    description: str,
    queries: Queries,
    colours: Mapping[str, str],
    *,
    width: int,
    other: str,
    counted: bool = False,
) -> stat.Panel:
    """The legends of the series that there are now, in their colours; with `counted`, values too.

    One of the queries must have a value, or the tile is blank. `other` is the colour of a legend
    without one.
    """
    mode = BigValueTextMode.VALUE_AND_NAME if counted else BigValueTextMode.NAME
    panel = (
        _tile(title, description, COUNT, width, Empty.UNREACHABLE)
        .thresholds(
            dashboard.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(value=None, color=other)])
        )
        .text_mode(mode)
        .color_mode(BigValueColorMode.BACKGROUND if counted else BigValueColorMode.VALUE)
        .targets(_targets(queries, instant=True))
    )
    for name, colour in colours.items():
        panel.override_by_name(name, [_colour(colour)])
    return panel


def _tile(title: str, description: str, unit: str, width: int, empty_when: Empty) -> stat.Panel:
    # `last`, since `lastNotNull` leaves out NaN.
    return (
        _begun(stat.Panel(), title, description, unit, empty_when)
        .grid_pos(GridPos(h=4, w=width))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False))
        .mappings(_said(empty_when))
    )


def _said(empty_when: Empty) -> list[ValueMapping]:
    """The words of a figure: no instance answers for it, nothing was measured, or too little."""
    return [
        _special(SpecialValueMatch.NA_N, Empty.UNREACHABLE, "red"),
        _special(SpecialValueMatch.NULL, empty_when, "text"),
        ValueMap(options={str(FEW): ValueMappingResult(text="few", color="text")}),
    ]


def _special(match: SpecialValueMatch, text: str, colour: str) -> SpecialValueMap:
    result = ValueMappingResult(text=text, color=colour)
    return SpecialValueMap(options=DashboardSpecialValueMapOptions(match=match, result=result))


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
) -> timeseries.Panel:
    """Lines over time, with the last and the greatest value of each; thresholds are dashed.

    `limits` maps a dashed series to the one that it limits, whose colour it has. `right` names
    series of another size, with their units: they have an axis on the right. `named` are the names
    that a legend such as {{kind}} stands for, so that each has its colour; `matching` has the
    colours of names by a pattern. `exemplars` names the series that single requests are shown with.
    """
    limits = limits or {}
    style = GraphTresholdsStyleMode.DASHED
    if warn is None and alarm is None:
        style = GraphTresholdsStyleMode.OFF
    panel = (
        _begun(timeseries.Panel(), title, description, unit, empty_when)
        .grid_pos(GridPos(h=TALL, w=width))
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .min(0)
        .axis_soft_max(SMALLEST_RANGE[unit])
        # A stack has no lines: the line of a series at 0 would look like the series below it.
        .line_width(0 if stacked else 1)
        .fill_opacity(60 if stacked else 8)
        .show_points(VisibilityMode.NEVER)
        .thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["last", "max"])
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
    )
    if unit == COUNT:
        panel.decimals(0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel.max(maximum)
    for name in dict.fromkeys([*queries, *named]):
        colour = COLOURS.get(limits.get(name, name))
        changes = [] if colour is None else [_colour(colour)]
        changes += _LIMIT if name in limits else []
        changes += _on_the_right(right[name]) if right and name in right else []
        if changes:
            panel.override_by_name(name, changes)
    for pattern, colour in (matching or {}).items():
        panel.override_by_regexp(pattern, [_colour(colour)])
    return panel.targets(_targets(queries, exemplars=exemplars))


def bars(
    title: str,
    description: str,
    label: str,
    name: str,
    expr: str,
    *,
    width: int = 8,
    empty_when: Empty,
) -> bargauge.Panel:
    """A bar for the current value of each series, which is a share, so that bars end at 1.

    `name` says what a bar is, with its unit; `$1` in it stands for the label's value.
    """
    named = f'label_replace({expr}, "{label}", "{name}", "{label}", "(.+)")'
    queries = {f"{{{{{label}}}}}": or_unreachable(named, label)}
    return (
        _begun(bargauge.Panel(), title, description, "percentunit", empty_when)
        .grid_pos(GridPos(h=TALL, w=width))
        .mappings(_said(empty_when))
        .min(0)
        .max(1)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .show_unfilled(False)  # without a value it would be a grey box
        .reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False))
        .targets(_targets(queries, instant=True))
    )


def heat(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    width: int = 12,
    empty_when: Empty = Empty.IDLE,
) -> heatmaps.Panel:
    """Number of observations in each bucket, over time; columns are wide enough to be seen."""
    target = (
        prometheus.Dataquery()
        .ref_id("A")
        .datasource(DATASOURCE)
        .expr(expr)
        .range()
        .format(PromQueryFormat.HEATMAP)
        .legend_format("{{le}}")
    )
    return (
        _begun(heatmaps.Panel(), title, description, unit, empty_when)
        .grid_pos(GridPos(h=TALL, w=width))
        .max_data_points(HEAT_COLUMNS)
        .calculate(False)
        .rows_frame(heatmaps.RowsHeatmapOptions().layout(HeatmapCellLayout.LE))
        .y_axis(heatmaps.YAxisConfig().unit(unit))
        .color(
            heatmaps.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .exponent(0.5)
            .steps(64)
        )
        .targets([target])
    )


def _colour(name: str) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": name})


def _on_the_right(unit: str) -> list[DynamicConfigValue]:
    return [
        DynamicConfigValue("unit", unit),
        DynamicConfigValue(id_val="custom.axisSoftMax", value=SMALLEST_RANGE.get(unit, 1)),
        DynamicConfigValue(id_val="custom.lineWidth", value=1),
        DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
        DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
    ]


_LIMIT = [
    DynamicConfigValue(id_val="custom.lineWidth", value=1),
    DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]}),
    DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
]
