"""Makes one HTML page of all results, which needs no network, no script and no other file."""

import json
from base64 import b64encode
from pathlib import Path

from jinja2 import Environment

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Spec-Ops: measurements</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto }
.scroll { overflow-x: auto }
.note, .machine { color: #555; font-size: 13px }
h2 { border-top: 2px solid #ccc; padding-top: 1rem; margin-top: 3rem }
</style></head>
<body><h1>Spec-Ops: measurements</h1>
<p>{% for item in found %}<a href="#{{ item.benchmark }}">{{ item.benchmark }}</a> {% endfor %}</p>
{% for item in found %}
<h2 id="{{ item.benchmark }}">{{ item.benchmark }}
{%- if item.quick %} (quick: shows that it works, its figures mean nothing){% endif %}</h2>
<p class="machine"><code>{{ item.machine.command }}</code>, {{ item.machine.cpu }},
{{ item.machine.threads }} threads, onnxruntime {{ item.machine.onnxruntime }},
{{ item.machine.date }}</p>
{% if item.picture %}<img alt="" src="data:image/svg+xml;base64,{{ item.picture }}">{% endif %}
{% for table in item.tables %}
<h3>{{ table.title }}</h3>
<div class="scroll"><table>
<thead><tr>{% for cell in table.columns %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% for note in table.notes %}<p class="note">{{ note }}</p>{% endfor %}
{% endfor %}{% endfor %}
</body></html>
"""


def write_page(folder: Path) -> Path:
    """Write `report.html` from the tables and pictures in `folder`, and return its path.

    Raises:
        FileNotFoundError: the folder holds no results.
    """
    shown = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("tables"):
            picture = path.with_suffix(".svg")
            data = b64encode(picture.read_bytes()).decode() if picture.is_file() else ""
            shown.append({**document, "picture": data})
    if not shown:
        raise FileNotFoundError(f"{folder} holds no results: measure something first")
    page = folder / "report.html"
    text = Environment(autoescape=True).from_string(_PAGE).render(found=shown)
    page.write_text(text, encoding="utf-8")
    return page
