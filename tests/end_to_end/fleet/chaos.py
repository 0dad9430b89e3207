"""Harm to a fleet in etcd, one kind after the other: kills, freezes, networks, rights, backups.

A restore of etcd takes routes back to what they were at the backup. Which ids that concerns is in
`unrecorded`: those that changed after it. Of every other id the fleet promises the same as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from agentd_fleet.store.etcd_transport import EtcdRefused, EtcdUnavailable
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import GatewayProgram, Program, World
from end_to_end.fleet.network import Proxy

PASSWORD = "secret"  # noqa: S105 - of a store on loopback
GATE, NODE = "gate", "node"
"""Users of etcd: of all gateways, and of all publishers."""
_T = TypeVar("_T")


class ChaosFleet:
    """The parts that are harmed; `cut_off` are the proxies between one gateway and etcd."""

    def __init__(self, world: World, etcd: EtcdServers) -> None:
        self.world, self.etcd = world, etcd
        self.nodes: list[str] = []
        self.gateways: list[GatewayProgram] = []
        self.publishers: list[Program] = []
        self.firewalls: list[Proxy] = []
        self.cut_off: list[Proxy] = []
        self.clone = ""
        self.changing: set[str] = set()
        """Ids that callers create or delete at this moment."""
        self.changed: set[str] = set()
        """Ids that did so since the last backup, or at that moment."""
        self.unrecorded: set[str] = set()
        """Those that changed since the last backup, or at that moment."""

    @classmethod
    async def start(
        cls, world: World, kinds: tuple[str, ...], deadlines: dict[str, float]
    ) -> ChaosFleet:
        """Start nodes behind firewalls, two gateways, and three members with signed tokens.

        As root a container runs beside the first node, made from its image.
        """
        etcd = await world.start_etcd(3, is_signed=True)
        await etcd.require_logins(PASSWORD, gate=("/agentd/main/",), node=("/agentd/main/",))
        fleet = cls(world, etcd)
        fleet.nodes = await world.start_nodes(*kinds)
        for node in fleet.nodes:
            fleet.firewalls.append(await world.proxy(node))
            fleet.publishers.append(fleet.join(node))
        fleet.cut_off = [await world.proxy(endpoint) for endpoint in etcd.endpoints]
        through = [proxy.endpoint for proxy in fleet.cut_off]
        fleet.gateways = [
            world.gateway(world.kept_as(GATE, PASSWORD), deadlines=deadlines),
            world.gateway(world.kept_as(GATE, PASSWORD, endpoints=through), deadlines=deadlines),
        ]
        for gateway in fleet.gateways:
            await gateway.until(dict.fromkeys(fleet.nodes, "ready"))
        if os.geteuid() == 0:
            fleet.clone = await world.clone(fleet.nodes[0])
        return fleet

    def join(self, name: str) -> Program:
        """Start a publisher of a node, which gateways reach through its firewall, or of the clone.

        The first node has a longer lease: it outlives what harms it beside the clone.
        """
        is_node = name in self.nodes
        url = self.firewalls[self.nodes.index(name)].endpoint if is_node else ""
        lease = 2 if name in self.nodes[1:] else 5
        kept_in = self.world.kept_as(NODE, PASSWORD)
        return self.world.join(name, kept_in=kept_in, url=url, lease=lease)

    @contextlib.contextmanager
    def change(self, kernel_id: str) -> Iterator[None]:
        """Note that a kernel is created or deleted meanwhile."""
        self.changing.add(kernel_id)
        self.changed.add(kernel_id)
        try:
            yield
        finally:
            self.changing.discard(kernel_id)

    def is_unrecorded(self, kernel_id: str) -> bool:
        """Return whether a change of an id may be one that etcd has lost, or is about to."""
        return kernel_id in self.unrecorded | self.changed

    async def wait_kept(self, number: int) -> None:
        """Wait until the publisher of a node prolongs the lease of the node's entry."""
        key = f"/agentd/main/nodes/{self.nodes[number]}"
        before = (0, 0)
        async with self.world.client("root", PASSWORD) as client, asyncio.timeout(60):
            while True:
                pair = await client.get(key)
                now = before
                if pair is not None and self.firewalls[number].endpoint in pair.value.decode():
                    lease = await self.etcd.ask("/v3/lease/timetolive", {"ID": str(pair.lease)})
                    now = (pair.lease, int(lease.get("TTL", 0)))
                if now[0] == before[0] and now[1] > before[1]:
                    return
                before = now
                await asyncio.sleep(0.2)


