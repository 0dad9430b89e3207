"""Gateways over a simulated store and nodes, on a clock that goes on by itself when all wait.

Every step of the store, the nodes and the network takes a time by chance, so that a seed is one
interleaving. The gateways' parts are the real ones.
"""

import asyncio
import json
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from agentd.core.access import Caller, Role
from agentd.core.slots import BUILT_IN, ONE, ResourceSlots
from agentd.error_codes import ERROR_CODES
from agentd.errors import AgentdError
from agentd_fleet.nodes.calls import NodeAnswer, NodeAnswerLost, NodeNotCalled
from agentd_fleet.placement import attempts, placer
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.deleter import Deleter
from agentd_fleet.placement.kernels import FleetKernels
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.requests import FleetKernelRequest, to_placement_request
from agentd_fleet.placement.sweep import Sweep
from agentd_fleet.store.route import (
    KernelRoute,
    RouteUnreadable,
    StoredRoute,
    StoreUnavailable,
    read_route,
)
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode, NodeStatus, Offer

ADMIN = Caller("somebody", Role.ADMIN)
NODES = ("n1", "n2")


class _Clock(selectors.DefaultSelector):
    """Where nothing is ready, the time until the next timer has gone by at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all wait for what never comes"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time does not wait."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class SimulatedStore:
    """Routes of `route.Store`, in memory: a call takes effect at one instant between its ends."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows: dict[str, tuple[bytes, int]] = {}
        self.is_full = False
        self.away = ""
        self._revision = 0

    async def _pass(self) -> None:
        await asyncio.sleep(self.rng.expovariate(200))

    def stale_reason(self) -> str:
        return self.away

    async def route(self, kernel_id: str) -> StoredRoute | None:
        await self._pass()
        found = self.rows.get(kernel_id)
        await self._pass()
        return None if found is None else read_route(kernel_id, *found)

    async def put_route(self, route: KernelRoute, expected: int) -> int | None:
        return await self._put(route.kernel_id, msgspec.json.encode(route), expected)

    async def rewrite(self, unread: RouteUnreadable) -> int | None:
        return await self._put(unread.kernel_id, unread.value, unread.revision)

    async def _put(self, kernel_id: str, value: bytes, expected: int) -> int | None:
        await self._pass()
        if self.is_full:
            raise StoreUnavailable("no space")
        written = None
        if self.rows.get(kernel_id, (b"", 0))[1] == expected:
            self._revision += 1
            self.rows[kernel_id] = value, self._revision
            written = self._revision
        await self._pass()
        return written

    async def delete_route(self, kernel_id: str, expected: int) -> bool:
        await self._pass()
        is_it = self.rows.get(kernel_id, (b"", 0))[1] == expected
        if is_it:
            del self.rows[kernel_id]
        await self._pass()
        return is_it

    async def routes(self) -> AsyncIterator[list[StoredRoute]]:
        await self._pass()
        rows = dict(self.rows)
        await self._pass()
        kept = []
        for name, row in rows.items():
            with suppress(RouteUnreadable):
                kept.append(read_route(name, *row))
        yield kept


