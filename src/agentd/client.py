"""Talking to a daemon from a command line, over its socket or over TCP with a token.

The standard library's HTTP client: a command that starts in a tenth of a second needs none
of what a larger one offers.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from agentd.core.devices import DeviceId
from agentd.core.partition import Split
from agentd.core.slots import MEM

DEFAULT_SOCKET = "/run/agentd/agentd.sock"
DEFAULT_CONFIG = "/etc/agentd/agent.toml"


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
            raise ValueError("is no address; allowed: http://HOST:PORT, https://HOST:PORT")
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


def socket_of(config: str | None) -> str:
    """Return the socket that a configuration names, without reading the rest of it."""
    named = config or os.environ.get("AGENTD_CONFIG")
    if from_env := os.environ.get("AGENTD__RPC__SOCKET"):
        return from_env
    path = Path(named or DEFAULT_CONFIG)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if named:
            why = getattr(error, "strerror", None) or f"is no TOML: {error}"
            raise RpcProblem({"code": "Config", "detail": f"{path}: {why}"}) from None
        return DEFAULT_SOCKET
    return str(content.get("rpc", {}).get("socket", DEFAULT_SOCKET))


def held_under(split: Split, socket_path: Path) -> list[dict[str, Any]]:
    """Return what running kernels would hold back if `split` were in force."""
    client = Client(str(socket_path))
    owners = {k["kernel_id"]: k for k in client.call("GET", "/v1/kernels")}
    held = []
    for row in client.call("GET", "/v1/devices"):
        device = split.inventory.by_stable_id.get(row["stable_id"])
        device_id = device.device_id if device else DeviceId(row["device_name"], row["id"])
        for holder in row["holders"]:
            kernel = owners[holder["kernel_id"]]
            slots = kernel["allocation"].get(row["device_name"], {})
            slot = next((s for s, ids in slots.items() if row["id"] in ids), row["slot"])
            agents = split.agents_of(device_id)
            if device is None or device.gone:
                reason = "the device is gone"
            elif device.slot != slot:
                reason = f"holds {slot}; the device would offer {device.slot}"
            elif kernel["agent_id"] not in agents and row["device_name"] != MEM:
                reason = f"the device would be of {', '.join(agents) or 'no agent'}"
            else:
                continue
            held.append(
                {
                    "device": str(device_id),
                    "kernel_id": holder["kernel_id"],
                    "agent_id": kernel["agent_id"],
                    "slot": slot,
                    "reason": reason,
                }
            )
    return held
