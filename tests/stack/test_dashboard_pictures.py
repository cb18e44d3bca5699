"""The script that photographs dashboards, on a stand-in for Grafana that draws panels late."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from scripts.browser import BrowserError, executable
from tests.loopback import HOST, Handler, listening
from tests.stack import queries
from tests.stack.support import Finished, run

pytestmark = pytest.mark.e2e
ODD = "Refused"  # the panel of "Is it healthy?" that may differ
# Adds each panel as Grafana does: first its frame and a loading bar, later its content. If one
# panel is never drawn, the others are drawn at once, so that a slow machine makes no difference.
SCRIPT = """
for (const [title, ends] of Object.entries(PANELS)) {
  if (ends === 'missing') continue;
  const panel = document.createElement('section');
  panel.dataset.testid = `data-testid Panel header ${title}`;
  panel.innerHTML = `<div aria-label="Panel loading bar"></div><h6></h6>
    <div data-testid="data-testid panel content"></div>`;
  panel.querySelector('h6').textContent = title;
  document.body.append(panel);
  if (ends === 'loading') continue;
  const show = () => {
    panel.firstChild.remove();
    const content = panel.querySelector('[data-testid="data-testid panel content"]');
    if (ends === 'drawn' || ends === 'error') content.append(document.createElement('canvas'));
    if (ends === 'text') content.textContent = '42';
    if (ends === 'no data' || ends === 'no traffic')
      content.innerHTML = '<i data-testid="data-testid Panel data error message"></i>';
    if (ends === 'no data') content.firstChild.textContent = 'No data';
    if (ends === 'no traffic') content.firstChild.textContent = ends;
    if (ends === 'error') panel.insertAdjacentHTML('beforeend',
      '<button data-testid="data-testid Panel status error"></button>');
  };
  if (LATE) setTimeout(show, 300 * Math.random());
  else show();
}
"""


def photograph(odd: str, folder: Path) -> tuple[Finished, list[str]]:
    """Run the script on a Grafana whose panel `ODD` ends as `odd`; returns the asked paths, too."""
    try:
        executable()
    except BrowserError as missing:
        pytest.skip(f"NO DASHBOARD WAS PHOTOGRAPHED: {missing}")
    asked: list[str] = []

    class Grafana(Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            boards = queries.boards().values()
            found = [one for one in boards if self.path.startswith(f"/d/{one['uid']}?")]
            if not found or odd == "not found":
                self.reply(404, b"not found", {"Content-Type": "text/plain"})
                return
            panels = {
                panel["title"]: "text" if panel["type"] == "stat" else "drawn"
                for panel in found[0]["panels"]
                if panel["type"] != "row"
            }
            if found[0]["uid"] == "specops-healthy":
                panels[ODD] = odd
            given = f"const PANELS = {json.dumps(panels)}, LATE = {json.dumps(odd == 'drawn')};"
            body = f"<body><script>{given}{SCRIPT}</script>".encode()
            self.reply(200, body, {"Content-Type": "text/html; charset=utf-8"})

    with listening(Grafana) as port:
        options = ("--output", folder, "--patience", 30 if odd == "drawn" else 2, "--minutes", 5)
        url = f"http://{HOST}:{port}"
        return run(sys.executable, "scripts/dashboard_pictures.py", url, *options), asked


def test_a_panel_that_says_why_it_has_no_data_is_drawn(tmp_path: Path) -> None:
    done, _ = photograph("no traffic", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_dashboard_has_its_picture_of_all_its_rows(tmp_path: Path) -> None:
    done, asked = photograph("drawn", tmp_path / "new")
    assert (done.returncode, done.stderr) == (0, "")
    for name, board in queries.boards().items():
        picture = (tmp_path / "new" / f"{name}.png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", picture[16:24])
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
        assert width == 1600
        assert height > 38 * bottom
        assert any(path.startswith(f"/d/{board['uid']}?kiosk&from=now-5m") for path in asked)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("error", "shows an error"),
        ("no data", "shows no data: No data"),
        ("missing", "is not there"),
        ("loading", "is loading"),
        ("nothing", "is empty"),
        ("not found", "answers 404"),
    ],
)
def test_a_panel_or_a_dashboard_that_is_not_drawn_is_named(
    odd: str, words: str, tmp_path: Path
) -> None:
    done, _ = photograph(odd, tmp_path)
    assert done.returncode == 1
    if odd == "not found":
        assert len(done.stderr.splitlines()) == len(queries.boards())
        assert words in done.stderr
        return
    assert done.stderr.splitlines() == [f"Spec-Ops: Is it healthy? / {ODD} {words}"]
    assert len(list(tmp_path.glob("*.png"))) == len(queries.boards())