class SimulatedNodes:
    """Nodes in memory, which can be full, frozen or lossy."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kernels: dict[str, dict[str, str]] = {name: {} for name in NODES}
        self.attempts: dict[tuple[str, str], str] = {}
        """The attempt that created each kernel, by node and id."""
        self.room = dict.fromkeys(NODES, 100)
        self.frozen: set[str] = set()
        self.losing = 0.0
        self.pull_s = 0.0
        """Seconds that a create takes."""
        self.failing: dict[str, str] = {}
        """Codes with which nodes refuse every create, although a dry run has succeeded."""
        self.scope = ""
        """The member `scope` of these refusals."""
        self.asked: list[tuple[str, str, str]] = []
        self.dropping: set[str] = set()
        """Nodes that report, and to which no connection can be made."""
        self.silent: set[str] = set()
        """Nodes that report, accept connections and never answer."""
        self.swallowing: set[str] = set()
        """Nodes behind a network that drops large requests, such as creates."""

    async def asked_for(self, node: str, method: str, path: str, body: bytes | None) -> NodeAnswer:
        """Return the answer of a node, if it does not freeze."""
        is_create = method == "POST" and "dry_run" not in path
        await asyncio.sleep(self.rng.expovariate(100) + self.pull_s * is_create)
        while node in self.frozen:
            await asyncio.sleep(0.1)
        self.asked.append((node, method, path))
        answer = self._answered(node, method, path, body)
        await asyncio.sleep(self.rng.expovariate(100))
        return answer

    def _answered(self, node: str, method: str, path: str, body: bytes | None) -> NodeAnswer:
        kernels = self.kernels[node]
        if method == "POST":
            members = json.loads(body or b"{}")
            name, attempt = members["kernel_id"], members.get("attempt", "")
            if name in kernels and attempt not in ("", self.attempts.get((node, name), "")):
                return _refusal("KernelConflict", 409)
            answer = self._created(node, name, path)
            if name in kernels:
                self.attempts.setdefault((node, name), attempt)
            return answer
        if path == "/v1/kernels":
            return _said([{"kernel_id": name, "state": s} for name, s in kernels.items()], 200)
        name = path.rpartition("/")[2].partition("?")[0]
        if name not in kernels:
            return _refusal("UnknownKernel", 404)
        if method == "DELETE":
            del kernels[name]
            self.attempts.pop((node, name), None)
            return NodeAnswer(204, {}, b"")
        return _said({"kernel_id": name, "agent_id": "main", "state": kernels[name]}, 200)

    def _created(self, node: str, name: str, path: str) -> NodeAnswer:
        kernels, is_dry = self.kernels[node], "dry_run" in path
        is_there = name in kernels
        if not is_there and self.room[node] <= len(kernels):
            return _refusal("InsufficientResource", 409)
        if not is_dry and (code := self.failing.get(node)):
            return _refusal(code, ERROR_CODES[code].status, self.scope)
        if not is_dry:
            kernels[name] = "running"
        return _said({"kernel_id": name}, 200 if is_there or is_dry else 201)

    def freeze(self, node: str, seconds: float) -> None:
        """Make a node stop answering for some seconds."""
        self.frozen.add(node)
        asyncio.get_running_loop().call_later(seconds, self.frozen.discard, node)

    def prune(self, kernel_id: str) -> None:
        """Forget a kernel, as `keep-ended` does."""
        for node, kernels in self.kernels.items():
            kernels.pop(kernel_id, None)
            self.attempts.pop((node, kernel_id), None)


def _said(content: Any, status: int) -> NodeAnswer:
    return NodeAnswer(status, {}, json.dumps(content).encode())


def _refusal(code: str, status: int, scope: str = "") -> NodeAnswer:
    facts = {"slot": "cpu", "requested": "1", "free": "0", "explain": [], "scope": scope}
    return _said({"code": code, "status": status, "detail": "so", **facts}, status)


class SimulatedCalls:
    """The interface of `nodes.Nodes` of one gateway."""

    def __init__(self, nodes: SimulatedNodes, state: FleetState) -> None:
        self.nodes = nodes
        self.state = state

    async def call(
        self,
        node: FleetNode,
        caller: Caller,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Any = None,
        patience_s: float = 30.0,
    ) -> NodeAnswer:
        del caller, headers
        name = node.node_id
        if name in self.nodes.dropping or (name in self.nodes.silent and node.unreachable):
            await asyncio.sleep(3)
            self.state.set_unreachable(name, "dropped")
            raise NodeNotCalled(f"{name} cannot be reached")
        try:
            async with self.state.call_timeout(name, patience_s):
                is_large = body is not None
                while name in self.nodes.silent or (name in self.nodes.swallowing and is_large):
                    await asyncio.sleep(1)
                answer = await self.nodes.asked_for(name, method, path, body)
        except TimeoutError:
            self.state.set_unreachable(name, "silent")
            raise NodeAnswerLost(f"{name} does not answer") from None
        if self.nodes.rng.random() < self.nodes.losing:
            self.state.set_unreachable(name, "lost")
            raise NodeAnswerLost(f"{name}: the answer is lost")
        self.state.set_unreachable(name, "")
        return answer

    async def probe(self, node: FleetNode) -> None:
        await self.call(node, ADMIN, "GET", "/v1/node", patience_s=3.0)


class SimulatedGateway:
    """The parts of one gateway that change routes."""

    def __init__(
        self, store: SimulatedStore, world: SimulatedNodes, pace: attempts.PlacementTimeouts
    ) -> None:
        self.store = store
        self.state = FleetState()
        nodes: Any = SimulatedCalls(world, self.state)
        amounts = ResourceSlots({slot.name: 100 * ONE for slot in BUILT_IN})
        types = {slot.name: slot for slot in BUILT_IN}
        for name in NODES:
            offers = {"main": Offer(amounts, amounts)}
            self.state.update_node(FleetNode(name, types, offers, NodeStatus.READY, "unix:/there"))
            self.state.set_unreachable(name, "")
        backend = FleetBackend(store, self.state, nodes)
        self.placer = Placer(backend, timeouts=pace)
        self.placer._random = world.rng
        kernels = FleetKernels(backend, self.placer)
        self.deleter = Deleter(backend, self.placer, kernels)
        self.sweep = Sweep(backend, self.placer, pace)

    async def create(
        self, kernel_id: str, command: str = "x", image: str | None = None, attempt: str = ""
    ) -> tuple[int, str]:
        """Return the status and the node, or 0 and the code of the error."""
        content = {"kernel_id": kernel_id, "command": [command], "slots": {"cpu": 1}}
        content |= {} if image is None else {"image": image}
        content |= {"attempt": attempt} if attempt else {}
        order = to_placement_request(FleetKernelRequest.model_validate(content), ADMIN)
        try:
            placed = await self.placer.create(ADMIN, order, self.state.view)
        except AgentdError as error:
            return 0, error.code
        return placed.answer.status, placed.node_id

    async def delete(self, kernel_id: str, node: str | None = None) -> tuple[int, str]:
        """Return the status, or 0 and the code of the error."""
        try:
            answer = await self.deleter.delete(ADMIN, kernel_id, node, {})
        except AgentdError as error:
            return 0, error.code
        return answer.status, ""


class Fleet:
    """Two gateways, two nodes and a store under one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = SimulatedStore(self.rng)
        self.nodes = SimulatedNodes(self.rng)
        self.pace = attempts.PlacementTimeouts()
        self.one, self.other = (
            SimulatedGateway(self.store, self.nodes, self.pace) for _ in range(2)
        )

    @property
    def gateways(self) -> tuple[SimulatedGateway, SimulatedGateway]:
        return self.one, self.other

    async def sometime(self, work: Coroutine[Any, Any, Any], within_s: float = 0.05) -> Any:
        """Do something after a while that chance draws."""
        await asyncio.sleep(self.rng.uniform(0, within_s))
        return await work

    async def rest(self, seconds: float = 180.0) -> None:
        """Run the sweeps of both gateways for some seconds."""
        sweeps = [asyncio.create_task(gateway.sweep.run()) for gateway in self.gateways]
        await asyncio.sleep(seconds)
        for sweep in sweeps:
            sweep.cancel()
        await asyncio.gather(*sweeps, return_exceptions=True)

    def untrue(self) -> list[str]:
        """Return what the oracle finds: routes without kernels, and ids on two nodes."""
        held = {name: [n for n in NODES if name in self.nodes.kernels[n]] for n in NODES
                for name in self.nodes.kernels[n]}  # fmt: skip
        found = [f"{name} is on {nodes}" for name, nodes in held.items() if len(nodes) > 1]
        for name, row in self.store.rows.items():
            kept = read_route(name, *row)
            if name not in self.nodes.kernels[kept.route.node_id]:
                found.append(f"{name} is routed to {kept.route.node_id}, which has none")
        return found + [f"{name} has no route" for name in held if name not in self.store.rows]


def run(seed: int, story: Callable[[Fleet], Coroutine[Any, Any, None]], monkeypatch: Any) -> None:
    """Run a story with a seed, in simulated time."""
    loop = VirtualLoop()
    random.seed(seed)
    monkeypatch.setattr(attempts, "boottime_s", loop.time)
    monkeypatch.setattr(placer, "boottime_s", loop.time)

    async def told() -> None:
        await story(Fleet(seed))

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(told())
