"""Extends Locust's page and report: tables of times, rates and stages, and charts.

Locust's own tables, charts and files count requests. Ours are in additional tabs and at the end of
the HTML report. They use Locust's extension points `extended_tabs`, `extended_tables` and
`extended_csv_files`, whose data the page gets from `/stats/requests`. There is no extension point
for charts, so a script shows them below the tables.
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, jsonify, make_response, request
from locust import argument_parser
from locust.env import Environment
from locust.runners import STATE_STOPPED, STATE_STOPPING, Runner

import options as load_options
from access import Guard
from charts import svg
from record import PROMPT_SIZES, SIZES, Figures, Recorder, as_csv
from shapes import Stage
from summary import Report, found_in, short
from users import served_model

Row = Mapping[str, Any]  # values by the titles of their columns

# Locust's own form fields. Without a check, the form could set every option of the command line.
_FIELDS = ("user_count", "spawn_rate", "host", "run_time", "profile")
# Titles of `SIZES`.
_TITLES = (*(f"to {size:,} tokens" for size in PROMPT_SIZES), f"above {PROMPT_SIZES[-1]:,} tokens")
_TIMES = (
    ("ttft", "TTFT: time to first token", "ms"),
    ("tpot", "TPOT: time per output token after the first", "ms"),
    ("itl", "ITL: inter-token latency, per token", "ms"),
    ("latency", "E2EL: end-to-end latency", "ms"),
    ("speed", "Output tokens per second of one request, waiting included", "tokens/s"),
    ("slowdown", "Slowdown: TTFT over the prompt's time alone, by the API's pass costs", ""),
    *((name, f"TTFT of prompts {size}", "ms") for name, size in zip(SIZES, _TITLES, strict=True)),
)


def _times(report: Report) -> Iterator[Row]:
    whole = report.whole
    for name, what, unit in _TIMES:
        scale, named = 1000 if unit == "ms" else 1, {"Mean": "mean"}
        named |= {quantile: quantile for quantile in ("p50", "p90", "p95", "p99")}
        measured = {title: short(whole[f"{name}_{key}"], scale) for title, key in named.items()}
        yield {"Time": what, "Unit": unit, "# Measured": f"{whole[f'{name}_count']:,}"} | measured


def _rates(report: Report) -> Iterator[Row]:
    def row(figure: str, value: str, unit: str = "") -> Row:
        return {"Figure": figure, "Value": value, "Unit": unit}

    whole, limits = report.whole, report.options.goodput
    if report.warning:
        yield row(f"Warning: {report.warning}", "")
    yield row("Duration", short(whole["seconds"]), "s")
    yield row("Requests answered", f"{whole['answered']:,}")
    for name, what in (
        ("refused", "Requests refused (429), no failure"),
        ("failed", "Requests failed"),
        ("cancelled", f"Cancelled, no failure: {report.cancelled}"),
    ):
        if whole[name] or name != "cancelled":
            yield row(what, f"{whole[name]:,}", _share(whole[f"{name}_share"]))
    yield row("Requests not sent: too many in flight", f"{whole['unsent']:,}")
    yield row("Answers", short(whole["answered_per_second"]), "a second")
    for name, what in (("input_tokens", "Input tokens"), ("output_tokens", "Output tokens")):
        yield row(what, f"{whole[name]:,}", f"{short(whole[f'{name}_per_second'])} /s")
    yield row(f"Goodput: requests within {limits}", short(whole["good_per_second"]), "a second")
    yield row(f"Share of requests within {limits}", _share(whole["good_share"]))
    if report.is_ramp:
        yield row("Knee: most arrivals within the objectives", report.knee_text, "a second")


def _prompts(report: Report) -> Iterator[Row]:
    stages = [(str(number), stage) for number, stage in enumerate(report.stages, start=1)]
    for name, figures in (*stages, ("all", report.whole)):
        yield {
            "Stage": name,
            "Prompts sent before": _share(figures["repeated_share"]),
            "Prompt tokens known": _share(figures["cached_share"]),
            "Tokens a pass": short(figures["tokens_per_pass"]),
            "Accepted drafts from": found_in(figures) or "-",
            **{
                f"TTFT p95 (ms), {title}": short(figures[f"{size}_p95"], 1000)
                for size, title in zip(SIZES, _TITLES, strict=True)
            },
            "Slowdown p50 / p95": " / ".join(short(figures[f"slowdown_p{q}"]) for q in (50, 95)),
        }


def _stages(report: Report) -> Iterator[Row]:
    for number, stage in enumerate(report.stages, start=1):
        rate = stage["asked_per_second"]
        yield {
            "Stage": number,
            "Load": f"{rate:g} arrivals/s" if rate else f"{stage['asked_users']} users",
            "Users (mean)": "-" if rate else short(stage["users"]),
            "Requests/s": short(stage["arrived_per_second"]),
            "# Answered": stage["answered"],
            "Refused (429)": _share(stage["refused_share"]),
            "Failed": stage["failed"] + stage["unsent"],
            "Within limits": _share(stage["good_share"]),
            "Output tokens/s": short(stage["output_tokens_per_second"]),
            "TTFT p95 (ms)": short(stage["ttft_p95"], 1000),
            "TPOT p95 (ms)": short(stage["tpot_p95"], 1000),
            "Latency p95 (ms)": short(stage["latency_p95"], 1000),
            "Objectives": _objectives(report, stage),
        }


# By title of a tab: its key, and its rows, of which the first has all columns.
TABLES: dict[str, tuple[str, Callable[[Report], Iterator[Row]]]] = {
    "LLM times": ("llm-times", _times),
    "LLM rates": ("llm-rates", _rates),
    "Prompts and drafts": ("llm-prompts", _prompts),
    "Stages and knee": ("llm-stages", _stages),
}


def _objectives(report: Report, stage: Figures) -> str:
    if not stage["arrived_per_second"]:
        return "-"  # no request has ended yet
    missed = report.missed(stage)
    return "knee" if stage is report.knee else f"missed: {missed}" if missed else "met"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _keyed(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Keys of columns for the page, which accepts only letters and digits."""
    return ((f"column{number}", value) for number, value in enumerate(values))


