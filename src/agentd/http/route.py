"""A route: one call of the API with its handler, parameters and responses.

A name in a path that cannot exist is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from agentd.core.access import Right
from agentd.core.devices import ID_PATTERN
from agentd.core.names import NAME, quote_untrusted
from agentd.core.slots import SLOT_NAME
from agentd.errors import (
    RequestError,
    UnknownAgent,
    UnknownClaim,
    UnknownDevice,
    UnknownEngine,
    UnknownKernel,
    UnknownNode,
    UnknownPlugin,
    UnknownRuntime,
    UnknownSlotType,
)
from agentd.http.bodies import Body
from agentd.http.queries import Query

Handler: TypeAlias = Callable[..., Awaitable[web.StreamResponse]]
"""A method that takes a request; bound for a server, unbound for a document."""


PROBE_PATHS = frozenset({"/livez", "/readyz"})


OPEN_PATHS = PROBE_PATHS | {"/v1/openapi.json", "/v1/whoami"}
"""Paths that are answered during the start."""


class Header(msgspec.Struct, frozen=True):
    """A header, with the JSON schema of its value."""

    name: str
    schema: Mapping[str, Any]
    description: str


class Media(msgspec.Struct, frozen=True):
    """A response that is not JSON: its media type, description and headers."""

    type: str
    description: str
    headers: tuple[Header, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """One call; `answers` maps each status to its model, None for an empty body."""

    method: str
    path: str
    handler: Handler
    answers: dict[int, Any]
    query: type[Query] = Query
    headers: tuple[Header, ...] = ()
    body: type[Body] | None = None
    right: Right | None = Right.LOOK
    """The right that a caller needs; None for public routes."""
    proxied_routes: tuple[Route, ...] = ()
    """Known routes behind a proxied one, which stand in its place in the document."""
    name: str = ""
    """The operation id; default: the handler's name, with `_of_agent` below an agent."""

    @property
    def action(self) -> str:
        """The name of the call in logs and events."""
        return self.handler.__name__

    @property
    def operation_id(self) -> str:
        """The operation id in the OpenAPI document, unique among all routes."""
        suffix = "_of_agent" if "agent}/" in self.path else ""
        return self.name or f"{self.action}{suffix}"

    @property
    def is_audited(self) -> bool:
        """Whether calls are audited: they change or run something."""
        return self.method != "GET" or SWITCHING_PROTOCOLS in self.answers


SWITCHING_PROTOCOLS = 101
"""The status of a WebSocket response (RFC 6455)."""


def _route(method: str, path: str, handler: Handler, answers: Any, **options: Any) -> Route:
    """Return a route; `answers` by status, or the model of a 200."""
    by_status = answers if isinstance(answers, dict) else {200: answers}
    return Route(method, path, handler, by_status, **options)


get, post, put = (partial(_route, method) for method in ("GET", "POST", "PUT"))
delete = partial(_route, "DELETE", answers={204: None})


class _Kind(msgspec.Struct, frozen=True):
    pattern: re.Pattern[str]
    noun: str
    unknown: type[RequestError]


_NAME = re.compile(NAME)
_KINDS: Mapping[str, _Kind] = {
    "agent": _Kind(_NAME, "agent", UnknownAgent),
    "claim": _Kind(_NAME, "claim", UnknownClaim),
    "device_name": _Kind(_NAME, "device", UnknownDevice),
    "engine": _Kind(_NAME, "engine", UnknownEngine),
    "id": _Kind(ID_PATTERN, "device", UnknownDevice),
    "kernel": _Kind(_NAME, "kernel", UnknownKernel),
    "node": _Kind(_NAME, "node", UnknownNode),
    "plugin": _Kind(_NAME, "plugin", UnknownPlugin),
    "runtime": _Kind(_NAME, "runtime", UnknownRuntime),
    "slot": _Kind(re.compile(SLOT_NAME), "slot", UnknownSlotType),
}
REST = "rest"
"""The path parameter that a gateway passes on; not a name."""


def parameter_schema(parameter: str) -> Mapping[str, Any]:
    """Return the JSON schema of a path parameter."""
    return {"type": "string", "pattern": f"^{_KINDS[parameter].pattern.pattern}$"}


def require_names(parameters: Mapping[str, str]) -> None:
    """Refuse a path with an invalid name.

    Raises:
        RequestError: an "unknown" error of the parameter's kind.
    """
    for parameter, value in parameters.items():
        if parameter != REST and not (kind := _KINDS[parameter]).pattern.fullmatch(value):
            raise kind.unknown(f"no {kind.noun} {quote_untrusted(value)}: it is not a valid name")