class Chaos:
    """Harms the parts of a fleet and revives them, until it is over."""

    def __init__(self, fleet: ChaosFleet, rng: random.Random) -> None:
        self.fleet, self.rng = fleet, rng
        self.done: list[str] = []
        self.is_over = False

    def _kinds(self) -> list[Callable[[], Awaitable[None]]]:
        kinds = [self.gateway_dies, self.daemon_dies, self.publisher_dies, self.freeze, self.cut]
        kinds += [self.drop, self.refuse_tokens, self.revoke_rights, self.restore]
        kinds += [self.publish_twice, *[self.publish_clone] * bool(self.fleet.clone)]
        self.rng.shuffle(kinds)
        return kinds

    async def run(self) -> None:
        """Do all kinds of harm in random order, again and again."""
        kinds: list[Callable[[], Awaitable[None]]] = []
        while not self.is_over:
            kinds = kinds or self._kinds()
            await asyncio.sleep(self.rng.uniform(0.05, 0.2))
            harm = kinds.pop()
            await harm()
            self.done.append(harm.__name__)

    async def _last(self, longest_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, longest_s))

    async def gateway_dies(self) -> None:
        gateway = self.rng.choice(self.fleet.gateways)
        await gateway.stop(signal.SIGKILL)
        gateway.start()

    async def daemon_dies(self) -> None:
        daemon = self.fleet.world.nodes[self.rng.choice(self.fleet.nodes)]
        await daemon.stop(signal.SIGKILL)
        await daemon.start()

    async def publisher_dies(self) -> None:
        publisher = self.rng.choice(self.fleet.publishers)
        await publisher.stop(signal.SIGKILL)
        publisher.start()

    async def freeze(self) -> None:
        """Stop a process for a while: a daemon, a gateway, a publisher, or etcd."""
        fleet = self.fleet
        pids = [program.pid for program in (*fleet.gateways, *fleet.publishers)]
        daemons = [fleet.world.nodes[node] for node in fleet.nodes]
        pids += [daemon.process.pid for daemon in daemons if daemon.process is not None]
        pids += [process.pid for process in fleet.etcd.processes if process is not None]
        pid = self.rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        await self._last(3.0)
        os.kill(pid, signal.SIGCONT)

    async def cut(self) -> None:
        """Cut one gateway from etcd for a while, in which what it has not heard of is given up."""
        for proxy in self.fleet.cut_off:
            await proxy.cut()
        await self._last(1.0)
        async with self.fleet.world.client("root", PASSWORD) as client:
            with contextlib.suppress(EtcdUnavailable, EtcdRefused, AssertionError):
                await self.fleet.etcd.compact(await client.revision())
        for proxy in self.fleet.cut_off:
            proxy.mend()

    async def drop(self) -> None:
        """Drop all packets between one node and the gateways for a while."""
        proxy = self.rng.choice(self.fleet.firewalls)
        proxy.drop()
        await self._last(2.0)
        proxy.mend()

    async def refuse_tokens(self) -> None:
        """Make a user, which makes every signed token invalid."""
        await _insist(self.fleet.etcd.add_user, f"user-{len(self.done)}", PASSWORD)

    async def revoke_rights(self) -> None:
        """Take all rights from the gateways or from the publishers for a while."""
        user = self.rng.choice((GATE, NODE))
        await _insist(self.fleet.etcd.revoke, user)
        await self._last(2.0)
        await _insist(self.fleet.etcd.grant, user)

    async def restore(self) -> None:
        """Make etcd what it was some moments before."""
        fleet = self.fleet
        fleet.changed = set(fleet.changing)
        backup = await _insist(fleet.etcd.back_up)
        await self._last(2.0)
        await fleet.etcd.restore(backup)
        fleet.unrecorded |= fleet.changed

    async def publish_twice(self) -> None:
        """Start a publisher beside the one of a node, as by hand, and end it in one of the ways."""
        await self._run_beside(self.rng.choice(self.fleet.nodes))

    async def publish_clone(self) -> None:
        """Start the publisher of the container that was made from the first node's image.

        While the first one's lease lives it is refused. Once that has ended nobody can tell it from
        a node that was installed again, so it is started only while the first one publishes.
        """
        await _insist(self.fleet.wait_kept, 0)
        await self._run_beside(self.fleet.clone)

    async def _run_beside(self, name: str) -> None:
        second = self.fleet.join(name)
        await self._last(4.0)
        await second.stop(self.rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)))
        self.fleet.world.programs.remove(second)


async def _insist(change: Callable[..., Awaitable[_T]], *values: Any) -> _T | None:
    """Do something until etcd does not refuse it, or was already done.

    A leader may be missing at this moment, and an answer be lost.
    """
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(KeyError, OSError, EtcdUnavailable, EtcdRefused):
                try:
                    return await change(*values)
                except AssertionError as error:
                    if any(text in str(error) for text in ("already", "not granted")):
                        return None
            await asyncio.sleep(0.1)
