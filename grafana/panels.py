"""Building blocks of the dashboards: panels that cannot be made without a unit and an explanation.

Every panel has thresholds (its values are green if no other colour is given) and a text for the
case that there is no value.
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
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from promql import Queries

DATASOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
NO_VALUE = "no traffic yet"
# Units that Grafana does not know; it writes the text after `suffix:` behind the figure.
TOKENS_PER_SECOND, TIMES, PER_SECOND = "suffix:tok/s", "suffix:x", "suffix:/s"
TALL = 8  # rows of Grafana's grid
# Nothing is red while nothing happens: low figures are judged only above this value.
IDLE = 0.001


AnyPanel = TypeVar("AnyPanel", stat.Panel, timeseries.Panel, bargauge.Panel, heatmaps.Panel)


def _begun(panel: AnyPanel, title: str, description: str, unit: str, place: GridPos) -> AnyPanel:
    """The panel with the shared parts of all panels; it is green until it gets thresholds."""
    return (
        panel.title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(NO_VALUE)
        .grid_pos(place)
        .thresholds(thresholds(None, None))
    )


def thresholds(
    warn: float | None, alarm: float | None, *, low_is_bad: bool = False
) -> dashboard.ThresholdsConfig:
    """Green, yellow from `warn`, red from `alarm`; the other way round if low is bad."""
    steps = [Threshold(value=None, color="green")]
    if low_is_bad:
        if alarm is not None:
            steps.append(Threshold(value=IDLE, color="red"))
        if warn is not None:
            steps.append(Threshold(value=IDLE if alarm is None else alarm, color="yellow"))
            steps.append(Threshold(value=warn, color="green"))
    else:
        named = ((warn, "yellow"), (alarm, "red"))
        steps += [Threshold(value=value, color=name) for value, name in named if value is not None]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _targets(queries: Queries, *, instant: bool = False) -> list[prometheus.Dataquery]:
    targets = []
    for ref, (legend, expr) in zip(ascii_uppercase, queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(ref).datasource(DATASOURCE).expr(expr)
        targets.append((target.instant() if instant else target.range()).legend_format(legend))
    return targets


def big_number(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
    decimals: int | None = None,
) -> stat.Panel:
    """A large number with its curve."""
    panel = (
        _stat(title, description, unit)
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .graph_mode(BigValueGraphMode.AREA)
        .text_mode(BigValueTextMode.VALUE)
        .targets(_targets({title.lower(): expr}))
    )
    return panel if decimals is None else panel.decimals(decimals)


def label_now(
    title: str, description: str, queries: Queries, *, warn: float, alarm: float
) -> stat.Panel:
    """The legend of the current series in large letters; its value decides the colour."""
    return (
        _stat(title, description, "none")
        .thresholds(thresholds(warn, alarm))
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.NAME)
        .targets(_targets(queries, instant=True))
    )


def _stat(title: str, description: str, unit: str) -> stat.Panel:
    panel = _begun(stat.Panel(), title, description, unit, GridPos(h=4, w=4))
    return panel.color_mode(BigValueColorMode.VALUE).reduce_options(_last())


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


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
) -> timeseries.Panel:
    """Lines over time; thresholds and the series named in `limits` are dashed.

    `right` names series of another size, with their units: they have an axis on the right.
    `colours` names series that mean something good or bad.
    """
    style = GraphTresholdsStyleMode.DASHED
    if warn is None and alarm is None:
        style = GraphTresholdsStyleMode.OFF
    panel = (
        _begun(timeseries.Panel(), title, description, unit, GridPos(h=TALL, w=width))
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .min(0)
        # A stack has no lines: the line of a series at 0 would look like the series below it.
        .line_width(0 if stacked else 1)
        .fill_opacity(60 if stacked else 8)
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
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel.max(maximum)
    for name in limits:
        panel.override_by_name(name, _LIMIT)
    for name, its_unit in (right or {}).items():
        panel.override_by_name(name, [DynamicConfigValue("unit", its_unit), *_RIGHT])
    for name, colour in (colours or {}).items():
        panel.override_by_name(name, [_colour(colour)])
    return panel.targets(_targets(queries))


def bars(
    title: str, description: str, unit: str, queries: Queries, *, width: int = 8
) -> bargauge.Panel:
    """A bar for the current value of each series; the values are shares, so bars end at 1."""
    return (
        _begun(bargauge.Panel(), title, description, unit, GridPos(h=TALL, w=width))
        .min(0)
        .max(1)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .reduce_options(_last())
        .targets(_targets(queries))
    )


def heat(title: str, description: str, unit: str, expr: str, *, width: int = 12) -> heatmaps.Panel:
    """Number of observations in each bucket, over time."""
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
        _begun(heatmaps.Panel(), title, description, unit, GridPos(h=TALL, w=width))
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
        .show_tooltip()
        .targets([target])
    )


def _colour(name: str) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": name})


_LIMIT = [
    _colour("red"),
    DynamicConfigValue(id_val="custom.lineWidth", value=1),
    DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]}),
    DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
]
_RIGHT = [
    DynamicConfigValue(id_val="custom.lineWidth", value=1),
    DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
    DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
]
