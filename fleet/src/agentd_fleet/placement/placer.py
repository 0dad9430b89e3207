"""Placement of a kernel: candidates from one view, a route before each attempt.

A kernel exists at most once: a node is called only after the route to it was written by the route's
owner, and a lost answer is requested again from that node, never replaced by another node. So a
kernel id never runs on two nodes, whatever dies in between.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from weakref import WeakValueDictionary

import msgspec
import structlog
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.core.slots import ResourceSlots
from agentd.error_codes import Scope
from agentd.errors import (
    AgentdError,
    KernelConflict,
    NodeUnavailable,
)
from agentd_fleet.nodes.calls import GATEWAY, NodeAnswer, NodeNotCalled
from agentd_fleet.placement.attempts import (
    AttemptRunner,
    PlacementTimeouts,
    PlacementUnknown,
    RouteTakenOver,
    boottime_s,
    node_of_route,
    repeated_refusal,
)
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.choice import PlacementPolicy, read
from agentd_fleet.placement.refusals import refusal_error
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.placement.search import AgentQuery, FailedNodes, Search
from agentd_fleet.store.route import KernelRoute, RouteProgress, StoredRoute, StoreUnavailable
from agentd_fleet.view.fleet_view import FleetView

log = structlog.get_logger()

SILENT_TIMEOUT_S = 1.0
"""Seconds after which a repeated create calls no node that is known not to answer."""


class PlacedKernel(msgspec.Struct, frozen=True):
    """A node's answer to a create, and the agent that it came from."""

    answer: NodeAnswer
    node_id: str
    agent_id: str


