"""The route of a kernel: the node it is on, written before that node is called.

(none) --create--> placing --the node has it--> placed --DELETE, or it is gone--> (none)
|  ^ taken over: new owner, same node
|
+--> (none)   refused for certain, or missing twice, with the grace between

- A gateway writes `placing` before it calls a node for a kernel. So no request is in progress under
a `placed` route, and if its node does not know the kernel, the route can be dropped.
- While a route is `placing`, "unknown kernel" proves nothing: a request may be in progress.
- A DELETE writes first, and makes a `placing` route `placed` before its node removes the kernel. So
it never drops a route under which another gateway still calls.
- A route of a newer schema is never changed here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec

from agentd.core.names import is_name, name_or_empty
from agentd.core.slots import SlotName
from agentd.errors import Unavailable
from agentd_fleet.view.fleet_view import Cordon, FleetNode


class StoreUnavailable(Unavailable):
    """The fleet's store is unavailable: views are outdated, and no kernel is placed."""

    code = "FleetStoreUnavailable"


SCHEMA = 1


class RouteUnreadable(Unavailable):
    """The route of this kernel id cannot be read here; other ids are not affected.

    `node_id` is the node that it names, if it names one.
    """

    code = "RouteUnreadable"

    def __init__(
        self, kernel_id: str, reason: str, value: bytes, revision: int, *, is_newer: bool = False
    ) -> None:
        self.kernel_id, self.value, self.revision = kernel_id, value, revision
        self.is_newer = is_newer
        self.node_id = _parse_node_id(value)
        super().__init__(
            f"unreadable route of kernel {kernel_id}: {reason};"
            " name the kernel's node with ?node=ID"
        )

    def facts(self) -> dict[str, object]:
        return {"kernel_id": self.kernel_id}


class RouteProgress(StrEnum):
    """The progress of a create."""

    PLACING = "placing"
    """The node was called, or is about to be; it is unknown whether it has the kernel."""
    PLACED = "placed"


class KernelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The node of one kernel id, and the owner of the route.

    Every takeover sets a new `owner`, so no two values are equal. While a route is `placing`, only
    its owner may change its node. `attempt` is that of the request which made the route, and of
    every call under it.
    """

    schema: int = SCHEMA
    kernel_id: str
    node_id: str
    agent_id: str
    request_hash: str
    owner: str
    progress: RouteProgress = RouteProgress.PLACING
    created_by: str = ""
    attempt: str = ""


class StoredRoute(msgspec.Struct, frozen=True):
    """A stored route and its revision, required to replace it."""

    route: KernelRoute
    revision: int


class _RouteHeader(msgspec.Struct, frozen=True):
    schema: int = SCHEMA


class _NodeMember(msgspec.Struct, frozen=True):
    node_id: str = ""


def read_route(kernel_id: str, value: bytes, revision: int) -> StoredRoute:
    """Parse the stored route of a kernel id.

    Raises:
        RouteUnreadable: it has a newer schema, belongs to another id, or is malformed.
    """
    try:
        if (schema := msgspec.json.decode(value, type=_RouteHeader).schema) > SCHEMA:
            reason = f"schema {schema} is newer than this gateway's, {SCHEMA}"
            raise RouteUnreadable(kernel_id, reason, value, revision, is_newer=True)
        route = msgspec.json.decode(value, type=KernelRoute)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RouteUnreadable(kernel_id, str(error), value, revision) from None
    names = (route.kernel_id, route.node_id, route.agent_id)
    if route.kernel_id != kernel_id or not all(map(is_name, names)):
        raise RouteUnreadable(kernel_id, "it belongs to another kernel id", value, revision)
    return StoredRoute(route, revision)


def _parse_node_id(value: bytes) -> str:
    try:
        return name_or_empty(msgspec.json.decode(value, type=_NodeMember).node_id)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class Store(Protocol):
    """The store of a fleet's routes and slot types, and the source of its nodes' reports.

    Every method raises `Unavailable` while the store is unavailable.
    """

    def stale_reason(self) -> str:
        """Return why reports of nodes may be outdated, empty if they are current."""

    async def route(self, kernel_id: str) -> StoredRoute | None:
        """Return the route of a kernel.

        Raises:
            RouteUnreadable: the route cannot be read.
        """

    async def put_route(self, route: KernelRoute, expected: int) -> int | None:
        """Write a route over this revision (0: none exists); None if it has another."""

    async def rewrite(self, unread: RouteUnreadable) -> int | None:
        """Rewrite an unreadable route unchanged, under a new revision."""

    async def delete_route(self, kernel_id: str, expected: int) -> bool:
        """Remove the route of this revision; return whether it had that."""

    def routes(self) -> AsyncIterator[list[StoredRoute]]:
        """Yield all readable routes, a page at a time."""

    async def forget_slot_type(self, name: SlotName) -> None:
        """Make all gateways forget a slot type."""

    async def set_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        """Make all gateways keep new kernels off a node, or with None end that; kept for good."""

    async def forget(self, node: FleetNode) -> bool:
        """Forget a node and its routes; it returns with its next report.

        Returns:
            False if the node is reporting; then nothing was forgotten.
        """

    async def run(self) -> None:
        """Follow the nodes and update the state, until cancelled."""
