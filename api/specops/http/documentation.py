"""`/docs`: the API's description as Swagger UI, which comes from a package, not from the network.

FastAPI's own pages load scripts, styles and fonts from public servers: without the network they are
blank, and with it those servers learn who reads them. The page's policy allows this server alone.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse

PATH = "/docs"
_SCRIPT, _STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
# The package holds the files of Swagger UI's releases (Apache License 2.0), unchanged.
_FOLDER = Path(str(files("fastapi_swagger"))) / "resources"
_TYPES = {_SCRIPT: "text/javascript", _STYLE: "text/css"}

_START = """
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
"""
_HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Spec-Ops API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/{_STYLE}">
</head>
<body>
<div id="page"></div>
<noscript><a href="openapi.json">openapi.json</a> has the description.</noscript>
<script src="docs/{_SCRIPT}"></script>
<script>{_START}</script>
</body>
</html>
"""
_HASH = base64.b64encode(hashlib.sha256(_START.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'self' 'sha256-{_HASH}'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def page() -> HTMLResponse:
    """Return the page."""
    return HTMLResponse(_HTML, headers={"content-security-policy": _POLICY})


@router.get(f"{PATH}/{_SCRIPT}")
async def script() -> FileResponse:
    """Return Swagger UI's script."""
    return _file(_SCRIPT)


@router.get(f"{PATH}/{_STYLE}")
async def style() -> FileResponse:
    """Return Swagger UI's style."""
    return _file(_STYLE)


def _file(name: str) -> FileResponse:
    headers = {"cache-control": "public, max-age=86400"}
    return FileResponse(_FOLDER / name, media_type=_TYPES[name], headers=headers)