class Placer:
    """Places kernels on nodes."""

    def __init__(
        self,
        backend: FleetBackend,
        policy: PlacementPolicy = PlacementPolicy.RANDOM,
        timeouts: PlacementTimeouts | None = None,
    ) -> None:
        self._backend = backend
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._policy = policy
        self._timeouts = timeouts or PlacementTimeouts()
        self._attempts = AttemptRunner(backend, self._timeouts)
        self._failed = FailedNodes()
        self._random = random.Random()  # noqa: S311 - spreads load, no secret
        self._confirming: dict[str, asyncio.Task[None]] = {}
        self._unrouted: set[KernelRoute] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def kernel_lock(self, kernel_id: str) -> AsyncIterator[None]:
        """Serialize work per kernel id."""
        lock = self._locks.setdefault(kernel_id, asyncio.Lock())
        async with lock:
            yield

    async def create(
        self, caller: Caller, request: PlacementRequest, view: FleetView
    ) -> PlacedKernel:
        """Create a kernel, or return the one that the same request created before.

        Raises:
            AgentdError: no node can have it now, or a node refuses it. If the outcome is unknown,
                it is `PlacementUnknown`, or a node's `OutcomeUnknown`.
        """
        requested = self._parse_amounts(request, view)
        began_at, stored = boottime_s(), None
        if not request.is_new:  # others that wait for a silent node keep the lock
            await self._read_route(caller, request, began_at)
        async with self.kernel_lock(request.kernel_id):
            deadline = boottime_s() + self._timeouts.retry_for_s
            if not request.is_new:
                stored = await self._read_route(caller, request, began_at)
            while True:
                try:
                    if stored is None:
                        return await self._place(caller, request, view, requested)
                    if placed := await self._resume_create(caller, request, stored):
                        return placed
                except RouteTakenOver:
                    if boottime_s() > deadline:
                        raise
                stored = await self._read_route(caller, request, began_at)

    async def _read_route(
        self, caller: Caller, request: PlacementRequest, began_at: float
    ) -> StoredRoute | None:
        """Return the route of a kernel id, if its node answers.

        A node that is known not to answer is called, unless the request has waited long already.

        Raises:
            KernelConflict: the id belongs to another request, and the node does not answer.
            PlacementUnknown: the node does not answer.
        """
        if (stored := await self._store.route(request.kernel_id)) is None:
            return None
        try:
            node = node_of_route(self._state, stored.route)
            if not node.is_answering:
                if boottime_s() - began_at > SILENT_TIMEOUT_S:
                    raise NodeNotCalled(f"node {node.node_id} does not answer")
                await self._nodes.probe(node)
        except NodeUnavailable as error:
            if conflict := _conflict(caller, request, stored.route):
                raise conflict from None
            raise PlacementUnknown(stored.route, error) from None
        return stored

    async def explain(
        self, caller: Caller, request: PlacementRequest, view: FleetView
    ) -> PlacedKernel:
        """Return the decision that a create would get; changes nothing.

        Raises:
            AgentdError: see `create`.
        """
        requested = self._parse_amounts(request, view)
        search = self._search(caller, request, view, requested, is_dry_run=True)
        if (candidate := await search.next()) is not None:
            return PlacedKernel(search.decisions[candidate], *candidate)
        raise search.final or refusal_error(view, requested, request.constraints, search.refused)

    def _parse_amounts(self, request: PlacementRequest, view: FleetView) -> ResourceSlots:
        """Return the requested amounts in the fleet's slots.

        Raises:
            StoreUnavailable: the view of the fleet is not current.
            AgentdError: no node of the fleet can ever serve it.
        """
        if reason := self._store.stale_reason():
            raise StoreUnavailable(
                f"cannot place kernels without a current view of the fleet: {reason}"
            )
        return read(view, request.slots).accepted()

    def _search(
        self,
        caller: Caller,
        request: PlacementRequest,
        view: FleetView,
        requested: ResourceSlots,
        *,
        is_dry_run: bool = False,
    ) -> Search:
        policy = request.policy or self._policy
        query = AgentQuery(caller, request, requested, policy, self._random, is_dry_run)
        return Search(self._backend, self._failed, query, view)

    async def _place(
        self, caller: Caller, request: PlacementRequest, view: FleetView, requested: ResourceSlots
    ) -> PlacedKernel:
        """Try candidates in order, each after the previous one refused for certain."""
        search, revision = self._search(caller, request, view, requested), 0
        while (candidate := await search.next()) is not None:
            began = boottime_s()
            route = KernelRoute(
                kernel_id=request.kernel_id,
                node_id=candidate.node_id,
                agent_id=candidate.agent_id,
                request_hash=request.request_hash,
                owner=secrets.token_hex(8),
                created_by=caller.name,
                attempt=request.attempt,
            )
            written = await self._store.put_route(route, revision)
            if written is None:  # another gateway got the same request
                raise RouteTakenOver(route, "another gateway works on it")
            revision = written
            self._state.debit(*candidate, requested)
            error: AgentdError
            try:
                answer, stored = await self._attempts.run(
                    caller, request, StoredRoute(route, revision), began
                )
                if not answer.is_error:
                    self._confirm_soon(stored)
                    search.note_placed()
                    return PlacedKernel(answer, *candidate)
                error, is_certain = answer.error(), True
            except AgentdError as raised:
                error, is_certain = raised, isinstance(raised, NodeNotCalled)
            search.refuse(candidate, error)
            if not is_certain or error.scope is Scope.UNKNOWN:
                raise error
            self._state.undebit(candidate.node_id)
        if revision:
            await self._store.delete_route(request.kernel_id, revision)
        raise search.final or refusal_error(view, requested, request.constraints, search.refused)

    async def _resume_create(
        self, caller: Caller, request: PlacementRequest, stored: StoredRoute
    ) -> PlacedKernel | None:
        """Return the outcome of an earlier request for a kernel id; None if the id is free.

        Raises:
            KernelConflict: the id belongs to another request, or another attempt.
            PlacementUnknown: the node, or the store, does not answer.
            AgentdError: the node refused it.
        """
        route = stored.route
        if conflict := _conflict(caller, request, route):
            with suppress(NodeUnavailable):
                is_placed = route.progress is RouteProgress.PLACED
                if is_placed and await self._look_up(stored) is None:
                    return None
            raise conflict
        try:
            answer = await self._repeat_call(caller, request.as_attempt(route.attempt), stored)
        except (NodeUnavailable, StoreUnavailable) as error:
            raise PlacementUnknown(route, error) from None
        if answer is None:
            return None
        if answer.is_error:
            raise repeated_refusal(answer, route)
        status = HTTPStatus.OK if answer.status == HTTPStatus.CREATED else answer.status
        return PlacedKernel(replace(answer, status=status), route.node_id, route.agent_id)

    async def _repeat_call(
        self, caller: Caller, request: PlacementRequest, stored: StoredRoute
    ) -> NodeAnswer | None:
        """Return what the node of a route answers now; None if the route has changed.

        Raises:
            KernelConflict: the kernel of that id is of another agent by now.
        """
        route = stored.route
        if route.progress is RouteProgress.PLACED:
            found = await self._look_up(stored)
            if found and not found.is_error and found.content().get("agent_id") != route.agent_id:
                raise KernelConflict(f"kernel {route.kernel_id} already exists")
            return found
        if not await self._wait_unchanged(stored):
            return None
        began_at = boottime_s()
        stored = await self._attempts.renew(stored)
        answer, stored = await self._attempts.run(caller, request, stored, began_at)
        if not answer.is_error:
            self._confirm_soon(stored)
        return answer

    async def _wait_unchanged(self, stored: StoredRoute) -> bool:
        """Wait until a route's owner may count as dead; False if the route has changed."""
        deadline = boottime_s() + self._timeouts.takeover_after_s
        while boottime_s() < deadline:
            await asyncio.sleep(self._timeouts.retry_pause_s)
            if await self._store.route(stored.route.kernel_id) != stored:
                return False
        return True

    async def _look_up(self, stored: StoredRoute) -> NodeAnswer | None:
        """Return the answer of a node about its placed kernel; None if it has none: the id is free.

        The caller is the gateway: only its clients read the end of a kernel that `removes` itself.

        Raises:
            NodeUnavailable: the node does not answer.
        """
        kernel_id = stored.route.kernel_id
        node = node_of_route(self._state, stored.route)
        answer = await self._nodes.call(node, GATEWAY, "GET", f"/v1/kernels/{kernel_id}")
        if not answer.is_unknown_kernel:
            return answer
        await self._store.delete_route(kernel_id, stored.revision)
        return None

    def _confirm_soon(self, stored: StoredRoute) -> None:
        """Mark a route as placed in the background, after the caller got its answer.

        Later requests for the kernel at this gateway wait for that. If it fails, the sweep does it.
        """
        kernel_id = stored.route.kernel_id
        task = asyncio.create_task(self._confirm_route(stored))
        self._confirming[kernel_id] = task
        task.add_done_callback(lambda _: self._confirming.pop(kernel_id, None))

    async def _confirm_route(self, stored: StoredRoute) -> None:
        placed = replace(stored.route, progress=RouteProgress.PLACED)
        async with self.kernel_lock(placed.kernel_id):
            try:
                if await self._store.put_route(placed, stored.revision) is None:
                    self._unrouted.add(placed)
                    await self._reconcile(placed)
            except AgentdError as error:
                log.warning("route.confirm_failed", kernel_id=placed.kernel_id, reason=str(error))

    async def reconcile_unrouted(self) -> None:
        """Resolve the kernels that lost their routes to others, where that is possible by now."""
        for placed in list(self._unrouted):
            async with self.kernel_lock(placed.kernel_id):
                with suppress(AgentdError):
                    await self._reconcile(placed)

    async def _reconcile(self, placed: KernelRoute) -> None:
        """Resolve a kernel whose route was taken over during the call, unless it is too early.

        If its id was freed meanwhile, the id belongs to this kernel. If another node has a kernel
        of the id, this one is surplus and is removed. A route to another node proves nothing:
        a create may be in progress there, or etcd was restored and the route is of the past.
        """
        path = f"/v1/kernels/{placed.kernel_id}"
        stored = await self._store.route(placed.kernel_id)
        node = self._state.node(placed.node_id)
        if node is None or (stored is not None and stored.route.node_id == placed.node_id):
            self._unrouted.discard(placed)
            return
        own = await self._nodes.call(node, GATEWAY, "GET", path)
        if own.is_unknown_kernel:
            self._unrouted.discard(placed)
            return
        if own.is_error or (stored is not None and stored.route.progress is RouteProgress.PLACING):
            return
        other = None if stored is None else await self._look_up(stored)
        if other is None:
            if await self._store.put_route(placed, 0) is not None:
                self._unrouted.discard(placed)
        elif not other.is_error:
            log.warning("kernel.misplaced", kernel_id=placed.kernel_id, node_id=placed.node_id)
            await self._nodes.call(node, GATEWAY, "DELETE", f"{path}?timeout=0")

    async def close(self) -> None:
        """Wait until all routes are marked as placed."""
        await asyncio.gather(*self._confirming.values())

    async def wait_confirmed(self, kernel_id: str) -> None:
        """Wait until the route of a kernel is marked as placed, if that is in progress."""
        if (task := self._confirming.get(kernel_id)) is not None:
            await asyncio.wait([task])

    def is_busy(self, kernel_id: str) -> bool:
        """Return whether a request for a kernel id is in progress here."""
        lock = self._locks.get(kernel_id)
        return lock is not None and lock.locked()


def _conflict(
    caller: Caller, request: PlacementRequest, route: KernelRoute
) -> KernelConflict | None:
    """Return the refusal if another request, or another attempt, owns the kernel id.

    A caller that must not see that kernel learns only that it exists.
    """
    if not caller.sees(route.agent_id):
        return KernelConflict(f"kernel {route.kernel_id} already exists")
    if route.request_hash != request.request_hash:
        return KernelConflict.of_other(route.kernel_id, "request")
    if request.attempt not in ("", route.attempt):
        return KernelConflict.of_other(route.kernel_id, "attempt")
    return None
