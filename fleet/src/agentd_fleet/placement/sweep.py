"""The sweep: makes routes match the nodes' kernels, after lost creates and removals."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from agentd.client.calls import Call
from agentd.client.paths import at
from agentd.errors import AgentdError, NodeUnavailable
from agentd_fleet.nodes.calls import GATEWAY, Nodes
from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.placement.placer import Placer
from agentd_fleet.store.route import Kept, RouteProgress, Store
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode
from agentd_fleet.view.reports import UNREADABLE

log = structlog.get_logger()

PATIENCE_S = 5.0
AT_ONCE = 8
"""Nodes that are called concurrently."""
COMING = ("preparing", "pulling", "creating")
"""States of kernels that may still fail."""
_Key = tuple[str, int]


class _Row(msgspec.Struct, frozen=True):
    kernel_id: str
    state: str


ROWS = msgspec.json.Decoder(list[_Row])


class Sweep:
    """Checks all routes periodically; any number of gateways may do so concurrently.

    Each ready node is called for one list. A route that has just changed is being worked on. A
    route is dropped only if its node lacked the kernel twice, with more time in between than a
    request can be in progress, and answered every time meanwhile. The time is that of this
    process's monotonic clock. Routes to nodes that are not ready wait for their return.
    """

    def __init__(
        self, store: Store, state: FleetState, nodes: Nodes, placer: Placer, pace: PlacementTimeouts
    ) -> None:
        self._store = store
        self._state = state
        self._nodes = nodes
        self._placer = placer
        self._pace = pace
        self._seen: dict[_Key, float] = {}
        self._absent: dict[_Key, float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.once()
            except AgentdError as error:
                log.info("sweep.postponed", reason=str(error))
            await asyncio.sleep(self._pace.sweep_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    async def once(self) -> None:
        """Check every route once."""
        now = asyncio.get_running_loop().time()
        routes: defaultdict[str, list[Kept]] = defaultdict(list)
        async for page in self._store.routes():
            for kept in page:
                routes[kept.route.node_id].append(kept)
        keys = [_key(kept) for some in routes.values() for kept in some]
        self._seen = {key: self._seen.get(key, now) for key in keys}
        self._absent = {key: at for key, at in self._absent.items() if key in self._seen}
        turn = asyncio.Semaphore(AT_ONCE)

        async def settled(node_id: str, some: Sequence[Kept]) -> None:
            async with turn:
                await self._settled(node_id, some, now)

        await asyncio.gather(*(settled(*item) for item in routes.items()))

    async def _settled(self, node_id: str, some: Sequence[Kept], now: float) -> None:
        """Check the routes to a node; an error affects no other node's routes."""
        node = self._state.node(node_id)
        grown = [
            kept
            for kept in some
            if kept.route.progress is RouteProgress.PLACED
            or now - self._seen[_key(kept)] >= 2 * self._pace.insist_s
        ]
        if node is None or not grown:
            return
        try:
            states = await self._states(node)
            if states is None:
                for kept in some:
                    self._absent.pop(_key(kept), None)
                return
            for kept in grown:
                await self._settle(kept, states)
        except AgentdError as error:
            log.info("sweep.postponed", node_id=node_id, reason=str(error))
        except UNREADABLE as error:
            log.warning("route.resolve_failed", node_id=node_id, reason=repr(error))

    async def _states(self, node: FleetNode) -> Mapping[str, str] | None:
        """Return the states of a node's kernels, None if it does not answer.

        Raises:
            UNREADABLE: the answer is malformed.
        """
        if not node.is_asked:
            return None
        states: dict[str, str] = {}
        page: Call[Any] | None = Call("GET", at("kernels"), is_paged=True)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while page is not None:
                    answer = await self._nodes.ask(
                        node, GATEWAY, page.method, page.path, patience_s=PATIENCE_S
                    )
                    if answer.is_error:
                        return None
                    for row in ROWS.decode(answer.body):
                        states[row.kernel_id] = row.state
                    page = page.next_page(answer.headers.get("Link"))
        except (NodeUnavailable, TimeoutError):
            return None
        return states

    async def _settle(self, kept: Kept, states: Mapping[str, str]) -> None:
        route, key = kept.route, _key(kept)
        if self._placer.is_busy(route.kernel_id):
            return
        async with self._placer.alone(route.kernel_id):
            if (state := states.get(route.kernel_id)) is not None:
                self._absent.pop(key, None)
                if route.progress is RouteProgress.PLACING and state not in COMING:
                    await self._store.keep(
                        replace(route, progress=RouteProgress.PLACED), kept.revision
                    )
                    log.info("route.confirmed", kernel_id=route.kernel_id, node_id=route.node_id)
                return
            now = asyncio.get_running_loop().time()
            since = self._absent.setdefault(key, now)
            if now - since >= self._pace.settled_s:
                await self._store.drop(route.kernel_id, kept.revision)
                log.info("route.dropped", kernel_id=route.kernel_id, node_id=route.node_id)


def _key(kept: Kept) -> _Key:
    return kept.route.kernel_id, kept.revision
