"""Building blocks of the dashboards: PromQL that is never NaN, and panels that always explain.

A panel cannot be made without a unit and a description, and every query has a value before the
first request: ratios leave out divisions by zero and fill in 0, quantiles drop NaN.
"""

from __future__ import annotations

from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
)

DATASOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
NO_VALUE = "no traffic yet"
QUANTILE_WINDOW = "2m"  # a CPU answers few requests a minute: shorter windows hold too few

# Each query of a panel: its expression and its legend.
Queries = dict[str, str]


def rate(counter: str) -> str:
    """Events per second, all instances and labels together."""
    return f"sum(rate({counter}[$__rate_interval])) or vector(0)"


def rate_by(label: str, counter: str) -> str:
    """Events per second for each value of `label`."""
    return (
        f"sum by ({label}) (rate({counter}[$__rate_interval])) or 0 * sum by ({label}) ({counter})"
    )


def ratio(numerator: str, denominator: str) -> str:
    """What one counter gains for each step of another; 0 while the other stands still."""
    return (
        f"sum(rate({numerator}[$__rate_interval])) "
        f"/ (sum(rate({denominator}[$__rate_interval])) > 0) or vector(0)"
    )


def ratio_by(label: str, numerator: str, denominator: str) -> str:
    """`ratio` for each value of `label`."""
    return (
        f"sum by ({label}) (rate({numerator}[$__rate_interval])) "
        f"/ (sum by ({label}) (rate({denominator}[$__rate_interval])) > 0) "
        f"or 0 * sum by ({label}) ({denominator})"
    )


def quantile(q: float, histogram: str) -> str:
    """A quantile of a histogram; 0 without observations."""
    return (
        f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[{QUANTILE_WINDOW}]))) >= 0 "
        "or vector(0)"
    )


def quantiles(histogram: str) -> Queries:
    """Median, 95th and 99th percentile."""
    return {f"p{q * 100:g}": quantile(q, histogram) for q in (0.5, 0.95, 0.99)}


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
    queries: Queries,
    *,
    warn: float | None = None,
    alarm: float | None = None,
    decimals: int | None = None,
) -> stat.Panel:
    """A number that answers at a glance; yellow from `warn`, red from `alarm`."""
    steps = [Threshold(value=None, color="green")]
    if warn is not None:
        steps.append(Threshold(value=warn, color="yellow"))
    if alarm is not None:
        steps.append(Threshold(value=alarm, color="red"))
    panel = (
        _stat(title, description)
        .unit(unit)
        .no_value(NO_VALUE)
        .graph_mode(BigValueGraphMode.AREA)
        .text_mode(BigValueTextMode.VALUE)
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .targets(_targets(queries))
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
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )


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
) -> timeseries.Panel:
    """Lines over time; the series named in `limits` are drawn as dashed red lines."""
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


def _limit_style() -> list[DynamicConfigValue]:
    properties = {
        "color": {"mode": "fixed", "fixedColor": "red"},
        "custom.lineStyle": {"fill": "dash", "dash": [8, 8]},
        "custom.fillOpacity": 0,
        "custom.stacking": {"mode": "none"},
    }
    return [DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]
