"""Asking one node for one kernel, until it is known what came of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.errors import NodeUnavailable
from agentd_fleet.nodes.calls import (
    CREATE_PATIENCE_S,
    NeverAsked,
    NodeAnswer,
    NodeAnswerLost,
    Nodes,
)
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.store.route import Kept, KernelRoute, Store
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode


@dataclass(frozen=True)
class PlacementTimeouts:
    """How long to insist, in seconds; shorter ones are for tests."""

    insist_s: float = 10.0
    """How long a node whose answer was lost is asked again before the caller is told."""
    again_s: float = 0.3
    join_s: float = 2.0
    """How long a route that another gateway is at work on may stand still before it is taken."""
    fresh_s: float = 20.0
    """How long after a route began to be written a request may be sent by it."""
    sweep_s: float = 15.0
    settled_s: float = 90.0
    """How long a node has to go without a kernel before it never had it. Longer than a request by
    the same route can be under way: sent within `fresh_s`, given up by TCP after 20 s, and by a
    node that answers after 10 s for its header and 30 s for its body."""


class Tried(NamedTuple):
    """A node's answer, the route as it stands then, and whether the node was asked only once."""

    answer: NodeAnswer
    kept: Kept
    is_certain: bool


class PlacementUnknown(NodeUnavailable):
    """A node may have a kernel, or not; the same request finds out."""

    def __init__(self, kernel_id: str, node_id: str, why: str) -> None:
        self.kernel_id, self.node_id = kernel_id, node_id
        super().__init__(
            f"whether kernel {kernel_id} was created is not known ({why}); ask again with this"
            " kernel_id, or look at the node when it is back"
        )

    def facts(self) -> dict[str, object]:
        return {"kernel_id": self.kernel_id, "node_id": self.node_id}


class Overtaken(PlacementUnknown):
    """Another gateway is at work on a kernel id by now."""


class Asker:
    """Asks nodes for kernels, each under the route that leads to it."""

    def __init__(
        self, store: Store, state: FleetState, nodes: Nodes, pace: PlacementTimeouts
    ) -> None:
        self._store = store
        self._state = state
        self._nodes = nodes
        self._pace = pace

    def known(self, route: KernelRoute) -> FleetNode:
        """Return the node that a route leads to.

        Raises:
            PlacementUnknown: it is not heard of.
        """
        node = self._state.node(route.node_id)
        if node is None or not node.url:
            raise PlacementUnknown(route.kernel_id, route.node_id, f"node {route.node_id} is away")
        return node

    async def ask(self, caller: Caller, order: PlacementRequest, kept: Kept, began: float) -> Tried:
        """Ask a node for a kernel until it answers.

        Before it is asked again the route is written again: whoever settled it meanwhile, or took
        it over, must not find that the node was asked behind its back. `began` is when the route
        was about to be written.

        Raises:
            NeverAsked: it cannot be asked, and has not been.
            PlacementUnknown: it was asked, and does not answer; or this gateway has slept, and
                others may have settled the route meanwhile.
        """
        route, end = kept.route, now() + self._pace.insist_s
        node, is_certain = self.known(route), True
        while True:
            if now() - began > self._pace.fresh_s:
                raise PlacementUnknown(route.kernel_id, route.node_id, "this gateway was stopped")
            try:
                answer = await self._once(caller, order, route, node)
                return Tried(answer, kept, is_certain=is_certain)
            except NeverAsked as error:
                if is_certain:
                    raise
                why = str(error)
            except NodeAnswerLost as error:
                is_certain, why = False, str(error)
            if now() > end:
                raise PlacementUnknown(route.kernel_id, route.node_id, why)
            await asyncio.sleep(self._pace.again_s)
            mine, began = replace(route, owner=secrets.token_hex(8)), now()
            revision = await self._store.keep(mine, kept.revision)
            if revision is None:
                raise Overtaken(route.kernel_id, route.node_id, "another is at work on it")
            kept = Kept(mine, revision)

    async def _once(
        self, caller: Caller, order: PlacementRequest, route: KernelRoute, node: FleetNode
    ) -> NodeAnswer:
        """Ask once, for as long as the node is heard of: an image may take its time to come."""
        try:
            async with self._state.patience(node.node_id, CREATE_PATIENCE_S, self._pace.again_s):
                answer = await self._nodes.ask(
                    node,
                    caller,
                    "POST",
                    path_of(route.agent_id),
                    body=order.body,
                    headers=order.headers,
                    patience_s=CREATE_PATIENCE_S,
                )
        except TimeoutError:
            raise NodeAnswerLost(f"node {node.node_id} went away") from None
        return _readable(answer, route)


def _readable(answer: NodeAnswer, route: KernelRoute) -> NodeAnswer:
    """Return an answer that says which kernel there is now, or why none.

    Raises:
        NodeAnswerLost: it does not.
    """
    if answer.is_error:
        return answer
    try:
        is_it = json.loads(answer.body)["kernel_id"] == route.kernel_id
    except (ValueError, KeyError, TypeError, RecursionError):
        is_it = False
    if not is_it:
        raise NodeAnswerLost(f"node {route.node_id} gave an answer that cannot be read")
    return answer


def now() -> float:
    """Return seconds that go on while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def path_of(agent_id: str) -> str:
    """Return the path by which an agent is asked for kernels."""
    return f"/v1/agents/{quote(agent_id, safe='')}/kernels"
