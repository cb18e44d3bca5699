"""One self-contained HTML page from all results: no network, no script, no other file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tools.plots import svg
from bench.tools.report import Chart, Series

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
.scroll { overflow-x: auto }
.note, .machine { color: #555; font-size: 13px }
h2 { border-top: 2px solid #ccc; padding-top: 1rem; margin-top: 3rem }
""".strip()


def write_page(folder: Path) -> Path:
    """Write `report.html` from every JSON file in `folder` that holds tables."""
    paths = sorted(folder.glob("*.json"))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    shown = [document for document in documents if document.get("tables")]
    if not shown:
        raise FileNotFoundError(f"{folder} holds no results: measure something first")
    page = folder / "report.html"
    page.write_text(_page(shown), encoding="utf-8")
    return page


def _page(documents: Sequence[Mapping[str, Any]]) -> str:
    links = " · ".join(
        f'<a href="#{_text(item["benchmark"])}">{_text(item["benchmark"])}</a>'
        for item in documents
    )
    body = "\n".join(_section(document) for document in documents)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Spec-Ops: measurements</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>Spec-Ops: measurements</h1>\n<p>{links}</p>\n{body}\n</body></html>\n"
    )


def _section(document: Mapping[str, Any]) -> str:
    name, machine = _text(document["benchmark"]), document.get("machine", {})
    quick = " (quick: shows that it works, its figures mean nothing)" if document["quick"] else ""
    charts = [
        Chart(**{**chart, "series": [Series(**series) for series in chart["series"]]})
        for chart in document.get("charts", ())
    ]
    parts = [f'<h2 id="{name}">{name}{quick}</h2>']
    if machine:
        parts.append(
            f'<p class="machine"><code>{_text(machine["command"])}</code>, '
            f"{_text(machine['cpu'])}, {machine['threads']} threads, "
            f"onnxruntime {_text(machine['onnxruntime'])}, {_text(machine['date'])}</p>"
        )
    if charts:
        parts.append(_own_ids(svg(charts), name))
    parts += [_table(table) for table in document["tables"]]
    return "\n".join(parts)


def _own_ids(picture: str, name: str) -> str:
    """Matplotlib numbers the parts of every picture alike; on one page each needs its own."""
    for mark in ('id="', 'href="#', "url(#"):
        picture = picture.replace(mark, f"{mark}{name}-")
    return picture


def _table(table: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table["columns"])
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table["rows"]
    )
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in table["notes"])
    return (
        f'<h3>{_text(table["title"])}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{notes}"
    )


def _text(text: str) -> str:
    return html.escape(str(text))
