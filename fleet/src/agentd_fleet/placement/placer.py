"""Placement of a kernel: candidates from one view, a route before each attempt.

A kernel exists at most once: a node is called only after the route to it was written by the route's
owner, and a lost answer is requested again from that node, never replaced by another node. So a
kernel id never runs on two nodes, whatever dies in between.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from weakref import WeakValueDictionary

import msgspec
import structlog
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.core.slots import ResourceSlots
from agentd.errors import AgentdError, KernelConflict, NodeUnavailable
from agentd_fleet.nodes.calls import GATEWAY, NeverAsked, NodeAnswer, Nodes
from agentd_fleet.placement.attempts import Asker, Overtaken, PlacementTimeouts, now, path_of
from agentd_fleet.placement.choice import Candidate, PlacementPolicy, candidates, read
from agentd_fleet.placement.refusals import refusal
from agentd_fleet.placement.requests import PlacementRequest
from agentd_fleet.store.route import Kept, KernelRoute, RouteProgress, Store, StoreAway
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetView

log = structlog.get_logger()

LOOK_PATIENCE_S = 3.0
"""Seconds that a node may take for a decision, or to look up a kernel."""
TRIES = 8
"""Maximum nodes that are tried for a kernel."""
ELSEWHERE = frozenset(
    {"InsufficientResource", "UnsupportedResource", "PluginUnavailable", "UnknownAgent"}
    | {"UnknownDevice", "Draining", "NotReady", "StateUnavailable"}
)
"""Refusals that say nothing about other nodes, and leave nothing behind."""
MAY_YET = frozenset({"RuntimeUnavailable", "Internal"})
"""Errors after which the node may have the kernel, or get it."""


class Placed(msgspec.Struct, frozen=True):
    """A node's answer to a create, and the agent that it came from."""

    answer: NodeAnswer
    node_id: str
    agent_id: str


