"""The sweep: makes routes match the nodes' kernels, after lost creates and removals."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from agentd.client.calls import Call
from agentd.client.paths import api_path
from agentd.errors import AgentdError, NodeUnavailable
from agentd_fleet.nodes.calls import GATEWAY
from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.placer import Placer
from agentd_fleet.store.route import RouteProgress, StoredRoute
from agentd_fleet.view.fleet_view import FleetNode
from agentd_fleet.view.reports import UNREADABLE

log = structlog.get_logger()

NODE_TIMEOUT_S = 5.0
MAX_CONCURRENT_NODES = 8
"""Nodes that are called concurrently."""
MAX_PROBES = 64
"""Maximum nodes of one sweep that are called only to know whether this gateway reaches them."""
STARTING_STATES = ("preparing", "pulling", "creating")
"""States of kernels that may still fail."""
_Key = tuple[str, int]


class _Row(msgspec.Struct, frozen=True):
    kernel_id: str
    state: str


ROWS_DECODER = msgspec.json.Decoder(list[_Row])


class Sweep:
    """Checks all routes periodically; any number of gateways may do so concurrently.

    Each ready node is called for one list. A route that has just changed is being worked on. A
    route is dropped only if its node lacked the kernel twice, with more time in between than a
    request can be in progress, and answered every time meanwhile. The time is that of this
    process's monotonic clock. Routes to nodes that are not ready wait for their return.
    """

    def __init__(self, backend: FleetBackend, placer: Placer, timeouts: PlacementTimeouts) -> None:
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._placer = placer
        self._timeouts = timeouts
        self._first_seen_at: dict[_Key, float] = {}
        self._absent_since: dict[_Key, float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.run_once()
            except AgentdError as error:
                if not self._store.stale_reason():  # else `store.lost` has the reason
                    log.info("sweep.postponed", reason=str(error))
            await asyncio.sleep(self._timeouts.sweep_period_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    async def run_once(self) -> None:
        """Check every route once."""
        now = asyncio.get_running_loop().time()
        routes: defaultdict[str, list[StoredRoute]] = defaultdict(list)
        async for page in self._store.routes():
            for stored in page:
                routes[stored.route.node_id].append(stored)
        keys = [_key(stored) for node_routes in routes.values() for stored in node_routes]
        self._first_seen_at = {key: self._first_seen_at.get(key, now) for key in keys}
        self._absent_since = {
            key: since for key, since in self._absent_since.items() if key in self._first_seen_at
        }
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_NODES)

        async def check(node_id: str, node_routes: Sequence[StoredRoute]) -> None:
            async with semaphore:
                await self._check_node(node_id, node_routes, now)

        await asyncio.gather(
            *(check(*item) for item in routes.items()),
            *(self._probe(node) for node in self._unverified_nodes()),
        )
        await self._placer.reconcile_unrouted()

    def _unverified_nodes(self) -> list[FleetNode]:
        """Return nodes that may be unreachable, those that were so at the last call first."""
        nodes = [
            node
            for node in self._state.view.nodes.values()
            if node.is_available and not self._state.has_answered(node.node_id)
        ]
        random.shuffle(nodes)
        return sorted(nodes, key=lambda node: not node.unreachable)[:MAX_PROBES]

    async def _probe(self, node: FleetNode) -> None:
        with suppress(NodeUnavailable):
            await self._nodes.probe(node)

    async def _check_node(
        self, node_id: str, node_routes: Sequence[StoredRoute], now: float
    ) -> None:
        """Check the routes to a node; an error affects no other node's routes."""
        node = self._state.node(node_id)
        due = [
            stored
            for stored in node_routes
            if stored.route.progress is RouteProgress.PLACED
            or now - self._first_seen_at[_key(stored)] >= 2 * self._timeouts.retry_for_s
        ]
        if node is None or not due:
            return
        try:
            states = await self._read_states(node)
            if states is None:
                for stored in node_routes:
                    self._absent_since.pop(_key(stored), None)
                return
            for stored in due:
                await self._check_route(stored, states)
        except AgentdError as error:
            log.info("sweep.postponed", node_id=node_id, reason=str(error))
        except UNREADABLE as error:
            log.warning("route.resolve_failed", node_id=node_id, reason=repr(error))

    async def _read_states(self, node: FleetNode) -> Mapping[str, str] | None:
        """Return the states of a node's kernels, None if it does not answer.

        Raises:
            UNREADABLE: the answer is malformed.
        """
        if not node.is_available:
            return None
        states: dict[str, str] = {}
        page: Call[Any] | None = Call("GET", api_path("kernels"), is_paged=True)
        try:
            async with asyncio.timeout(NODE_TIMEOUT_S):
                while page is not None:
                    answer = await self._nodes.call(
                        node, GATEWAY, page.method, page.path, patience_s=NODE_TIMEOUT_S
                    )
                    if answer.is_error:
                        return None
                    for row in ROWS_DECODER.decode(answer.body):
                        states[row.kernel_id] = row.state
                    page = page.next_page(answer.headers.get("Link"))
        except (NodeUnavailable, TimeoutError):
            return None
        return states

    async def _check_route(self, stored: StoredRoute, states: Mapping[str, str]) -> None:
        route, key = stored.route, _key(stored)
        if self._placer.is_busy(route.kernel_id):
            return
        async with self._placer.kernel_lock(route.kernel_id):
            if (state := states.get(route.kernel_id)) is not None:
                self._absent_since.pop(key, None)
                if route.progress is RouteProgress.PLACING and state not in STARTING_STATES:
                    await self._store.put_route(
                        replace(route, progress=RouteProgress.PLACED), stored.revision
                    )
                    log.info("route.confirmed", kernel_id=route.kernel_id, node_id=route.node_id)
                return
            now = asyncio.get_running_loop().time()
            since = self._absent_since.setdefault(key, now)
            if now - since >= self._timeouts.absent_for_s:
                await self._store.delete_route(route.kernel_id, stored.revision)
                log.info("route.dropped", kernel_id=route.kernel_id, node_id=route.node_id)


def _key(stored: StoredRoute) -> _Key:
    return stored.route.kernel_id, stored.revision
