"""The page at `/`: one file, which asks /sluice/status and /metrics of its router, and no other address."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.style import STYLE

PAGE_PATHS = ("/", "/sluice")
# It runs no code but its own, and talks to no other address.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HTML = files("deployments.http.page").joinpath("index.html").read_text().replace("/* style.css */", STYLE).encode()


async def page(request: Request) -> Response:
    """It holds nothing secret: with keys on it asks for one before it shows anything."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(_HTML, media_type="text/html; charset=utf-8", headers=headers)
