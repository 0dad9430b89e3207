"""The fleet in etcd: nodes publish under leases, gateways watch, routes change one by one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
import structlog
from msgspec.structs import replace

from agentd.concurrency import run_endless
from agentd.core.names import is_name, quote_untrusted
from agentd.core.slots import SlotName
from agentd.errors import AgentdError
from agentd_fleet.store.etcd_client import EtcdClient, KeyValue
from agentd_fleet.store.etcd_transport import RevisionsCompacted
from agentd_fleet.store.keys import fleet_key, fleet_prefix
from agentd_fleet.store.route import (
    KernelRoute,
    RouteUnreadable,
    StoredRoute,
    StoreUnavailable,
    read_route,
)
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import Cordon, FleetNode, NodeStatus
from agentd_fleet.view.reports import (
    UNREADABLE,
    ParsedReport,
    SlotTypeReport,
    parse_cordon,
    parse_known_node,
    parse_node_report,
    parse_slot_type,
    slot_type_report,
    with_free,
)

log = structlog.get_logger()

SILENCE_S = 4.0
"""Seconds of silence after which a watch is probed."""
STALE_S = 9.0
"""Seconds without an answer after which a part is stale: a silence, a probe, a pause and a list."""
LIST_S = (200.0, 300.0)
"""Range of random seconds after which a part is listed again, although its watch is open."""
RETRY_S = (0.2, 1.5)
"""Range of random seconds before etcd is called again, which spreads the clients."""
PARTS = ("slot-types/", "nodes/", "free/", "known/", "cordons/")
_OnChange = Callable[[str, bytes | None, int], None]
"""Applies a key: its name, its value (None: it does not exist any more) and the revision."""


class EtcdStore:
    """`route.Store` in etcd."""

    def __init__(self, etcd: EtcdClient, fleet: str, state: FleetState) -> None:
        self._etcd = etcd
        self._prefix = fleet_prefix(fleet)
        self._state = state
        self._reports: dict[str, ParsedReport] = {}
        self._free: dict[str, bytes] = {}
        self._forgotten: dict[str, int] = {}
        self._hashes: dict[str, dict[str, int]] = {part: {} for part in PARTS}
        """Hashes of the applied values, by part and name."""
        self._answered_at = dict.fromkeys(PARTS, -math.inf)
        self._failures = dict.fromkeys(PARTS, "etcd has not answered yet")
        """The last error of each part since the last answer about it."""
        self._is_stale = False
        self._is_lost = False
        """Whether the log has said so."""
        self._revision = 0
        """The latest revision of the store that was seen."""
        self._listed = {part: asyncio.Event() for part in PARTS}
        self._has_unwritten = asyncio.Event()
        self._unreadable: set[tuple[str, int]] = set()

    def stale_reason(self) -> str:
        failure = next(filter(None, self._failures.values()), "")
        oldest_at = min(self._answered_at.values())
        is_old = time.clock_gettime(time.CLOCK_BOOTTIME) >= oldest_at + STALE_S
        # An outage ends when every part has answered, not when the first one has.
        self._is_stale = is_old or (self._is_stale and bool(failure))
        return (failure or "etcd does not answer") if self._is_stale else ""

    async def route(self, kernel_id: str) -> StoredRoute | None:
        pair = await self._etcd.get(fleet_key(self._prefix, "routes", kernel_id))
        return None if pair is None else self._parse_route(pair)

    async def put_route(self, route: KernelRoute, expected: int) -> int | None:
        key = fleet_key(self._prefix, "routes", route.kernel_id)
        return await self._etcd.put_if(key, msgspec.json.encode(route), expected=expected)

    async def rewrite(self, unreadable: RouteUnreadable) -> int | None:
        key = fleet_key(self._prefix, "routes", unreadable.kernel_id)
        return await self._etcd.put_if(key, unreadable.value, expected=unreadable.revision)

    async def delete_route(self, kernel_id: str, expected: int) -> bool:
        key = fleet_key(self._prefix, "routes", kernel_id)
        return await self._etcd.delete_if(key, expected=expected)

    async def routes(self) -> AsyncIterator[list[StoredRoute]]:
        try:
            async for page, _ in self._etcd.pages(f"{self._prefix}routes/"):
                yield [
                    stored for pair in page if (stored := self._try_parse_route(pair)) is not None
                ]
        except RevisionsCompacted as error:
            raise StoreUnavailable(
                f"the routes changed too much during the reading: {error}"
            ) from None

    def _parse_route(self, pair: KeyValue) -> StoredRoute:
        kernel_id = pair.key.removeprefix(f"{self._prefix}routes/")
        return read_route(kernel_id, pair.value, pair.mod_revision)

    def _try_parse_route(self, pair: KeyValue) -> StoredRoute | None:
        try:
            return self._parse_route(pair)
        except RouteUnreadable as error:
            if (key_revision := (pair.key, pair.mod_revision)) not in self._unreadable:
                self._unreadable.add(key_revision)
                log.warning("route.read_failed", key=pair.key, reason=str(error))
            return None

    async def forget_slot_type(self, name: SlotName) -> None:
        await self._etcd.delete(f"{self._prefix}slot-types/{name}")

    async def set_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        key = fleet_key(self._prefix, "cordons", node_id)
        if cordon is None:
            await self._etcd.delete(key)
        else:
            await self._etcd.put(key, msgspec.json.encode(cordon))

    async def forget(self, node: FleetNode) -> bool:
        node_key, free_key, known_key, cordon_key = (
            fleet_key(self._prefix, part, node.node_id)
            for part in ("nodes", "free", "known", "cordons")
        )
        async for page in self.routes():  # first, so that a forget that ends early can be repeated
            for stored in page:
                if stored.route.node_id == node.node_id:
                    key = fleet_key(self._prefix, "routes", stored.route.kernel_id)
                    await self._etcd.delete_if(key, expected=stored.revision, without=node_key)
        # A gateway may know of a node without this key, and a deletion of nothing causes no event.
        await self._etcd.put_if(known_key, b"{}", expected=0)
        if not await self._etcd.delete_unless_exists(node_key, known_key, free_key, cordon_key):
            return False
        self._state.forget(node.node_id)
        return True

    async def run(self) -> None:
        await run_endless(
            self._follow("slot-types/", self._on_slot_type_change),
            self._follow("nodes/", self._on_node_change),
            self._follow("free/", self._on_free_change),
            self._follow_known(),
            self._follow("cordons/", self._on_cordon_change),
            self._write(),
        )

    async def _follow_known(self) -> None:
        await self._listed["nodes/"].wait()
        await self._follow("known/", self._on_known_change)

    async def _follow(self, part: str, on_change: _OnChange) -> None:
        """List the keys below a part and follow their changes, again and again.

        A watch cannot tell what it missed: a store that came back may be older, at any revision.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(random.uniform(*LIST_S)):  # noqa: S311 - no secret
                        await self._list_and_watch(part, on_change)
                except AgentdError as error:
                    self._failures[part] = str(error)
                    if not self._is_lost and (reason := self.stale_reason()):
                        self._is_lost = True
                        log.warning("store.lost", part=part, reason=reason)
                    await asyncio.sleep(random.uniform(*RETRY_S))  # noqa: S311 - no secret

    async def _list_and_watch(self, part: str, on_change: _OnChange) -> None:
        """Apply all keys below a part and the end of the others, then their changes."""
        prefix, hashes = f"{self._prefix}{part}", self._hashes[part]
        previous = self._revision
        pairs, revision = await self._etcd.range(prefix)
        if revision < previous <= self._revision:
            self._revision = 0
            log.warning("store.reverted", revision=revision, previous=previous)
        self._revision = max(self._revision, revision)

        def apply(name: str, value: bytes | None, revision: int) -> None:
            if value is None:
                hashes.pop(name, None)
            else:
                hashes[name] = hash(value)
            on_change(name, value, revision)

        pair_by_name = {pair.key.removeprefix(prefix): pair for pair in pairs}
        for name in hashes.keys() - pair_by_name.keys():
            apply(name, None, revision)
        for name, pair in pair_by_name.items():
            if hashes.get(name) != hash(pair.value):
                apply(name, pair.value, pair.mod_revision)
        self._listed[part].set()
        self._has_unwritten.set()
        on_answer = partial(self._on_answer, part)
        on_answer()
        watch = self._etcd.watch(
            prefix, after=revision, silence_s=SILENCE_S, on_answer=on_answer, keys=hashes
        )
        async with contextlib.aclosing(watch) as changes:
            async for batch, reached in changes:
                self._revision = max(self._revision, reached)
                for change in batch:
                    apply(change.key.removeprefix(prefix), change.value, change.mod_revision)

    def _on_answer(self, part: str) -> None:
        self._answered_at[part] = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._failures[part] = ""
        if self._is_lost and not self.stale_reason():
            self._is_lost = False
            log.info("store.recovered")

    def _on_slot_type_change(self, name: str, value: bytes | None, _: int) -> None:
        self._state.forget_slot_type(name)  # a definition that differs is a new one
        if value is None:
            self._has_unwritten.set()  # a node may offer it
            return
        try:
            self._state.add_slot_type(
                parse_slot_type(msgspec.json.decode(value, type=SlotTypeReport))
            )
        except UNREADABLE as error:
            log.warning("slot_type.read_failed", name=name, reason=str(error))

    def _on_node_change(self, node_id: str, value: bytes | None, revision: int) -> None:
        if not is_name(node_id):
            log.warning("node.ignored", key=quote_untrusted(node_id))
            return
        if value is not None:
            if self._forgotten.get(node_id, 0) < revision:
                self._forgotten.pop(node_id, None)
            self._reports[node_id] = parse_node_report(node_id, value, seen_at=time.time())
            self._update_node(node_id)
        elif self._reports.pop(node_id, None) is not None:
            self._has_unwritten.set()  # another node may offer the same slots
            if node_id in self._forgotten and node_id not in self._hashes["known/"]:
                self._state.forget(node_id)
                return
            self._state.mark_lost(node_id, time.time())

    def _on_known_change(self, node_id: str, value: bytes | None, revision: int) -> None:
        """Apply that a node existed once: it is lost, not unknown. None: it is forgotten."""
        if not is_name(node_id):
            return
        if value is None:
            self._forgotten[node_id] = revision
            if node_id not in self._reports:
                self._state.forget(node_id)
            return
        listed = self._state.node(node_id)
        if node_id not in self._reports and (listed is None or not listed.url):
            self._state.update_node(replace(parse_known_node(node_id, value), seen_at=time.time()))

    def _on_cordon_change(self, node_id: str, value: bytes | None, _: int) -> None:
        self._state.set_cordon(node_id, None if value is None else parse_cordon(value))

    def _on_free_change(self, node_id: str, value: bytes | None, _: int) -> None:
        if value is None:
            self._free.pop(node_id, None)
            return
        self._free[node_id] = value
        if node_id in self._reports:
            self._update_node(node_id)

    def _update_node(self, node_id: str) -> None:
        """Apply a node's report and write its new slot types."""
        node = with_free(self._reports[node_id], self._free.get(node_id))
        node = replace(node, seen_at=time.time())
        is_unreadable = node.exclusion_reason.startswith("unreadable: ")
        if is_unreadable or node.status is NodeStatus.NEWER:
            self._state.log_reason(node)
        self._state.update_node(node)
        if self._state.new_slot_types(node):
            self._has_unwritten.set()

    async def _write(self) -> None:
        """Write the slot types that nodes offer and the fleet lacks; repeat failed writes."""
        failures = 0
        while await self._has_unwritten.wait():
            self._has_unwritten.clear()
            values: dict[str, tuple[bytes, str]] = {}
            for node_id, report in self._reports.items():
                node_key = fleet_key(self._prefix, "nodes", node_id)
                for slot in self._state.new_slot_types(report.node):
                    value = msgspec.json.encode(slot_type_report(slot))
                    values.setdefault(f"{self._prefix}slot-types/{slot.name}", (value, node_key))
            try:
                await self._etcd.create_all(values)
                failures = 0
            except AgentdError as error:
                if failures == 1:  # not at once: a connection may have broken
                    log.warning("slot_type.write_failed", reason=str(error))
                failures += 1
                await asyncio.sleep(random.uniform(*RETRY_S))  # noqa: S311 - not a secret
                self._has_unwritten.set()
