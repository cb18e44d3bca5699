"""Building blocks of the dashboards: panels that cannot be made without a unit and an explanation.

Down, idle and zero look different. Nothing is filled in, so where nothing was measured a panel says
why in words (`nothing`). A tile asks for the value of now alone: of a range, Grafana would show the
last value that there was. A tile is red and says `unreachable` if no instance answers.
"""

from __future__ import annotations

from collections.abc import Mapping
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

from promql import FEW, Queries, or_unreachable

# The variable of each dashboard that names the data source; grafana/board.py has it.
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_TRAFFIC = "no traffic"
UNREACHABLE = "unreachable"
# Units that Grafana does not know; it writes the text after `suffix:` behind the figure.
TOKENS_PER_SECOND, TIMES, PER_SECOND = "suffix:tok/s", "suffix:x", "suffix:/s"
COUNT, MEAN = "none", "short"  # whole numbers, and numbers that are not
TALL = 8  # rows of Grafana's grid
# Where an axis ends if every value is 0. Without it Grafana takes 100, whatever the unit; if it
# were larger, small values would lie at the bottom.
SMALLEST_RANGE = {
    **{"percentunit": 0.01, "s": 0.0001, "bytes": 1024, "reqps": 0.01},
    **{TOKENS_PER_SECOND: 0.1, PER_SECOND: 0.01, TIMES: 0.1, COUNT: 1, MEAN: 0.1},
}
HEAT_COLUMNS = 60


AnyPanel = TypeVar("AnyPanel", stat.Panel, timeseries.Panel, bargauge.Panel, heatmaps.Panel)


def _begun(panel: AnyPanel, title: str, description: str, unit: str, nothing: str) -> AnyPanel:
    """The panel with the shared parts of all panels; it is green until it gets thresholds."""
    return (
        panel.title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(nothing)
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
    nothing: str = NO_TRAFFIC,
) -> stat.Panel:
    """A large number: how it is now."""
    panel = (
        _tile(title, description, unit, width, nothing)
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .text_mode(BigValueTextMode.VALUE)
        .targets(_targets({title.lower(): or_unreachable(expr)}, instant=True))
    )
    if decimals is None and unit == "percentunit":
        decimals = 1
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
        _tile(title, description, COUNT, width, UNREACHABLE)
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


def _tile(title: str, description: str, unit: str, width: int, nothing: str) -> stat.Panel:
    # `last`, since `lastNotNull` leaves out NaN.
    return (
        _begun(stat.Panel(), title, description, unit, nothing)
        .grid_pos(GridPos(h=4, w=width))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False))
        .mappings(_said(nothing))
    )


def _said(nothing: str) -> list[ValueMapping]:
    """The words of a figure: no instance answers for it, nothing was measured, or too little."""
    return [
        _special(SpecialValueMatch.NA_N, UNREACHABLE, "red"),
        _special(SpecialValueMatch.NULL, nothing, "text"),
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
    limits: tuple[str, ...] = (),
    right: Mapping[str, str] | None = None,
    colours: Mapping[str, str] | None = None,
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
    exemplars: str | None = None,
    nothing: str = NO_TRAFFIC,
) -> timeseries.Panel:
    """Lines over time; thresholds and the series named in `limits` are dashed.

    `right` names series of another size, with their units: they have an axis on the right.
    `colours` names series that mean something good or bad. `exemplars` names the series that
    single requests are shown with.
    """
    style = GraphTresholdsStyleMode.DASHED
    if warn is None and alarm is None:
        style = GraphTresholdsStyleMode.OFF
    panel = (
        _begun(timeseries.Panel(), title, description, unit, nothing)
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
    for name in limits:
        panel.override_by_name(name, _LIMIT)
    for name, its_unit in (right or {}).items():
        panel.override_by_name(name, _on_the_right(its_unit))
    for name, colour in (colours or {}).items():
        panel.override_by_name(name, [_colour(colour)])
    return panel.targets(_targets(queries, exemplars=exemplars))


def bars(
    title: str, description: str, label: str, expr: str, *, width: int = 8, nothing: str
) -> bargauge.Panel:
    """A bar for the current value of each series, which is a share, so that bars end at 1.

    The series are named by their `label`.
    """
    queries = {f"{{{{{label}}}}}": or_unreachable(expr, label)}
    return (
        _begun(bargauge.Panel(), title, description, "percentunit", nothing)
        .grid_pos(GridPos(h=TALL, w=width))
        .mappings(_said(nothing))
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
    nothing: str = NO_TRAFFIC,
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
        _begun(heatmaps.Panel(), title, description, unit, nothing)
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
    _colour("red"),
    DynamicConfigValue(id_val="custom.lineWidth", value=1),
    DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]}),
    DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
]
