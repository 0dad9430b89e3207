"""Which node a kernel of the fleet is on: written before that node is asked for anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from agentd.core.slots import SlotName
from agentd.errors import AgentdError, Unavailable
from agentd_fleet.view import FleetNode


class StoreAway(Unavailable):
    """Where the fleet is kept cannot be asked: what is shown is old, and nothing is placed."""

    code = "FleetStoreUnavailable"


class BadRoute(AgentdError):
    """What is kept as a route is none."""


class Progress(StrEnum):
    """How far a create has come."""

    PLACING = "placing"
    """The node was asked, or is about to be; whether it has the kernel is not known."""
    PLACED = "placed"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The node of one kernel id, and who is at work on it.

    `owner` is new whenever somebody takes it over, so that no two values are alike. As long as a
    route is `placing`, only who owns it may have it lead to another node.
    """

    kernel_id: str
    node_id: str
    agent_id: str
    request_hash: str
    owner: str
    progress: Progress = Progress.PLACING
    created_by: str = ""


class Kept(NamedTuple):
    """A route as it stands in the store, and the revision by which to replace it."""

    route: Route
    revision: int


class Store(Protocol):
    """Where a fleet remembers routes and slot types, and from where it hears of nodes.

    Every method raises `Unavailable` while the store cannot be asked.
    """

    def why_not_live(self) -> str:
        """Return why what is heard of nodes may be old; empty if it is not."""

    async def route(self, kernel_id: str) -> Kept | None:
        """Return where a kernel is."""

    async def keep(self, route: Route, expected: int) -> int | None:
        """Write a route over the one of this revision (0: there is none); None: it is another."""

    async def drop(self, kernel_id: str, expected: int) -> bool:
        """Remove the route of this revision; tell whether it was that."""

    def routes(self) -> AsyncIterator[list[Kept]]:
        """Yield all routes, a page at a time."""

    async def unlearn(self, name: SlotName) -> None:
        """Have all gateways forget a slot type."""

    async def forget(self, node: FleetNode) -> None:
        """Drop what is kept of a node; it comes back if it is heard of again."""

    async def run(self) -> None:
        """Follow the nodes and tell the state of them, until cancelled."""
