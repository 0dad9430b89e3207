"""Talking to a daemon from a command line, over its socket or over TCP with a token.

The standard library's HTTP client: a command that starts in a tenth of a second needs none
of what a larger one offers.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import click


class RpcProblem(click.ClickException):
    """An answer that is an error; shown as its detail, in one line."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        super().__init__(f"{content.get('code', 'error')}: {content.get('detail', content)}")

    def show(self, file: Any = None) -> None:  # noqa: ANN401 - click's signature
        del file
        if "--json" in itertools.takewhile(lambda word: word != "--", sys.argv):
            click.echo(json.dumps(self.content), err=True)
        else:
            click.echo(f"agentctl: {' '.join(self.format_message().split())}", err=True)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class Client:
    """Calls one daemon, over its socket or over TCP with a token."""

    def __init__(self, socket_path: str, url: str | None = None, token: str | None = None) -> None:
        self._socket_path = socket_path
        self._url = url
        self._token = token

    def open(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Call, and return the answer to be read.

        Raises:
            RpcProblem: the daemon refused, or cannot be reached.
        """
        sent = dict(headers or {})
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            connection = self._connection()
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                raise RpcProblem(_problem(response.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        return response

    def _unreachable(self, error: Exception) -> RpcProblem:
        where = self._url or self._socket_path
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return RpcProblem({"code": "Unreachable", "detail": f"{where}: {why}"})

    def call(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """Call, and return the JSON of the answer; None if it has none."""
        response = self.open(method, path, body)
        try:
            content = response.read()
            return json.loads(content) if content else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._url is None:
            return _UnixConnection(self._socket_path)
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("invalid address: expected http://HOST:PORT or https://HOST:PORT")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.hostname, parts.port)


def _problem(content: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"detail": content.decode(errors="replace")}