def _numbered(rows: Iterable[Row]) -> list[Row]:
    """Rows with the keys of columns; the page sorts them by `name`."""
    return [{"name": f"{n:03}", **dict(_keyed(row.values()))} for n, row in enumerate(rows)]


def section(report: Report) -> str:
    """The tables and charts as a section of Locust's HTML report."""
    parts = []
    for title, (_, make) in TABLES.items():
        rows = [*make(report)]
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row.values()) + "</tr>"
            for row in rows
        )
        parts.append(f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>")
    style = (
        "#llm{font:14px Roboto,Helvetica,Arial,sans-serif;max-width:1152px;margin:0 auto 48px;"
        "padding:0 24px;color:#888;color:light-dark(#222,#eee);color-scheme:light dark}"
        "#llm h2{font-weight:400}#llm table{border-collapse:collapse;width:100%}"
        "#llm td,#llm th{text-align:left;padding:8px;border-bottom:1px solid #8886}"
    )
    parts.append(f"<h2>Over time</h2>{svg(report.over_time)}")
    return f'<style>{style}</style><section id="llm">{"".join(parts)}</section>'


# Shows current charts below the tables of our tabs.
_LIVE_CHARTS = """<section id="llm-charts" style="max-width:1152px;margin:16px auto"></section>
<script>
setInterval(async () => {
  const tab = document.querySelector('[role=tab][aria-selected=true]');
  const ours = tab && TITLES.includes(tab.textContent);
  // The page may be leaving, or its server gone.
  const answer = ours && await fetch("./llm/charts.svg").catch(() => false);
  document.getElementById("llm-charts").innerHTML = answer?.ok ? await answer.text() : "";
}, 2000)
</script>""".replace("TITLES", json.dumps([*TABLES]))


def append(page: str, addition: str) -> str:
    """A page with HTML added at its end."""
    before, end, after = page.rpartition("</body>")
    return f"{before}{addition}{end}{after}"


def append_to_file(path: Path, report: Report) -> None:
    """Add our section at the end of the file of `--html`."""
    path.write_text(append(path.read_text("utf-8"), section(report)), "utf-8")


def install(environment: Environment, current: Callable[[], Report | None]) -> None:
    """Extend the page; `current` returns the report of the run so far, None before the first."""
    page = environment.web_ui
    assert page is not None  # noqa: S101 - the caller has checked
    assert page.app is not None  # noqa: S101 - set by the constructor
    base = environment.parsed_options.web_base_path or ""
    given = environment.parsed_options.dataset
    empty = Report(Recorder([Stage(1.0)], time.time()), environment.parsed_options, "")
    page.app.jinja_env.policies["json.dumps_kwargs"] = {"sort_keys": False}  # fields as declared
    page.template_args |= {
        "extended_tabs": [{"key": key, "title": title} for title, (key, _) in TABLES.items()],
        "extended_tables": [
            {
                "key": key,
                "structure": [{"key": k, "title": t} for k, t in _keyed(next(make(empty)))],
            }
            for key, make in TABLES.values()
        ],
        "extended_csv_files": [
            {"href": "./llm/stages.csv", "title": "Download stages CSV (tokens and latencies)"},
            {"href": "./llm/report.json", "title": "Download LLM figures (JSON)"},
        ],
    }
    files = Blueprint("llm", __name__, url_prefix=f"{base}/llm")

    @files.route("/<name>")
    @page.auth_required_if_enabled
    def download(name: str) -> Response:
        report = current()
        if report is None:
            return make_response("no test has been started", 404)
        if name == "stages.csv":
            content, kind = as_csv(report.stages), "text/csv"
        elif name == "report.json":
            content, kind = json.dumps(report.data(), indent=2), "application/json"
        elif name == "charts.svg":
            return Response(svg(report.over_time), mimetype="image/svg+xml")
        else:
            return make_response("no such file", 404)
        headers = {"Content-Type": kind, "Content-Disposition": f"attachment;filename={name}"}
        return make_response(content, 200, headers)

    page.app.register_blueprint(files)
    page.app.wsgi_app = Guard(page.app.wsgi_app, environment.parsed_options.allowed_hosts)
    fields = {*_FIELDS, *argument_parser.ui_extra_args_dict()}

    @page.app.before_request
    def refuse() -> Response | None:
        if request.method != "POST" or request.path != f"{base}/swarm":
            return None
        options = environment.parsed_options
        try:
            if unknown := [*filter(lambda name: name not in fields, request.form)]:
                raise ValueError(f"The page has no field {unknown[0]!r}")
            workers = getattr(environment.runner, "worker_count", 1)
            filled = _filled_in(options, request.form)
            if filled.dataset not in ("", given):
                load_options.check_page_dataset(filled.dataset)
            load_options.check(filled, workers)
            served_model(request.form.get("host", environment.host), environment.access)
            let_the_last_end(environment.runner)
        except ValueError as error:
            return jsonify({"success": False, "message": str(error), "host": environment.host})
        if not request.form.get("run_time"):
            options.run_time = None  # Locust would keep that of the previous test
        return None

    @page.app.after_request
    def extend(response: Response) -> Response:
        path = request.path.removeprefix(base)
        if response.status_code != 200:
            return response
        if path == "/":
            response.set_data(append(response.get_data(as_text=True), _LIVE_CHARTS))
        if path not in ("/stats/requests", "/stats/report") or (report := current()) is None:
            return response
        if path == "/stats/report":
            response.set_data(append(response.get_data(as_text=True), section(report)))
        else:
            found = [{"key": key, "data": _numbered(make(report))} for key, make in TABLES.values()]
            response.set_data(json.dumps({**response.json, "extended_stats": found}))
        return response


def let_the_last_end(runner: Runner) -> None:
    """Wait until a stopped test has finished its work, such as its report.

    Until then, Locust would accept a new test, report its start, and not start it.

    Raises:
        ValueError: the last test is still running.
    """
    if runner.shape_greenlet is None:
        return
    if runner.state not in (STATE_STOPPING, STATE_STOPPED):
        raise ValueError("A test is running: press STOP first")
    runner.shape_greenlet.join()


def _filled_in(options: Namespace, form: Mapping[str, str]) -> Namespace:
    """The options with the values of the page's form.

    Raises:
        ValueError: a field is not a number.
    """
    filled = Namespace(**vars(options))
    filled.user_count = options.num_users or 1  # the page uses another name for it
    for name, text in form.items():
        before = getattr(filled, name, None)
        if isinstance(before, int | float) and not isinstance(before, bool):
            try:
                setattr(filled, name, type(before)(text))
            except ValueError:
                title = name.replace("_", " ").capitalize()
                kind = "a whole number" if isinstance(before, int) else "a number"
                raise ValueError(f"{title} must be {kind}, not {text!r}") from None
        elif isinstance(before, bool):
            setattr(filled, name, text == "true")
        elif isinstance(before, str):
            setattr(filled, name, text)
    filled.num_users = filled.user_count
    return filled
