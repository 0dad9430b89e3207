"""The command `agentctl ui`: the status page on a loopback port, relayed to a node or a gateway.

The port requires a token that is valid while the command runs. The token is on no command line:
the browser opens a file that only the caller can read, which redirects it. Or the address is
printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import tempfile
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentd.cli.output import CommandError, print_text
from agentd.client import Client
from agentd.errors import Unreachable
from agentd.program.command_line import Signalled

if TYPE_CHECKING:
    from aiohttp import web

    from agentd.client.asynchronous import AsyncClient

_FORWARDED_HEADERS = ("Last-Event-ID", "Content-Type", "Accept", "Prefer")
"""Request headers that are relayed to the daemon."""
_CONNECTION_HEADERS = (
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "server",
    "transfer-encoding",
)
"""Headers of answers that concern the connection and are not relayed."""
BODY_TIMEOUT_S = 30.0
_FILE_PATHS = re.compile(r"/|/ui|/ui/(node/)?[a-z0-9.]*")
"""Paths of the page's files, which need no token."""


@click.command("ui")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Loopback port. Default: a free one."
)
@click.option("--print", "is_printed", is_flag=True, help="Print the address; open no browser.")
@click.pass_obj
def ui(client: Client, port: int, is_printed: bool) -> None:
    """Open the status page in a browser.

    Serves the page while this command runs.

    \b
    agentctl ui
    agentctl ui --print --port 8080     # on a node; then: ssh -L 8080:127.0.0.1:8080 NODE
    """
    asyncio.run(_serve(client.asynchronous(), port, is_printed=is_printed))


async def _serve(client: AsyncClient, port: int, *, is_printed: bool) -> None:
    from aiohttp import web

    numbers = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, numbers.put_nowait, number)
    async with client, contextlib.AsyncExitStack() as stack:
        await client.whoami()
        relay = Relay(client)
        server = web.Server(relay.answer, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise CommandError(f"127.0.0.1:{port}: {error.strerror}") from None
        relay.host = f"127.0.0.1:{runner.addresses[0][1]}"
        address = f"http://{relay.host}/ui/#token={relay.token}"
        print_text(address if is_printed else f"http://{relay.host}/ui/ (Ctrl-C ends it)")
        if not is_printed:
            page = stack.enter_context(_redirect_file(address))
            # Some browsers run in the terminal, until they are left.
            if not await asyncio.to_thread(webbrowser.open, page.as_uri()):
                raise CommandError("no browser could be opened", ["print the address: --print"])
        raise Signalled(await numbers.get())


@contextlib.contextmanager
def _redirect_file(address: str) -> Iterator[Path]:
    """Write a file that redirects a browser and that only the caller can read."""
    with tempfile.TemporaryDirectory(prefix="agentctl-ui-") as folder:
        page = Path(folder) / "open.html"
        redirect = f'<meta http-equiv="refresh" content="0; url={escape(address)}">'
        page.touch(mode=0o600)
        page.write_text(f"<!doctype html><title>agentd</title>{redirect}", encoding="utf-8")
        yield page


class Relay:
    """A proxy of the daemon for one page; requests other than for its files need the token."""

    def __init__(self, client: AsyncClient) -> None:
        self.host = ""
        self.token = secrets.token_urlsafe(32)
        self._client = client

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        from agentd.http.problem_responses import problem_response
        from agentd.http.static import is_foreign

        port = self.host.rpartition(":")[2]
        if request.headers.get("Host") not in (self.host, f"localhost:{port}"):
            return problem_response("Forbidden", f"unknown host; expected {self.host}")
        if is_foreign(request):
            return problem_response("Forbidden", "cross-origin requests are refused")
        path, is_file = request.raw_path, False
        if not path.startswith("/"):
            return problem_response("BadRequest", "invalid request target; expected a path")
        if request.method == "GET" and _FILE_PATHS.fullmatch(name := path.partition("?")[0]):
            path, is_file = name, True
        credential = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not is_file and not secrets.compare_digest(credential, f"Bearer {self.token}".encode()):
            return problem_response(
                "Unauthorized", "missing or invalid token of this `agentctl ui`"
            )
        return await self._forward(request, path)

    async def _forward(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        from aiohttp import web

        from agentd.http.problem_responses import problem_response

        headers = {n: request.headers[n] for n in _FORWARDED_HEADERS if n in request.headers}
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read() or None
        except TimeoutError:
            return problem_response(
                "RequestTimeout", f"no complete body within {BODY_TIMEOUT_S:g} s"
            )
        response: web.StreamResponse | None = None
        try:
            async with self._client.forward(
                request.method, path, headers=headers, body=body
            ) as daemon_response:
                forwarded = {
                    name: value
                    for name, value in daemon_response.headers.items()
                    if name.lower() not in _CONNECTION_HEADERS
                }
                response = web.StreamResponse(status=daemon_response.status, headers=forwarded)
                await response.prepare(request)
                async for chunk in daemon_response.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except Unreachable as error:
            if response is None:
                return problem_response("RuntimeFailure", str(error))
            request.protocol.force_close()  # too late for a problem
            return response
