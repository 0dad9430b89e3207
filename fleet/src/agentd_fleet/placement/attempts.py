"""Attempts: one node is called for one kernel until the outcome is known."""

from __future__ import annotations

import asyncio
import secrets
import time
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.error_codes import Scope
from agentd.errors import AgentdError, OutcomeUnknown, Refused, RequestTimeout
from agentd_fleet.nodes.calls import (
    CREATE_TIMEOUT_S,
    NodeAnswer,
    NodeAnswerLost,
    NodeNotCalled,
)
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.store.route import KernelRoute, StoredRoute
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode


class PlacementTimeouts(msgspec.Struct, frozen=True):
    """Time limits of placements in seconds; tests use shorter ones."""

    retry_for_s: float = 10.0
    """The time in which a lost answer is requested again before the caller gets an error."""
    retry_pause_s: float = 0.3
    takeover_after_s: float = 2.0
    """The time in which another gateway's route may stay unchanged before it is taken over."""
    send_within_s: float = 20.0
    """The time after the write of a route in which a request may be sent under it."""
    sweep_period_s: float = 15.0
    absent_for_s: float = 90.0
    """The time in which a node must lack a kernel before the kernel counts as never created.

    It is longer than a request under the same route can be in progress: it is sent within
    `send_within_s`, abandoned by TCP after 20 s, and by a node that answers after 10 s for its
    header and 30 s for its body.
    """


class PlacementUnknown(OutcomeUnknown):
    """It is unknown whether a node has a kernel; repeating the request resolves it."""

    def __init__(self, route: KernelRoute, reason: object) -> None:
        self.node_id = route.node_id
        super().__init__(
            f"unknown whether kernel {route.kernel_id} was created ({reason}); retry with this"
            " kernel_id, or inspect the node once it is available",
            route.kernel_id,
        )

    def facts(self) -> dict[str, object]:
        return {"kernel_id": self.kernel_id, "node_id": self.node_id}


class RouteTakenOver(PlacementUnknown):
    """Another gateway has taken over a kernel id, or may have: no failure of the node."""


def repeated_refusal(answer: NodeAnswer, route: KernelRoute) -> AgentdError:
    """Return a node's refusal after an earlier call for the kernel.

    One of the moment proves nothing, nor does one of the transport or of a newer version: the node
    has not looked for the kernel.
    """
    error = answer.error()
    is_unproven = error.scope is Scope.MOMENT or isinstance(error, (Refused, RequestTimeout))
    return PlacementUnknown(route, error) if is_unproven else error


def node_of_route(state: FleetState, route: KernelRoute) -> FleetNode:
    """Return the node of a route.

    Raises:
        NodeNotCalled: the node has not reported to this gateway.
    """
    node = state.node(route.node_id)
    if node is None or not node.url:
        raise NodeNotCalled(f"node {route.node_id} has not reported to this gateway")
    return node


class AttemptRunner:
    """Calls nodes for kernels, each under its route."""

    def __init__(self, backend: FleetBackend, timeouts: PlacementTimeouts) -> None:
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._timeouts = timeouts

    async def run(
        self, caller: Caller, request: PlacementRequest, stored: StoredRoute, began_at: float
    ) -> tuple[NodeAnswer, StoredRoute]:
        """Call a node for a kernel until it answers; return the answer and the current route.

        Before each repetition the route is written again: a gateway that resolved it meanwhile, or
        took it over, must not miss the call. `began_at` is when the route was about to be written.

        Raises:
            NodeNotCalled: the node cannot be called and was not called.
            PlacementUnknown: the node was called and does not answer, or the store does not.
            AgentdError: the node was called before, and refuses now.
            RouteTakenOver: another gateway works on it, or may do so: this one was suspended.
        """
        route, deadline = stored.route, boottime_s() + self._timeouts.retry_for_s
        node, is_certain = node_of_route(self._state, route), True
        while True:
            if boottime_s() - began_at > self._timeouts.send_within_s:
                raise RouteTakenOver(route, "this gateway was suspended")
            try:
                answer = await self._call_node(caller, request, route, node)
            except NodeNotCalled as error:
                if is_certain:
                    raise
                reason = str(error)
            except NodeAnswerLost as error:
                is_certain, reason = False, str(error)
            else:
                if answer.is_error and not is_certain:
                    raise repeated_refusal(answer, route)
                return answer, stored
            if boottime_s() > deadline:
                raise PlacementUnknown(route, reason)
            await asyncio.sleep(self._timeouts.retry_pause_s)
            began_at = boottime_s()
            stored = await self.renew(stored)

    async def renew(self, stored: StoredRoute) -> StoredRoute:
        """Write a route again, before another call under it.

        Raises:
            PlacementUnknown: the store does not answer.
            RouteTakenOver: another gateway works on it.
        """
        own_route = replace(stored.route, owner=secrets.token_hex(8))
        try:
            revision = await self._store.put_route(own_route, stored.revision)
        except AgentdError as error:
            raise PlacementUnknown(own_route, error) from error
        if revision is None:
            raise RouteTakenOver(own_route, "another gateway works on it")
        return StoredRoute(own_route, revision)

    async def _call_node(
        self, caller: Caller, request: PlacementRequest, route: KernelRoute, node: FleetNode
    ) -> NodeAnswer:
        """Call the node once, for as long as it is ready: a pull may take a while."""
        answer = await self._nodes.call(
            node,
            caller,
            "POST",
            creates_path(route.agent_id),
            body=request.body,
            headers=request.headers,
            patience_s=CREATE_TIMEOUT_S,
        )
        return _require_kernel_id(answer, route)


def _require_kernel_id(answer: NodeAnswer, route: KernelRoute) -> NodeAnswer:
    """Check that an answer names the kernel, or is a problem.

    Raises:
        NodeAnswerLost: the answer is malformed.
    """
    if answer.is_error:
        return answer
    if answer.content().get("kernel_id") != route.kernel_id:
        raise NodeAnswerLost(f"node {route.node_id} answered for another kernel")
    return answer


def boottime_s() -> float:
    """Return monotonic seconds that include suspension of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def creates_path(agent_id: str) -> str:
    """Return the path for creates of an agent."""
    return f"/v1/agents/{quote(agent_id, safe='')}/kernels"
