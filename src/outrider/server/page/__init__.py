"""The web page: `index.html`, with its style sheet and scripts in the place of their tags, and a content
security policy that allows inline code by its hash alone, requests to the page's own origin alone, and
(Trusted Types) no text to become markup or code."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import HTMLResponse

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


@functools.cache
def page() -> HTMLResponse:
    """The page, put together at its first use. It holds nothing secret: it is served without an API key, and
    asks for one when the API does."""
    folder = resources.files("outrider.server.page")
    styles: list[str] = []
    scripts: list[str] = []

    def inlined(match: re.Match[str], tag: str, hashes: list[str]) -> str:
        text = (folder / match[1]).read_text(encoding="utf-8")
        hashes.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    html = (folder / "index.html").read_text(encoding="utf-8")
    html = _STYLE.sub(lambda match: inlined(match, "style", styles), html)
    html = _SCRIPT.sub(lambda match: inlined(match, "script", scripts), html)
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        "style-src": " ".join(styles),
        "connect-src": "'self'",
        "img-src": "data:",  # the page's own icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    }
    return HTMLResponse(html, headers=headers)