class Placer:
    """Places kernels on nodes."""

    def __init__(
        self,
        store: Store,
        state: FleetState,
        nodes: Nodes,
        policy: PlacementPolicy = PlacementPolicy.RANDOM,
        pace: PlacementTimeouts | None = None,
    ) -> None:
        self._store = store
        self._state = state
        self._nodes = nodes
        self._policy = policy
        self._pace = pace or PlacementTimeouts()
        self._asker = Asker(store, state, nodes, self._pace)
        self._choice = random.Random()  # noqa: S311 - spreads load, no secret
        self._noting: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, kernel_id: str) -> AsyncIterator[None]:
        """Serialize work per kernel id."""
        lock = self._locks.setdefault(kernel_id, asyncio.Lock())
        async with lock:
            yield

    async def create(self, caller: Caller, order: PlacementRequest, view: FleetView) -> Placed:
        """Create a kernel, or return the one that the same request created before.

        Raises:
            AgentdError: no node can have it now, or a node refuses it. If the outcome is unknown,
                it is `PlacementUnknown`, or a node's `OutcomeUnknown`.
        """
        request = self._asked_for(order, view)
        async with self.alone(order.kernel_id):
            kept, end = None, now() + self._pace.insist_s
            if not order.is_new:
                kept = await self._store.route(order.kernel_id)
            while True:
                try:
                    if kept is None:
                        return await self._place(caller, order, view, request)
                    if found := await self._again(caller, order, kept):
                        return found
                except Overtaken:
                    if now() > end:
                        raise
                kept = await self._store.route(order.kernel_id)

    async def explain(self, caller: Caller, order: PlacementRequest, view: FleetView) -> Placed:
        """Return the decision that a create would get; changes nothing.

        Raises:
            AgentdError: see `create`.
        """
        request = self._asked_for(order, view)
        choices = self._choices(order, view, request)
        answers = await self._looks(caller, order, choices)
        for candidate, answer in zip(choices, answers, strict=True):
            if isinstance(answer, NodeAnswer) and not answer.is_error:
                return Placed(answer, candidate.node_id, candidate.agent_id)
        raise refusal(view, request, order.constraints, _refusals(choices, answers))

    def _asked_for(self, order: PlacementRequest, view: FleetView) -> ResourceSlots:
        """Return the requested amounts in the fleet's slots.

        Raises:
            StoreAway: the view of the fleet is not current.
            AgentdError: no node of the fleet can ever serve it.
        """
        if why := self._store.why_not_live():
            raise StoreAway(f"cannot place kernels without a current view of the fleet: {why}")
        return read(view, order.slots).accepted()

    def _choices(
        self, order: PlacementRequest, view: FleetView, request: ResourceSlots
    ) -> list[Candidate]:
        policy = order.policy or self._policy
        return candidates(view, request, order.constraints, policy, self._choice, TRIES)

    async def _place(
        self, caller: Caller, order: PlacementRequest, view: FleetView, request: ResourceSlots
    ) -> Placed:
        """Try candidates in order, each after the previous one refused for certain."""
        choices = self._choices(order, view, request)
        queue = deque(choices or self._choices(order, self._state.undebited(), request))
        refused: list[tuple[str, AgentdError]] = []
        revision = 0
        while queue:
            candidate = queue.popleft()
            began = now()
            route = KernelRoute(
                kernel_id=order.kernel_id,
                node_id=candidate.node_id,
                agent_id=candidate.agent_id,
                request_hash=order.request_hash,
                owner=secrets.token_hex(8),
                created_by=caller.name,
            )
            written = await self._store.keep(route, revision)
            if written is None:  # another gateway got the same request
                why = "another gateway works on it"
                raise Overtaken(order.kernel_id, candidate.node_id, why)
            revision = written
            self._state.debit(*candidate, request)
            try:
                tried = await self._asker.ask(caller, order, Kept(route, revision), began)
            except NeverAsked as error:
                self._state.undebit(candidate.node_id)
                refused.append((candidate.node_id, error))
                continue
            if not tried.answer.is_error:
                self._note_soon(tried.kept)
                return Placed(tried.answer, *candidate)
            refusal_here = tried.answer.error()
            if not tried.is_certain or refusal_here.code in MAY_YET:
                raise refusal_here
            self._state.undebit(candidate.node_id)
            refused.append((candidate.node_id, refusal_here))
            if refusal_here.code not in ELSEWHERE:
                break
            if len(refused) == 1 and queue:
                answers = await self._looks(caller, order, queue)
                refused += _refusals(queue, answers)
                looked = zip(queue, answers, strict=True)
                queue = deque(c for c, a in looked if isinstance(a, NodeAnswer) and not a.is_error)
        if revision:
            await self._store.drop(order.kernel_id, revision)
        if refused and refused[-1][1].code not in ELSEWHERE | {"NodeUnavailable"}:
            raise refused[-1][1]
        raise refusal(view, request, order.constraints, refused)

    async def _looks(
        self, caller: Caller, order: PlacementRequest, choices: Sequence[Candidate]
    ) -> list[NodeAnswer | NodeUnavailable]:
        """Request decisions of all candidates concurrently."""

        async def look(candidate: Candidate) -> NodeAnswer | NodeUnavailable:
            node = self._state.node(candidate.node_id)
            path = f"{path_of(candidate.agent_id)}?dry_run=true"
            if node is None:
                return NodeUnavailable(f"node {candidate.node_id} is unavailable")
            try:
                return await self._nodes.ask(
                    node, caller, "POST", path, body=order.body, patience_s=LOOK_PATIENCE_S
                )
            except NodeUnavailable as error:
                return error

        return list(await asyncio.gather(*(look(candidate) for candidate in choices)))

    async def _again(self, caller: Caller, order: PlacementRequest, kept: Kept) -> Placed | None:
        """Return the outcome of an earlier request for a kernel id; None if the id is free.

        Raises:
            KernelConflict: the id belongs to another request.
            AgentdError: the node refused it, or does not answer.
        """
        route = kept.route
        if why := _why_other(caller, order, route):
            if await self._is_gone(kept):
                return None
            raise KernelConflict(why)
        if route.progress is RouteProgress.PLACED:
            node = self._asker.known(route)
            answer = await self._nodes.ask(node, caller, "GET", f"/v1/kernels/{route.kernel_id}")
            if answer.is_unknown_kernel:
                await self._store.drop(route.kernel_id, kept.revision)
                return None
            return _found(answer, route)
        if not await self._stands_still(kept):
            return None
        mine, began = replace(route, owner=secrets.token_hex(8)), now()
        revision = await self._store.keep(mine, kept.revision)
        if revision is None:
            return None
        tried = await self._asker.ask(caller, order, Kept(mine, revision), began)
        if not tried.answer.is_error:
            self._note_soon(tried.kept)
        return _found(tried.answer, route)

    async def _stands_still(self, kept: Kept) -> bool:
        """Wait until a route's owner may count as dead; False if the route has changed."""
        end = now() + self._pace.join_s
        while now() < end:
            await asyncio.sleep(self._pace.again_s)
            if await self._store.route(kept.route.kernel_id) != kept:
                return False
        return True

    async def _is_gone(self, kept: Kept) -> bool:
        """Return whether a placed kernel is missing on its node, so that its id is free."""
        route = kept.route
        node = self._state.node(route.node_id)
        if route.progress is not RouteProgress.PLACED or node is None or not node.is_asked:
            return False
        path = f"/v1/kernels/{route.kernel_id}"
        try:
            answer = await self._nodes.ask(node, GATEWAY, "GET", path, patience_s=LOOK_PATIENCE_S)
        except NodeUnavailable:
            return False
        if not answer.is_unknown_kernel:
            return False
        await self._store.drop(route.kernel_id, kept.revision)
        return True

    def _note_soon(self, kept: Kept) -> None:
        """Mark a route as placed in the background, after the caller got its answer.

        Later requests for the kernel at this gateway wait for that. If it fails, the sweep does it.
        """
        kernel_id = kept.route.kernel_id
        task = asyncio.create_task(self._note(kept))
        self._noting[kernel_id] = task
        task.add_done_callback(lambda _: self._noting.pop(kernel_id, None))

    async def _note(self, kept: Kept) -> None:
        placed = replace(kept.route, progress=RouteProgress.PLACED)
        async with self.alone(placed.kernel_id):
            try:
                if await self._store.keep(placed, kept.revision) is None:
                    await self._reconcile(placed)
            except AgentdError as error:
                log.warning("route.confirm_failed", kernel_id=placed.kernel_id, reason=str(error))

    async def _reconcile(self, placed: KernelRoute) -> None:
        """Resolve a kernel whose route was taken over during the call.

        If its id was freed meanwhile, the id belongs to this kernel. If the id belongs to another
        node by now, this kernel is surplus and is removed.
        """
        kernel_id = placed.kernel_id
        kept = await self._store.route(kernel_id)
        if kept is None and await self._store.keep(placed, 0) is None:
            kept = await self._store.route(kernel_id)
        node = self._state.node(placed.node_id)
        if kept is None or kept.route.node_id == placed.node_id or node is None:
            return
        path = f"/v1/kernels/{kernel_id}"
        if not (await self._nodes.ask(node, GATEWAY, "GET", path)).is_error:
            log.warning("kernel.misplaced", kernel_id=kernel_id, node_id=placed.node_id)
            await self._nodes.ask(node, GATEWAY, "DELETE", f"{path}?timeout=0")

    async def close(self) -> None:
        """Wait until all routes are marked as placed."""
        await asyncio.gather(*self._noting.values())

    async def noted(self, kernel_id: str) -> None:
        """Wait until the route of a kernel is marked as placed, if that is in progress."""
        if (task := self._noting.get(kernel_id)) is not None:
            await asyncio.wait([task])

    def is_busy(self, kernel_id: str) -> bool:
        """Return whether a request for a kernel id is in progress here."""
        lock = self._locks.get(kernel_id)
        return lock is not None and lock.locked()


def _refusals(
    choices: Sequence[Candidate], answers: Sequence[NodeAnswer | NodeUnavailable]
) -> list[tuple[str, AgentdError]]:
    """Return the refusing nodes with their errors."""
    return [
        (candidate.node_id, answer.error() if isinstance(answer, NodeAnswer) else answer)
        for candidate, answer in zip(choices, answers, strict=True)
        if not isinstance(answer, NodeAnswer) or answer.is_error
    ]


def _why_other(caller: Caller, order: PlacementRequest, route: KernelRoute) -> str:
    """Return why another request owns the kernel id, empty if none does.

    A caller that must not see that kernel learns only that it exists.
    """
    if not caller.sees(route.agent_id):
        return f"kernel {route.kernel_id} already exists"
    if route.request_hash != order.request_hash:
        return f"kernel {route.kernel_id} exists on node {route.node_id} with another request"
    return ""


def _found(answer: NodeAnswer, route: KernelRoute) -> Placed:
    if answer.is_error:
        raise answer.error()
    status = HTTPStatus.OK if answer.status == HTTPStatus.CREATED else answer.status
    return Placed(replace(answer, status=status), route.node_id, route.agent_id)
