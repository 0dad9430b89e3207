"""The state of one gateway: reports of the fleet, folded into a view on demand."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import structlog
from msgspec.structs import replace

from agentd.core.slots import BUILT_IN, ResourceSlots, SlotName, SlotType
from agentd_fleet.view.fleet_view import Cordon, FleetNode, FleetView, NodeStatus

log = structlog.get_logger()

DEBIT_S = 3.0
ANSWERED_S = 15.0
"""Seconds for which an answer vouches that this gateway reaches a node."""
MAX_LOGGED, LOGGED_S = 8, 3600.0
"""Maximum lines with one event about one node in this many seconds, and twice as many if each has
another reason."""
ANSWER_TIMEOUT_S = 3.0
"""Seconds for a connection, its names included; for a decision; and for a call of a silent node."""
SILENT_STATUSES = (NodeStatus.DAEMON_DOWN, NodeStatus.LOST)
"""The statuses of a node that, as far as the store tells, answers nobody."""
FOLD_S = 0.005
"""Seconds in which reports are collected before they are folded."""


class FleetState:
    """Collects reports and folds them into one view after another; on one event loop."""

    def __init__(self) -> None:
        self._slot_types = {slot.name: slot for slot in BUILT_IN}
        self._view = FleetView(slot_types=self._slot_types)
        self._unfolded: dict[str, FleetNode] = {}
        self._forgotten: set[str] = set()
        self._reported: dict[str, FleetNode] = {}
        self._revision = 0
        self._debits: dict[str, asyncio.TimerHandle] = {}
        self._fold_timer: asyncio.TimerHandle | None = None
        self._limit_callbacks: defaultdict[str, set[Callable[[], None]]] = defaultdict(set)
        self.probe_soon: Callable[[str], None] = lambda _: None
        """Called with a node that turned silent during calls, which end unless it answers."""
        self._cordons: dict[str, Cordon] = {}
        self._cordon_changed = asyncio.Event()
        self._unreachable: dict[str, str] = {}
        self._answered_at: dict[str, float] = {}
        self._logged: dict[tuple[str, str], tuple[float, list[str]]] = {}
        """The reasons that were logged, by node and event, and since when."""
        self._vouch_ends: dict[str, asyncio.TimerHandle] = {}
        """The ends of what the last answers of nodes vouch for, while calls of them go on."""

    @property
    def view(self) -> FleetView:
        """The current view; a request takes it once and keeps it."""
        if self._slot_types is not self._view.slot_types:
            self._view = self._view.with_slot_types(self._slot_types, self._next_revision())
        if self._unfolded or self._forgotten:
            self._view = self._view.with_changes(
                self._unfolded.values(), self._forgotten, self._next_revision()
            )
            self._unfolded, self._forgotten = {}, set()
        return self._view

    def node(self, node_id: str) -> FleetNode | None:
        """Return the latest report of a node."""
        if node_id in self._forgotten:
            return None
        return self._unfolded.get(node_id) or self._view.nodes.get(node_id)

    def update_node(self, node: FleetNode) -> None:
        """Apply a node's report."""
        previous = self._reported.get(node.node_id)
        is_silent = node.status in SILENT_STATUSES
        was_silent = previous is None or previous.status in SILENT_STATUSES
        is_changed = is_silent is not was_silent
        if previous is not None and (previous.url != node.url or is_changed):
            self._answered_at.pop(node.node_id, None)
            if not is_silent or previous.url != node.url:
                self._unreachable.pop(node.node_id, None)
        node = replace(
            node,
            cordon=self._cordons.get(node.node_id),
            unreachable=self._unreachable.get(node.node_id, ""),
        )
        if node.reported_reason and not node.exclusion_reason:
            self.log_reason(node)
        self._unfolded[node.node_id] = self._reported[node.node_id] = node
        self._fold_soon()
        self._forgotten.discard(node.node_id)
        if is_changed:
            self._limit_calls(node.node_id)

    def log_reason(self, node: FleetNode) -> None:
        """Log the reason of a node's new report; a node that alternates does not fill the log."""
        previous, reason = self._reported.get(node.node_id), node.reported_reason
        event = "node.unusable"
        if node.status is NodeStatus.NEWER:
            event = "node.schema_unsupported"
        elif node.exclusion_reason:
            event = "node.read_failed"
        is_new = previous is None or previous.reported_reason != reason
        if is_new and self.may_log(node.node_id, event, reason):
            log.warning(event, address=node.url, node_id=node.node_id, reason=reason)

    def may_log(self, node_id: str, event: str, reason: str) -> bool:
        """Return whether to log an event with this reason, which then counts as logged."""
        since, logged = self._logged.get((node_id, event), (-math.inf, []))
        if (now := time.monotonic()) >= since + LOGGED_S:
            since, logged = now, []
        if len(logged) >= MAX_LOGGED * (1 if reason in logged else 2):
            return False
        self._logged[node_id, event] = since, [*logged, reason]
        return True

    def set_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        """Apply that a node is cordoned, or with None that it is not; it need not be known yet."""
        if cordon is None:
            self._cordons.pop(node_id, None)
        else:
            self._cordons[node_id] = cordon
        self._apply_again(node_id)
        self._cordon_changed.set()
        self._cordon_changed = asyncio.Event()

    async def wait_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        """Wait until a node has this cordon, or with None none."""
        while self._cordons.get(node_id) != cordon:
            await self._cordon_changed.wait()

    def set_unreachable(self, node_id: str, reason: str) -> None:
        """Apply why calls of this gateway to a node fail, or with "" that one was answered.

        The status of a silent node says already that it does not answer.
        """
        was_silent, node = self.is_silent(node_id), self.node(node_id)
        if not reason:
            self._answered_at[node_id] = asyncio.get_running_loop().time()
        elif node is not None and node.status in SILENT_STATUSES:
            self._answered_at.pop(node_id, None)
            reason = self._unreachable.get(node_id, "")
        if reason != self._unreachable.get(node_id, ""):
            if reason:
                self._unreachable[node_id] = reason
            else:
                self._unreachable.pop(node_id, None)
            self._apply_again(node_id)
        if self.is_silent(node_id) is not was_silent:
            self._limit_calls(node_id)

    @property
    def unreachable(self) -> Mapping[str, str]:
        """The nodes that this gateway does not reach, with the reasons."""
        return self._unreachable

    def has_answered(self, node_id: str) -> bool:
        """Return whether a node has answered this gateway's last call, and not long ago."""
        answered_at = self._answered_at.get(node_id, -math.inf)
        return (
            node_id not in self._unreachable
            and asyncio.get_running_loop().time() - answered_at < ANSWERED_S
        )

    def is_silent(self, node_id: str) -> bool:
        """Return whether a node answers nobody, as far as the store and calls from here tell."""
        node = self.node(node_id)
        is_silent = node is not None and node.status in SILENT_STATUSES
        return is_silent and not self.has_answered(node_id)

    def _apply_again(self, node_id: str) -> None:
        if (reported := self._reported.get(node_id)) is not None:
            self.update_node(reported)

    def mark_lost(self, node_id: str, seen_at: float) -> None:
        """Mark a node as lost; it stays listed."""
        node = self.node(node_id) or FleetNode(node_id, {}, {})
        if node.status is not NodeStatus.LOST:
            self.update_node(replace(node, status=NodeStatus.LOST, seen_at=seen_at))

    def forget(self, node_id: str) -> None:
        """Forget a node."""
        self._unfolded.pop(node_id, None)
        self._reported.pop(node_id, None)
        self._unreachable.pop(node_id, None)
        self._answered_at.pop(node_id, None)
        self._forgotten.add(node_id)
        self._limit_calls(node_id)
        self._limit_callbacks.pop(node_id, None)

    def new_slot_types(self, node: FleetNode) -> list[SlotType]:
        """Return the slot types of a node that are new to the fleet."""
        return [slot for name, slot in node.slot_types.items() if name not in self._slot_types]

    def add_slot_type(self, slot: SlotType) -> None:
        """Add a slot type; the first definition of a name stays."""
        if slot.name not in self._slot_types:
            self._slot_types = {**self._slot_types, slot.name: slot}

    def forget_slot_type(self, name: SlotName) -> None:
        """Forget a slot type, except a built-in one."""
        slots = self._slot_types.items()
        self._slot_types = {n: slot for n, slot in slots if n != name or slot in BUILT_IN}

    def debit(self, node_id: str, agent_id: str, slots: ResourceSlots) -> None:
        """Deduct a pending placement until the node reports it.

        Without a report the node was not called, refused, or has removed the kernel again.
        """
        self._view = self.view.with_debit(node_id, agent_id, slots)
        if (timer := self._debits.pop(node_id, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._debits[node_id] = loop.call_later(DEBIT_S, self.undebit, node_id)

    def undebit(self, node_id: str) -> None:
        """Return to a node's latest report."""
        if (timer := self._debits.pop(node_id, None)) is not None:
            timer.cancel()
        if (reported := self._reported.get(node_id)) is not None:
            self._unfolded[node_id] = reported
            self._fold_soon()

    def without_debits(self) -> FleetView:
        """Return the view without deductions: a guess must not cause a refusal."""
        for node_id in list(self._debits):
            self.undebit(node_id)
        return self.view

    @asynccontextmanager
    async def call_timeout(self, node_id: str, limit_s: float) -> AsyncIterator[None]:
        """Limit a call to a node, to `ANSWER_TIMEOUT_S` while the node is silent or unknown.

        Raises:
            TimeoutError: the call took longer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s

        def limit() -> None:
            if not timeout.expired():
                soon = loop.time() + ANSWER_TIMEOUT_S
                may_be_slow = self.node(node_id) is not None and not self.is_silent(node_id)
                timeout.reschedule(deadline if may_be_slow else min(deadline, soon))

        async with asyncio.timeout_at(deadline) as timeout:
            callbacks = self._limit_callbacks[node_id]
            callbacks.add(limit)
            limit()
            self._watch_vouching(node_id)
            try:
                yield
            finally:
                callbacks.discard(limit)

    def _fold_soon(self) -> None:
        """Schedule the fold of reports before a request needs it."""
        if self._fold_timer is None:
            self._fold_timer = asyncio.get_running_loop().call_later(FOLD_S, self._fold)

    def _fold(self) -> None:
        self._fold_timer = None
        _ = self.view

    def _limit_calls(self, node_id: str) -> None:
        """Limit the calls in progress if their node is silent, and lift the limit otherwise."""
        for limit in self._limit_callbacks.get(node_id, ()):
            limit()
        if self._limit_callbacks.get(node_id) and self.is_silent(node_id):
            self.probe_soon(node_id)
        self._watch_vouching(node_id)

    def _watch_vouching(self, node_id: str) -> None:
        """Look again at calls in progress when the last answer of a silent node counts no more."""
        node = self.node(node_id)
        if node is None or node.status not in SILENT_STATUSES or self.is_silent(node_id):
            return
        if self._limit_callbacks.get(node_id) and node_id not in self._vouch_ends:
            loop, at = asyncio.get_running_loop(), self._answered_at[node_id] + ANSWERED_S
            self._vouch_ends[node_id] = loop.call_at(at, self._on_vouching_ended, node_id)

    def _on_vouching_ended(self, node_id: str) -> None:
        del self._vouch_ends[node_id]
        self._limit_calls(node_id)

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision
