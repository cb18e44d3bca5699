"""Draws the dashboards with Grafana's own components, from a running Prometheus, without Grafana.

    python grafana/draw/draw.py [DASHBOARD...] [--prometheus URL] [--minutes 15] [--output FOLDER]

The page beside this file (page.jsx) asks Prometheus what a Grafana server would ask, and gives the
answers to `@grafana/data` and `@grafana/ui`. A headless Chromium shows it: one picture for each
dashboard. The first run installs those packages (npm, pinned in package-lock.json) here.

The drawn panels are checked: none has an error; no axis ends beyond twice the greatest value or
limit on it, or what is little in its unit; no legend takes more than a third of its panel; every
annotation has a text. Faults are printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import math
import mimetypes
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the dashboards' source

from panels import SMALLEST_RANGE
from scripts.browser import BrowserError, launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
DASHBOARDS = ROOT / "grafana" / "dashboards"
PACKAGES = FOLDER / "node_modules"
BUNDLE = PACKAGES / ".pictures"
PAGE = "http://pictures.invalid"  # answered from BUNDLE; the page reaches nothing else
WIDTH = 1600
HEIGHT = 900  # of the window; the picture is as high as the dashboard
PATIENCE_MS = 120_000
SCRAPE = "5s"  # `timeInterval` of grafana/provisioning/datasources

LEGEND_SHARE = 1 / 3
# Grafana's packages are bundled in their CommonJS form: as modules, version 12.1.0 names exports
# that it does not have.
LIBRARIES = ("data", "schema", "ui")
BUNDLING = (
    "--bundle",
    "--format=iife",
    "--jsx=automatic",
    "--loader:.svg=dataurl",
    "--loader:.png=dataurl",
    "--loader:.woff2=file",
    "--loader:.woff=empty",
    "--loader:.ttf=empty",
    '--define:process.env.NODE_ENV="production"',
    "--define:global=globalThis",
    "--log-level=error",
)
EMPTY_PAGE = b"""<!doctype html><meta charset="utf-8"><title>pictures</title>
<link rel="stylesheet" href="/page.css"><div id="root"></div><script src="/page.js"></script>"""


class DrawError(Exception):
    """Nothing can be drawn; the message says what to do about it."""


def run(*command: str) -> None:
    """Run a command in this folder; raises DrawError with its output if it fails."""
    done = subprocess.run(command, cwd=FOLDER, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise DrawError(f"{' '.join(command[:2])} failed:\n{(done.stdout + done.stderr).strip()}")


def versions(lock: Path) -> dict[str, str]:
    """The version of each package that a lock file of npm names, by its folder."""
    packages = json.loads(lock.read_text(encoding="utf-8"))["packages"]
    return {name: package["version"] for name, package in packages.items() if name}


def installed() -> bool:
    """Whether node_modules/ holds what package-lock.json pins, in no other versions."""
    mark = PACKAGES / ".package-lock.json"  # npm writes it when all else is there
    return mark.exists() and versions(mark).items() <= versions(FOLDER / mark.name[1:]).items()


def bundled() -> Path:
    """The folder of the page's files, made anew where its source or its packages have changed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise DrawError("no node or no npm (Debian: apt-get install nodejs npm)")
    with (FOLDER / "package-lock.json").open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be installing
        if not installed():
            print("installing Grafana's components (npm, 700 MB)", flush=True)
            run(npm, "ci", "--no-audit", "--no-fund")
        script = BUNDLE / "page.js"
        sources = [path for kind in ("*.js", "*.jsx", "*.css") for path in FOLDER.glob(kind)]
        sources += [Path(__file__), PACKAGES / ".package-lock.json"]
        newest = max(path.stat().st_mtime for path in sources)
        if not script.exists() or script.stat().st_mtime < newest:
            aliases = [
                f"--alias:@grafana/{name}={PACKAGES}/@grafana/{name}/dist/cjs/index.cjs"
                for name in LIBRARIES
            ]
            esbuild = str(PACKAGES / ".bin" / "esbuild")
            run(esbuild, "page.jsx", f"--outdir={BUNDLE}", *BUNDLING, *aliases)
    return BUNDLE


def answer(route: Route) -> None:
    """Answer the page from the bundle; icons come from the package that shows them."""
    path = urllib.parse.urlparse(route.request.url).path
    if not route.request.url.startswith(PAGE):
        route.abort()
    elif path == "/":
        route.fulfill(body=EMPTY_PAGE, content_type="text/html")
    else:
        icons = "/public/build/img/"
        where = PACKAGES / "@grafana" / "ui" / "dist" / "public" / "img"
        file = where / path.removeprefix(icons) if path.startswith(icons) else BUNDLE / path[1:]
        if file.is_file():
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            route.fulfill(body=file.read_bytes(), content_type=kind)
        else:
            route.fulfill(status=404)


