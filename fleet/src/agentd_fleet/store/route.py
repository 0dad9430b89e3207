"""Which node a kernel of the fleet is on: written before that node is asked for anything.

    (none) --create--> placing --the node has it--> placed --DELETE, or it is gone--> (none)
                         |  ^ taken over: new owner, same node
                         |
                         +--> (none)   refused for certain, or missing twice, with the grace between

- Whoever is about to ask a node for a kernel writes `placing` first. So of a route that is `placed`
  no request is under way, and if its node does not know the kernel, it can be dropped.
- While a route is `placing`, "I have no such kernel" says nothing: a request may be on its way.
- A DELETE writes before it asks, and makes a `placing` route `placed` before its node lets go of
  the kernel. So what it drops is never a route by which somebody else still asks.
- A route of a newer schema is changed by nobody here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from agentd.core.names import is_name, name_or_empty
from agentd.core.slots import SlotName
from agentd.errors import Unavailable
from agentd_fleet.view.fleet_view import FleetNode


class StoreAway(Unavailable):
    """Where the fleet is kept cannot be asked: what is shown is old, and nothing is placed."""

    code = "FleetStoreUnavailable"


SCHEMA = 1


class RouteUnreadable(Unavailable):
    """What is kept as the route of this kernel id cannot be read here; no other id suffers by it.

    `node_id` is the node that it names, if it names one.
    """

    code = "RouteUnreadable"

    def __init__(
        self, kernel_id: str, why: str, value: bytes, revision: int, *, is_newer: bool = False
    ) -> None:
        self.kernel_id, self.value, self.revision = kernel_id, value, revision
        self.is_newer = is_newer
        self.node_id = _node_in(value)
        super().__init__(
            f"the route of kernel {kernel_id} cannot be read by this gateway: {why}; name the"
            " kernel's node with ?node=ID"
        )

    def facts(self) -> dict[str, object]:
        return {"kernel_id": self.kernel_id}


class RouteProgress(StrEnum):
    """How far a create has come."""

    PLACING = "placing"
    """The node was asked, or is about to be; whether it has the kernel is not known."""
    PLACED = "placed"


class KernelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The node of one kernel id, and who is at work on it.

    `owner` is new whenever somebody takes it over, so that no two values are alike. As long as a
    route is `placing`, only who owns it may have it lead to another node.
    """

    schema: int = SCHEMA
    kernel_id: str
    node_id: str
    agent_id: str
    request_hash: str
    owner: str
    progress: RouteProgress = RouteProgress.PLACING
    created_by: str = ""


class Kept(NamedTuple):
    """A route as it stands in the store, and the revision by which to replace it."""

    route: KernelRoute
    revision: int


class _RouteHeader(msgspec.Struct, frozen=True):
    schema: int = SCHEMA


class _Lead(msgspec.Struct, frozen=True):
    node_id: str = ""


def read_route(kernel_id: str, value: bytes, revision: int) -> Kept:
    """Return what is kept of a kernel id.

    Raises:
        RouteUnreadable: it is of a newer schema, of another id, or no route at all.
    """
    try:
        if (schema := msgspec.json.decode(value, type=_RouteHeader).schema) > SCHEMA:
            why = f"schema {schema} is newer than this gateway's, {SCHEMA}"
            raise RouteUnreadable(kernel_id, why, value, revision, is_newer=True)
        route = msgspec.json.decode(value, type=KernelRoute)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RouteUnreadable(kernel_id, str(error), value, revision) from None
    names = (route.kernel_id, route.node_id, route.agent_id)
    if route.kernel_id != kernel_id or not all(map(is_name, names)):
        raise RouteUnreadable(kernel_id, "it is that of something else", value, revision)
    return Kept(route, revision)


def _node_in(value: bytes) -> str:
    try:
        return name_or_empty(msgspec.json.decode(value, type=_Lead).node_id)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class Store(Protocol):
    """Where a fleet remembers routes and slot types, and from where it hears of nodes.

    Every method raises `Unavailable` while the store cannot be asked.
    """

    def why_not_live(self) -> str:
        """Return why what is heard of nodes may be old; empty if it is not."""

    async def route(self, kernel_id: str) -> Kept | None:
        """Return where a kernel is.

        Raises:
            RouteUnreadable: it cannot be read.
        """

    async def keep(self, route: KernelRoute, expected: int) -> int | None:
        """Write a route over the one of this revision (0: there is none); None: it is another."""

    async def rewrite(self, unread: RouteUnreadable) -> int | None:
        """Write what cannot be read as it is, as `keep` does: nothing that it says changes."""

    async def drop(self, kernel_id: str, expected: int) -> bool:
        """Remove the route of this revision; tell whether it was that."""

    def routes(self) -> AsyncIterator[list[Kept]]:
        """Yield all routes that can be read, a page at a time."""

    async def unlearn(self, name: SlotName) -> None:
        """Have all gateways forget a slot type."""

    async def forget(self, node: FleetNode) -> bool:
        """Drop what is kept of a node, its routes too; it comes back if it is heard of again.

        False says that it is heard of, and that nothing of it was forgotten.
        """

    async def run(self) -> None:
        """Follow the nodes and tell the state of them, until cancelled."""
