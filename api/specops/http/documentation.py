"""Serves `/docs`, the API's description in Swagger UI, from a package instead of the network.

FastAPI's pages load scripts, styles and fonts from public servers: without a network they are
blank, and with one those servers learn who reads them. Our page's policy allows only this server.
"""

import base64
import hashlib
import re
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

PATH = "/docs"
_SCRIPT, _STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
# The package holds the files of Swagger UI's releases (Apache License 2.0), unchanged.
_FOLDER = Path(str(files("fastapi_swagger"))) / "resources"
_TYPES = {_SCRIPT: "text/javascript", _STYLE: "text/css"}
_HTML = bytes(
    get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Spec-Ops API",
        swagger_js_url=f"docs/{_SCRIPT}",
        swagger_css_url=f"docs/{_STYLE}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"defaultModelsExpandDepth": 0, "validatorUrl": None},
    ).body
).decode()
router = APIRouter(include_in_schema=False)


def policy_source(text: str) -> str:
    """Return the Content-Security-Policy's source for a script or a style within a page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


(_START,) = re.findall(r"<script>(.*?)</script>", _HTML, re.DOTALL)
_POLICY = (
    f"default-src 'none'; script-src 'self' {policy_source(_START)}; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


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
