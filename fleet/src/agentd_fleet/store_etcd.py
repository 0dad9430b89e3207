"""The fleet in etcd: nodes publish under a lease, gateways watch, routes change one by one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import islice

import msgspec
import structlog

from agentd.core.names import is_name, shortened
from agentd.core.slots import SlotName, SlotType
from agentd.errors import AgentdError
from agentd_fleet.etcd import MOST_CREATED, Compacted, Etcd, KeyValue
from agentd_fleet.keys import key_of, prefix_of
from agentd_fleet.report import (
    Published,
    SlotTypeReport,
    published_in,
    slot_type_in,
    slot_type_report,
    with_free,
)
from agentd_fleet.route import BadRoute, Kept, Route
from agentd_fleet.state import FleetState
from agentd_fleet.view import FleetNode

log = structlog.get_logger()

FORGOTTEN = b""
"""What stands for a moment in place of a node's report, for all gateways to forget it."""
SILENCE_S = 5.0
"""A watch that says nothing for so long is asked whether it is still there."""
AGAIN_S = (0.2, 2.0)
"""How long to wait before etcd is asked anew, drawn by chance so that not all come at once."""


class EtcdStore:
    """`Store` in etcd; implements what `route.Store` promises."""

    def __init__(self, etcd: Etcd, fleet: str, state: FleetState) -> None:
        self._etcd = etcd
        self._prefix = prefix_of(fleet)
        self._state = state
        self._reports: dict[str, Published] = {}
        self._free: dict[str, bytes] = {}
        self._away: dict[str, str] = dict.fromkeys(
            ("slot-types/", "nodes/", "free/"), "etcd has not answered yet"
        )
        self._unwritten: dict[SlotName, SlotType] = {}
        self._awaited: set[SlotName] = set()
        """Slot types that this gateway writes, or wrote and has not heard of yet."""
        self._has_unwritten = asyncio.Event()

    def why_not_live(self) -> str:
        return next((why for why in self._away.values() if why), "")

    async def route(self, kernel_id: str) -> Kept | None:
        found = await self._etcd.get(key_of(self._prefix, "routes", kernel_id))
        return None if found is None else _kept(found)

    async def keep(self, route: Route, expected: int) -> int | None:
        key = key_of(self._prefix, "routes", route.kernel_id)
        return await self._etcd.put_if(key, msgspec.json.encode(route), expected=expected)

    async def drop(self, kernel_id: str, expected: int) -> bool:
        key = key_of(self._prefix, "routes", kernel_id)
        return await self._etcd.delete_if(key, expected=expected)

    async def routes(self) -> AsyncIterator[list[Kept]]:
        async for page in self._etcd.pages(f"{self._prefix}routes/"):
            yield [kept for found in page if (kept := self._read(found)) is not None]

    def _read(self, found: KeyValue) -> Kept | None:
        try:
            return _kept(found)
        except BadRoute as error:
            log.warning("fleet.route_unreadable", key=found.key, reason=str(error))
            return None

    async def unlearn(self, name: SlotName) -> None:
        await self._etcd.delete(f"{self._prefix}slot-types/{name}")

    async def forget(self, node: FleetNode) -> None:
        key = key_of(self._prefix, "nodes", node.node_id)
        await self._etcd.put(key, FORGOTTEN)  # which every gateway sees, though there was no key
        await self._etcd.delete(key)
        await self._etcd.delete(key_of(self._prefix, "free", node.node_id))
        self._state.forget(node.node_id)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("slot-types/", self._slot_types_are, self._slot_type))
            group.create_task(self._follow("nodes/", self._nodes_are, self._node))
            group.create_task(self._follow("free/", self._free_are, self._freed))
            group.create_task(self._write())

    async def _follow(
        self,
        part: str,
        are: Callable[[Mapping[str, KeyValue]], Awaitable[None]],
        changed: Callable[[str, bytes | None], Awaitable[None]],
    ) -> None:
        """Read all keys below a part, then every change, for ever."""
        prefix, after = f"{self._prefix}{part}", 0
        while True:
            try:
                if not after:
                    found, after = await self._etcd.range(prefix)
                    await are({pair.key.removeprefix(prefix): pair for pair in found})
                self._away[part] = ""
                watch = self._etcd.watch(prefix, after=after, silence_s=SILENCE_S)
                async with contextlib.aclosing(watch) as changes:
                    async for batch, revision in changes:
                        self._away[part] = ""
                        for change in batch:
                            await changed(change.key.removeprefix(prefix), change.value)
                        after = max(after, revision)
            except Compacted:
                after = 0
                continue
            except AgentdError as error:
                if not self._away[part]:
                    log.warning("fleet.store_away", part=part, reason=str(error))
                self._away[part] = str(error)
            await asyncio.sleep(random.uniform(*AGAIN_S))  # noqa: S311 - no secret

    async def _slot_types_are(self, found: Mapping[str, KeyValue]) -> None:
        self._awaited.intersection_update(self._unwritten)
        for name, pair in sorted(found.items(), key=lambda item: item[1].create_revision):
            await self._slot_type(name, pair.value)

    async def _slot_type(self, name: str, value: bytes | None) -> None:
        if value is None:
            self._awaited.discard(name)
            self._state.unlearn(name)
            return
        try:
            slot = slot_type_in(msgspec.json.decode(value, type=SlotTypeReport))
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("fleet.slot_type_unreadable", name=name, reason=str(error))
            return
        self._awaited.discard(name)
        self._state.learn(slot)

    async def _nodes_are(self, found: Mapping[str, KeyValue]) -> None:
        for node_id in self._reports.keys() - found.keys():
            await self._node(node_id, None)
        for node_id, pair in found.items():
            await self._node(node_id, pair.value)

    async def _node(self, node_id: str, value: bytes | None) -> None:
        if not is_name(node_id):
            log.warning("fleet.node_ignored", key=shortened(node_id))
            return
        if value == FORGOTTEN:
            self._reports.pop(node_id, None)
            self._state.forget(node_id)
            return
        if value is None:
            self._reports.pop(node_id, None)
            if self._state.node(node_id) is not None:
                self._state.lose(node_id, time.time())
            return
        self._reports[node_id] = published_in(node_id, value, seen_at=time.time())
        self._note(node_id)

    async def _free_are(self, found: Mapping[str, KeyValue]) -> None:
        for node_id, pair in found.items():
            await self._freed(node_id, pair.value)

    async def _freed(self, node_id: str, value: bytes | None) -> None:
        if value is None:
            self._free.pop(node_id, None)
            return
        self._free[node_id] = value
        if node_id in self._reports:
            self._note(node_id)

    def _note(self, node_id: str) -> None:
        """Take in a node, and have what it teaches of slots known to all."""
        node = with_free(self._reports[node_id], self._free.get(node_id))
        node = replace(node, seen_at=time.time())
        self._state.note(node)
        new = {s.name: s for s in self._state.learned(node) if s.name not in self._awaited}
        self._awaited |= new.keys()
        self._unwritten |= new
        if new:
            self._has_unwritten.set()

    async def _write(self) -> None:
        """Write new slot types, many in one transaction, and repeat what etcd did not take."""
        reason = ""
        while await self._has_unwritten.wait():
            some = dict(islice(self._unwritten.items(), MOST_CREATED))
            values = {
                f"{self._prefix}slot-types/{name}": msgspec.json.encode(slot_type_report(slot))
                for name, slot in some.items()
            }
            try:
                await self._etcd.create_all(values)
            except AgentdError as error:
                if str(error) != reason:
                    reason = str(error)
                    log.warning("slot_types.write_failed", reason=reason)
                await asyncio.sleep(random.uniform(*AGAIN_S))  # noqa: S311 - not a secret
                continue
            for name in some:
                del self._unwritten[name]
            if not self._unwritten:
                self._has_unwritten.clear()


def _kept(found: KeyValue) -> Kept:
    try:
        route = msgspec.json.decode(found.value, type=Route)
    except msgspec.MsgspecError as error:
        raise BadRoute(f"what etcd has of {found.key} is no route: {error}") from None
    names = (route.kernel_id, route.node_id, route.agent_id)
    if not all(map(is_name, names)) or not found.key.endswith(f"/routes/{route.kernel_id}"):
        raise BadRoute(f"what etcd has of {found.key} is the route of something else")
    return Kept(route, found.mod_revision)
