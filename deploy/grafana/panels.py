"""The elements of the dashboards: queries, panels with a common look, and a board with its variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Selectors by the dashboard's variables. Several installations may share one Prometheus: each has a job, or a
# namespace, which series outside of Kubernetes lack. The engine's metrics have no model label: an instance serves one
# model.
INSTALLATION = 'job=~"$job", namespace=~"$namespace"'
MODEL = f'model=~"$model", {INSTALLATION}'
ENGINE = f'instance=~"$instance", {INSTALLATION}'
REQUESTS = f'model=~"$model", {ENGINE}'
RATE = "$__rate_interval"
QUANTILES = (0.5, 0.95, 0.99)

# The colours of the phases on the server's own pages, in their dark theme.
PHASE_COLORS = {
    "receive": "#8f959d",
    "tokenize_wait": "#b5d04a",
    "tokenize": "#f0a13c",
    "encode_media": "#f28bb9",
    "queue": "#d9b648",
    "prefill": "#a78bfa",
    "decode": "#63b39c",
    "respond": "#5cb8e6",
}
_ALONE = [
    models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
    models.DynamicConfigValue("custom.fillOpacity", 0),
    models.DynamicConfigValue("custom.lineWidth", 3),
]

Panel = stat.Panel | timeseries.Panel | heatmap.Panel
Thresholds = Sequence[tuple[float | None, str]]  # a value and the color from that value on


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str
    exemplars: bool = False  # show requests with a trace as points that can be clicked


def rate(metric: str, selector: str, by: str = "") -> str:
    """Return a query for the sum of a counter's rate, for each value of the labels in `by`."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{selector}}}[{RATE}]))"


def quantiles(histogram: str, selector: str) -> list[Query]:
    buckets = rate(f"{histogram}_bucket", selector, "le")
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}", exemplars=True) for q in QUANTILES]


def number(title: str, description: str, unit: str, query: str, thresholds: Thresholds = ((None, "text"),)) -> Panel:
    """Return a panel with the last value of a query in large digits, over a small graph."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value("none")
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_steps(thresholds))
        .with_target(_target(Query(query, title), "A"))
        .height(4)
        .span(4)
    )


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    overlay: Sequence[Query] = (),
    span: int | None = None,
    stacked: bool = False,
    share: bool = False,
    most: float | None = None,
    thresholds: Thresholds = (),
) -> Panel:
    """Return a panel of queries over time. `stacked` is for lines whose sum means something; `share` shows each line as
    a share of the sum. The queries of `overlay` are drawn over the others and are not stacked. `most` is the end of the
    axis. Thresholds are drawn as lines. Without a `span`, of 24 columns, there are two or three in a line."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .no_value("none")
        .show_points(common.VisibilityMode.NEVER)
        .fill_opacity(30 if stacked or share else 5)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "max"])
        )
        .tooltip(
            common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
        )
        .height(9)
    )
    if span is not None:
        panel.span(span)
    if stacked or share:
        mode = common.StackingMode.PERCENT if share else common.StackingMode.NORMAL
        panel.stacking(common_builders.StackingConfig().mode(mode).group("A"))
    if most is not None:
        panel.max(most)
    if thresholds:
        panel.thresholds(_steps(thresholds))
        panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    if any(query.legend == "{{phase}}" for query in queries):
        for phase, color in PHASE_COLORS.items():
            fixed = models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})
            panel.override_by_name(phase, [fixed])
    for number, query in enumerate((*queries, *overlay)):
        ref_id = chr(ord("A") + number)
        panel.with_target(_target(query, ref_id))
        if number >= len(queries):
            panel.override_by_query(ref_id, _ALONE)
    return panel


def buckets(title: str, description: str, unit: str, histogram: str, selector: str) -> Panel:
    """Return a heatmap of the counts in each bucket of a histogram, over time."""
    expr = f"sum by (le) (increase({histogram}_bucket{{{selector}}}[{RATE}]))"
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(_target(Query(expr, "{{le}}", exemplars=True), "A", PromQueryFormat.HEATMAP))
        .height(8)
        .span(8)
    )


def board(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[tuple[str, Sequence[Panel]]],
    instances: str = f"oaiserve_model_info{{{MODEL}}}",
    models_of: str = "oaiserve_model_info",
    collapsed: Collection[str] = (),
) -> models.Dashboard:
    """Return a dashboard with these rows of panels, and with the variables that all queries use. `instances` selects a
    series for each instance, and the metric `models_of` has a label for each model. The `collapsed` rows show their
    panels once they are clicked."""
    installations = instances.partition("{")[0]
    dashboard = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["oaiserve"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("oaiserve")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["oaiserve"])
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            builders.AnnotationQuery()
            .name("Alerts")
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Oaiserve.*", alertstate="firing", job=~"$job", namespace=~"$namespace"}')
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("job", "Job", f"label_values({installations}, job)"))
        .with_variable(_choice("namespace", "Namespace", f'label_values({installations}{{job=~"$job"}}, namespace)'))
        .with_variable(_choice("model", "Model", f"label_values({models_of}{{{INSTALLATION}}}, model)"))
        .with_variable(_choice("instance", "Instance", f"label_values({instances}, instance)"))
    )
    panel_id = top = 0
    for row, panels in rows:
        panel_id += 1
        opener = builders.Row(row).id(panel_id).grid_pos(models.GridPos(x=0, y=top, w=24, h=1))
        unset = [panel for panel in panels if _span(panel) == _UNSET]
        fills_lines = sum(8 if panel in unset else _span(panel) for panel in panels) % 24 == 0
        for panel in unset:
            panel.span(8 if fills_lines else 12)
        numbered = [panel.id(panel_id + number) for number, panel in enumerate(panels, 1)]
        panel_id += len(numbered)
        if row in collapsed:
            for panel in numbered:
                opener.with_panel(panel)
        dashboard.with_row(opener)
        top += 1  # A collapsed row is as high as its title.
        if row not in collapsed:
            for panel in numbered:
                dashboard.with_panel(panel)
            top = max(panel._internal.grid_pos.y + panel._internal.grid_pos.h for panel in numbered)
    return dashboard.build()


def _span(panel: Panel) -> int:
    position = panel._internal.grid_pos
    return 0 if position is None else position.w


_UNSET = _span(timeseries.Panel().height(1))


def _choice(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _target(query: Query, ref_id: str, form: PromQueryFormat = PromQueryFormat.TIME_SERIES) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref_id)
        .datasource(DATASOURCE)
        .expr(query.expr)
        .legend_format(query.legend)
        .format(form)
        .range()
        .exemplar(query.exemplars)
    )


def _steps(thresholds: Thresholds) -> builders.ThresholdsConfig:
    steps = [models.Threshold(value, color) for value, color in thresholds]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
