"""A route: one call of the RPC, its handler, and what it takes and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from agentd.core.access import Right
from agentd.http.bodies import Body

Handler: TypeAlias = Callable[..., Awaitable[web.StreamResponse]]
"""A method that takes a request; bound in the table of a server, unbound in that of a document."""


PROBE_PATHS = frozenset({"/livez", "/readyz"})


OPEN_PATHS = PROBE_PATHS | {"/v1/openapi.json", "/v1/whoami"}
"""Answered while the daemon starts."""


class Parameter(msgspec.Struct, frozen=True):
    """A query parameter or a header, and the JSON schema of its value."""

    name: str
    schema: Mapping[str, Any]
    description: str
    is_repeatable: bool = False
    place: str = "query"


class Media(msgspec.Struct, frozen=True):
    """An answer that is no JSON: its media type, and what it is."""

    type: str
    description: str


class Route(msgspec.Struct, frozen=True):
    """One call: `answers` maps a status to what it carries (None: nothing)."""

    method: str
    path: str
    handler: Handler
    answers: dict[int, Any]
    takes: tuple[Parameter, ...] = ()
    body: type[Body] | None = None
    right: Right | None = Right.LOOK
    """What a caller needs; None: nothing, not even a token."""
    passes: tuple[Route, ...] = ()
    """The known calls among those that it passes on: they are described in its place."""
    name: str = ""
    """The operation id; by default the handler's name, and `_of_agent` where an agent is named."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The query parameters by name."""
        return {item.name: item for item in self.takes if item.place == "query"}

    @property
    def action(self) -> str:
        """What the call does, in the log and in events."""
        return self.handler.__name__

    @property
    def operation_id(self) -> str:
        """The name of the call in the OpenAPI document, unique among all routes."""
        suffix = "_of_agent" if "agent}/" in self.path else ""
        return self.name or f"{self.action}{suffix}"

    @property
    def is_audited(self) -> bool:
        """Whether each call is written down: it changes something, or runs something."""
        return self.method != "GET" or SWITCHED in self.answers


SWITCHED = 101
"""The status of an answer that is a WebSocket (RFC 6455)."""


def get(path: str, handler: Handler, answers: Any, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a GET; `answers` by status, or the model of a 200."""
    return Route("GET", path, handler, _by_status(answers), takes, **more)


def post(path: str, handler: Handler, answers: Any, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a POST; `answers` by status, or the model of a 200."""
    return Route("POST", path, handler, _by_status(answers), takes, **more)


def delete(path: str, handler: Handler, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a DELETE, which is answered with 204."""
    return Route("DELETE", path, handler, {204: None}, takes, **more)


def _by_status(answers: Any) -> dict[int, Any]:
    return answers if isinstance(answers, dict) else {200: answers}
