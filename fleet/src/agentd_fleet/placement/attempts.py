"""Attempts: one node is called for one kernel until the outcome is known."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.errors import NodeUnavailable
from agentd_fleet.nodes.calls import (
    CREATE_PATIENCE_S,
    NeverAsked,
    NodeAnswer,
    NodeAnswerLost,
)
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.store.route import Kept, KernelRoute
from agentd_fleet.view.fleet_view import FleetNode


class PlacementTimeouts(msgspec.Struct, frozen=True):
    """Time limits of placements in seconds; tests use shorter ones."""

    insist_s: float = 10.0
    """The time in which a lost answer is requested again before the caller gets an error."""
    again_s: float = 0.3
    join_s: float = 2.0
    """The time in which another gateway's route may stay unchanged before it is taken over."""
    fresh_s: float = 20.0
    """The time after the write of a route in which a request may be sent under it."""
    sweep_s: float = 15.0
    settled_s: float = 90.0
    """The time in which a node must lack a kernel before the kernel counts as never created.

    It is longer than a request under the same route can be in progress: it is sent within
    `fresh_s`, abandoned by TCP after 20 s, and by a node that answers after 10 s for its header and
    30 s for its body.
    """


class Tried(msgspec.Struct, frozen=True):
    """A node's answer, the current route, and whether the node was called only once."""

    answer: NodeAnswer
    kept: Kept
    is_certain: bool


class PlacementUnknown(NodeUnavailable):
    """It is unknown whether a node has a kernel; repeating the request resolves it."""

    def __init__(self, kernel_id: str, node_id: str, reason: str) -> None:
        self.kernel_id, self.node_id = kernel_id, node_id
        super().__init__(
            f"unknown whether kernel {kernel_id} was created ({reason}); retry with this"
            " kernel_id, or inspect the node once it is available"
        )

    def facts(self) -> dict[str, object]:
        return {"kernel_id": self.kernel_id, "node_id": self.node_id}


class Overtaken(PlacementUnknown):
    """Another gateway has taken over a kernel id."""


class Asker:
    """Calls nodes for kernels, each under its route."""

    def __init__(self, backend: FleetBackend, timeouts: PlacementTimeouts) -> None:
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._timeouts = timeouts

    def known(self, route: KernelRoute) -> FleetNode:
        """Return the node of a route.

        Raises:
            PlacementUnknown: the node is unknown.
        """
        node = self._state.node(route.node_id)
        if node is None or not node.url:
            raise PlacementUnknown(
                route.kernel_id, route.node_id, f"node {route.node_id} is unavailable"
            )
        return node

    async def ask(
        self, caller: Caller, request: PlacementRequest, stored: Kept, began_at: float
    ) -> Tried:
        """Call a node for a kernel until it answers.

        Before each repetition the route is written again: a gateway that resolved it meanwhile, or
        took it over, must not miss the call. `began_at` is when the route was about to be written.

        Raises:
            NeverAsked: the node cannot be called and was not called.
            PlacementUnknown: the node was called and does not answer, or this gateway was suspended
                and others may have resolved the route.
        """
        route, deadline = stored.route, now() + self._timeouts.insist_s
        node, is_certain = self.known(route), True
        while True:
            if now() - began_at > self._timeouts.fresh_s:
                raise PlacementUnknown(route.kernel_id, route.node_id, "this gateway was suspended")
            try:
                answer = await self._call_node(caller, request, route, node)
                return Tried(answer, stored, is_certain=is_certain)
            except NeverAsked as error:
                if is_certain:
                    raise
                reason = str(error)
            except NodeAnswerLost as error:
                is_certain, reason = False, str(error)
            if now() > deadline:
                raise PlacementUnknown(route.kernel_id, route.node_id, reason)
            await asyncio.sleep(self._timeouts.again_s)
            own_route, began_at = replace(route, owner=secrets.token_hex(8)), now()
            revision = await self._store.keep(own_route, stored.revision)
            if revision is None:
                raise Overtaken(route.kernel_id, route.node_id, "another gateway works on it")
            stored = Kept(own_route, revision)

    async def _call_node(
        self, caller: Caller, request: PlacementRequest, route: KernelRoute, node: FleetNode
    ) -> NodeAnswer:
        """Call the node once, for as long as it is ready: a pull may take a while."""
        answer = await self._nodes.ask(
            node,
            caller,
            "POST",
            path_of(route.agent_id),
            body=request.body,
            headers=request.headers,
            patience_s=CREATE_PATIENCE_S,
            unheard_s=self._timeouts.again_s,
        )
        return _require_kernel_id(answer, route)


def _require_kernel_id(answer: NodeAnswer, route: KernelRoute) -> NodeAnswer:
    """Check that an answer names the kernel, or is a problem.

    Raises:
        NodeAnswerLost: the answer is malformed.
    """
    if answer.is_error:
        return answer
    try:
        is_valid = json.loads(answer.body)["kernel_id"] == route.kernel_id
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise NodeAnswerLost(f"node {route.node_id} returned a malformed answer")
    return answer


def now() -> float:
    """Return monotonic seconds that include suspension of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def path_of(agent_id: str) -> str:
    """Return the path for creates of an agent."""
    return f"/v1/agents/{quote(agent_id, safe='')}/kernels"
