"""The status page: static files that need no token; the calls they make do.

The Content-Security-Policy confines their requests (https://www.w3.org/TR/CSP3/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from ipaddress import ip_address

from aiohttp import web

HOME, NODE_HOME = "/ui/", "/ui/node/"
"""The path of a site's own page, and of a node's page at a gateway."""
_INDEX = "index.html"
_PORT = re.compile(r":[0-9]*$")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Pages:
    """The files of pages, read once from the folder `ui` of each package."""

    def __init__(self, packages: Mapping[str, str]) -> None:
        """Read the files of `packages`, given by the path to serve each at."""
        self._files: dict[str, tuple[bytes, str]] = {}
        for home, package in packages.items():
            for file in files(package).joinpath("ui").iterdir():
                if (media_type := _TYPES.get(file.name.rpartition(".")[2])) is not None:
                    self._files[home + file.name] = (file.read_bytes(), media_type)

    def response_for(self, request: web.BaseRequest) -> web.Response | None:
        """Return the file for a request, None if there is none."""
        if request.method not in ("GET", "HEAD"):
            return None
        if request.path in ("/", HOME.rstrip("/")):
            return web.Response(status=307, headers={"Location": HOME})
        path = request.path
        file = self._files.get(path + _INDEX if path.endswith("/") else path)
        if file is None:
            return None
        content, media_type = file
        return web.Response(body=content, headers={**_HEADERS, "Content-Type": media_type})


def is_foreign(request: web.BaseRequest) -> bool:
    """Return whether a page of another origin sent a request, or one under a foreign host name.

    A browser sends the origin (https://fetch.spec.whatwg.org/#origin-header). If an attacker's name
    resolves to the loopback address, origin and host are equal. So a connection without TLS, which
    is local, accepts no public DNS name; with TLS the certificate decides.
    """
    host = request.headers.get("Host", "")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        return True
    return "." in host and _is_plain_tcp(request) and _is_public_name(host)


def _is_plain_tcp(request: web.BaseRequest) -> bool:
    transport = request.transport
    if transport is None or transport.get_extra_info("sslcontext") is not None:
        return False
    return not isinstance(transport.get_extra_info("sockname"), str)


def _is_public_name(host: str) -> bool:
    """Return whether a Host with a dot is a DNS name outside of localhost."""
    name = _PORT.sub("", host).strip("[]")
    try:
        ip_address(name)
    except ValueError:
        return not name.lower().rstrip(".").endswith(".localhost")
    return False