def asker(prometheus: str) -> Any:
    """A function that asks a Prometheus; an error is an answer, to be shown in the panel."""

    def ask(path: str, parameters: dict[str, Any]) -> Any:
        url = f"{prometheus.rstrip('/')}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)

    return ask


def require_prometheus(prometheus: str) -> None:
    """Raise DrawError if no Prometheus answers at this URL."""
    try:
        body = asker(prometheus)("/api/v1/status/buildinfo", {})
    except (OSError, ValueError) as error:
        raise DrawError(
            f"no Prometheus answers at {prometheus} ({error}): `make up` starts one"
        ) from None
    if body.get("status") != "success":
        raise DrawError(f"what answers at {prometheus} is no Prometheus")


def small_png(png: bytes) -> bytes:
    """The same picture with a palette of 256 colours, in a third of the bytes."""
    from PIL import Image  # noqa: PLC0415 - of the extra `dev`, as the browser's driver

    image = Image.open(io.BytesIO(png)).convert("RGB")
    smaller = io.BytesIO()
    palette = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    palette.save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def draw(
    browser: Browser, board: dict[str, Any], prometheus: str, times: tuple[float, float]
) -> tuple[bytes, dict[str, Any]]:
    """The picture (PNG) of one dashboard from Unix time to Unix time, and what the page reports.

    Raises:
        DrawError: the page could not be drawn.
    """
    from playwright.sync_api import Error  # noqa: PLC0415 - not every machine has it

    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(PATIENCE_MS)
    try:
        page.route("**/*", answer)
        page.expose_function("ask", asker(prometheus))
        page.goto(PAGE)
        given = {
            "board": board,
            "from": round(times[0] * 1000),
            "to": round(times[1] * 1000),
            "width": WIDTH,
            "scrape": SCRAPE,
        }
        report = page.evaluate("given => window.draw(given)", given)
        return page.screenshot(full_page=True), report
    except Error as error:
        raise DrawError(f"{board['title']}: {error.message}") from None
    finally:
        page.close()


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong with the drawn panels of one dashboard, a line each."""
    found = []
    for panel in report["panels"]:
        where = f"{report['title']} / {panel['title']}:"
        if panel["error"]:
            found.append(f"{where} {panel['error']}")
        if panel["legend"] > LEGEND_SHARE:
            found.append(f"{where} the legend takes {panel['legend']:.0%} of the panel")
        found += [f"{where} {fault}" for fault in axis_faults(panel["scales"])]
    for event in report["events"]:
        if not event["text"]:
            found.append(f"{report['title']} / annotation {event['name']} has no text")
    return sorted(set(found))


def axis_faults(scales: Iterable[dict[str, Any]]) -> list[str]:
    """The vertical axes that end far beyond what they show: curves, limits, lines of thresholds."""
    found = []
    for scale in scales:
        top = scale["max"]
        if scale["greatest"] is None:
            continue
        greatest = max([scale["greatest"], *(line for line in scale["lines"] if line <= top)])
        most = max(2 * greatest, SMALLEST_RANGE.get(scale["unit"], 1))
        if top > most and not math.isclose(top, most):
            found.append(
                f"the axis ends at {top:g}, the greatest value is {greatest:g} ({scale['unit']})"
            )
    return found


def draw_all(
    names: Iterable[str], prometheus: str, times: tuple[float, float], output: Path
) -> list[str]:
    """Write a picture of each of these dashboards; returns what is wrong with them.

    Raises:
        DrawError, BrowserError: something that drawing needs is missing.
    """
    require_prometheus(prometheus)
    bundled()
    output.mkdir(parents=True, exist_ok=True)
    wrong = []
    with launched() as browser:
        for name in names:
            board = json.loads((DASHBOARDS / f"{name}.json").read_text("utf-8"))
            picture, report = draw(browser, board, prometheus, times)
            path = output / f"{name}.png"
            path.write_bytes(small_png(picture))
            path.with_suffix(".json").write_text(json.dumps(report, indent=1), "utf-8")
            print(path, flush=True)
            wrong += faults(report)
    return wrong


def moment(text: str) -> float:
    """Unix time from a number or an ISO date and time."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def main() -> int:
    """Command line; see the module's docstring."""
    known = sorted(path.stem for path in DASHBOARDS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dashboards", nargs="*", metavar="DASHBOARD", help=f"of {', '.join(known)}")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15, help="how far back")
    parser.add_argument("--until", type=moment, metavar="TIME", help="default: now")
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="FOLDER")
    options = parser.parse_args()
    if strangers := set(options.dashboards) - set(known):
        parser.error(f"no dashboard is called {', '.join(strangers)}: {', '.join(known)}")
    until = options.until or time.time()
    times = (until - options.minutes * 60, until)
    try:
        wrong = draw_all(options.dashboards or known, options.prometheus, times, options.output)
    except (DrawError, BrowserError) as error:
        wrong = [str(error)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
