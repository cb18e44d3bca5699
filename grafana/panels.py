"""Building blocks of the dashboards: panels that cannot be made without a unit and an explanation.

Every panel has thresholds (its values are green where no other colour is asked for) and words for
the case that there is nothing to show.
"""

from __future__ import annotations

from string import ascii_uppercase

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
# Nothing is red while nothing happens: a low figure is judged only where it is above this.
IDLE = 0.001


def thresholds(
    warn: float | None, alarm: float | None, *, low_is_bad: bool = False
) -> dashboard.ThresholdsConfig:
    """Green, yellow from `warn`, red from `alarm`; the other way round where low is bad."""
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
    """A number that answers at a glance."""
    panel = (
        _stat(title, description)
        .unit(unit)
        .no_value(NO_VALUE)
        .graph_mode(BigValueGraphMode.AREA)
        .text_mode(BigValueTextMode.VALUE)
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
        .targets(_targets({title.lower(): expr}))
    )
    return panel if decimals is None else panel.decimals(decimals)


def label_now(title: str, description: str, queries: Queries, *, otherwise: str) -> stat.Panel:
    """The legend of the series that exists now, in large letters; `otherwise` if there is none."""
    return (
        _stat(title, description)
        .unit("none")
        .no_value(otherwise)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.NAME)
        .thresholds(thresholds(None, None))
        .targets(_targets(queries, instant=True))
    )


def _stat(title: str, description: str) -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .grid_pos(GridPos(h=4, w=4))
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(_last())
    )


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
    warn: float | None = None,
    alarm: float | None = None,
    low_is_bad: bool = False,
) -> timeseries.Panel:
    """Lines over time; the series named in `limits`, and thresholds, are dashed lines."""
    style = GraphTresholdsStyleMode.DASHED
    if warn is None and alarm is None:
        style = GraphTresholdsStyleMode.OFF
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(NO_VALUE)
        .grid_pos(GridPos(h=8, w=width))
        .min(0)
        .line_width(1)
        .fill_opacity(25 if stacked else 8)
        .thresholds(thresholds(warn, alarm, low_is_bad=low_is_bad))
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
        panel.override_by_name(name, _limit_style())
    return panel.targets(_targets(queries))


def bars(
    title: str, description: str, unit: str, queries: Queries, *, width: int = 8
) -> bargauge.Panel:
    """A bar for each series, as long as its value is now; for shares, so they end at 1."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(NO_VALUE)
        .grid_pos(GridPos(h=8, w=width))
        .min(0)
        .max(1)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .thresholds(thresholds(None, None))
        .reduce_options(_last())
        .targets(_targets(queries))
    )


def heat(title: str, description: str, unit: str, expr: str, *, width: int = 12) -> heatmaps.Panel:
    """How many observations fell into each bucket, over time."""
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
        heatmaps.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(NO_VALUE)
        .grid_pos(GridPos(h=8, w=width))
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
        .thresholds(thresholds(None, None))
        .targets([target])
    )


def _limit_style() -> list[DynamicConfigValue]:
    properties = {
        "color": {"mode": "fixed", "fixedColor": "red"},
        "custom.lineStyle": {"fill": "dash", "dash": [8, 8]},
        "custom.fillOpacity": 0,
        "custom.stacking": {"mode": "none"},
    }
    return [DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]
