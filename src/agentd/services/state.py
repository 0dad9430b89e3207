"""The state of the node: kernels, ledger and runtimes.

This is the only place where they change. A kernel that has not ended is charged its whole
allocation; an ended or dropped one is charged nothing. One method changes kernels and ledger
together, and calls the registered callbacks.

An observation of a kernel counts only if the kernel did not change meanwhile: each change puts
another object in its place, and a task that works on it holds its lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import ClaimRef, Holding, Ledger
from agentd.core.allocation.ports import HostPort, host_ports
from agentd.core.claim.claim import Claim, ClaimSpec, subtract_allocations
from agentd.core.kernel.states import Kernel, KernelSpec
from agentd.core.labels import LabelExcess, find_label_excess, labels_size
from agentd.errors import (
    NotReady,
    RuntimeUnavailable,
    UnknownClaim,
    UnknownKernel,
    UnknownRuntime,
)
from agentd.events import EventKind, EventLog
from agentd.services.kernels.log import has_ended, log_end

KernelCallback: TypeAlias = Callable[[Kernel | None, Kernel | None], None]
"""A callback with the kernel before and after a change; None if it did not or does not exist."""


class RuntimeState(StrEnum):
    """The availability of a runtime."""

    STARTING = "starting"
    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"


class RuntimeStatus(msgspec.Struct, frozen=True):
    """The status of a runtime; `is_listed` while its kernels are known.

    `ignored` describes objects of its last list that claim to be kernels and cannot be.
    """

    name: str
    state: RuntimeState = RuntimeState.STARTING
    reason: str = ""
    is_listed: bool = False
    ignored: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True):
    """The kernels at one moment, and the number of drops so far."""

    kernels: Mapping[str, Kernel]
    drops: int


class UnresolvedCreate(msgspec.Struct, frozen=True):
    """An unresolved create: when absence becomes proof (steady clock), and `keep_failure`."""

    until: float
    keep_failure: bool


class NodeState:
    """Kernels, ledger, ports, unresolved creates and runtimes."""

    def __init__(self, runtimes: Iterable[str], events: EventLog) -> None:
        self._events = events
        self._callbacks: list[KernelCallback] = []
        self._kernels: dict[str, Kernel] = {}
        self._drops = 0
        self._ledger = Ledger()
        self._claims: dict[str, Claim] = {}
        self._claim_users: dict[str, dict[str, Kernel]] = {}
        self._closed_claims: set[str] = set()
        self._unresolved: dict[str, UnresolvedCreate] = {}
        self._runtimes = {name: RuntimeStatus(name) for name in runtimes}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return MappingProxyType(self._kernels)

    @property
    def ports(self) -> Mapping[HostPort, str]:
        """The host ports that kernels hold, with the holder.

        If two kernels claim one port, after a manual start, the first one holds it.
        """
        holders: dict[HostPort, str] = {}
        for kernel in self:
            for port in host_ports(kernel.ports) if kernel.holds_devices else ():
                holders.setdefault(port, kernel.kernel_id)
        return holders

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels.values())

    def kernel(self, kernel_id: str) -> Kernel:
        """Return a kernel.

        Raises:
            UnknownKernel: the kernel does not exist.
        """
        if kernel_id not in self._kernels:
            raise UnknownKernel(f"unknown kernel {kernel_id}")
        return self._kernels[kernel_id]

    def is_duplicate_id(self, kernel_id: str, runtime: str) -> bool:
        """Return whether another runtime has a kernel with this id."""
        known = self._kernels.get(kernel_id)
        if known is None or known.runtime == runtime:
            return False
        return known.handle is not None or bool(known.agent_id)

    def subscribe(self, on_change: KernelCallback) -> None:
        """Register a callback for kernel changes."""
        self._callbacks.append(on_change)

    def put_kernel(self, kernel: Kernel) -> None:
        """Add or replace a kernel, and charge or release its allocation."""
        kernel_id = kernel.kernel_id
        before = self._kernels.get(kernel_id)
        self._kernels[kernel_id] = kernel
        holding = self._ledger.holdings.get(kernel_id)
        self._charge(before, kernel if kernel.holds_devices else None, holding)
        self._notify(before, kernel, holding)

    def drop_kernel(self, kernel_id: str) -> None:
        """Forget a kernel and release its share; dropping it twice changes nothing."""
        before = self._kernels.pop(kernel_id, None)
        if before is None:
            return
        self._unresolved.pop(kernel_id, None)
        self._drops += 1
        holding = self._ledger.holdings.get(kernel_id)
        self._charge(before, None, holding)
        self._notify(before, None, holding)

    def _charge(self, before: Kernel | None, now: Kernel | None, holding: Holding | None) -> None:
        """Charge or release a kernel, and its claim with the rest, in one step of the ledger."""
        is_same_claim = before is not None and now is not None and before.claim_id == now.claim_id
        if is_same_claim and now and holding and holding.allocation == now.allocation:
            return
        versions = [kernel for kernel in (before, now) if kernel is not None]
        if not versions:
            return
        kernel_id = versions[0].kernel_id
        ledger = self._ledger.without(kernel_id)
        for claim_id in {kernel.claim_id for kernel in versions if kernel.claim_id is not None}:
            users = {k: user for k, user in self.claim_kernels(claim_id).items() if k != kernel_id}
            if now and now.claim_id == claim_id:
                users[kernel_id] = now
            self._claim_users[claim_id] = users
            if not users:
                del self._claim_users[claim_id]
            ledger = self._charge_claim(ledger, self._claims.get(claim_id))
        self._ledger = (
            ledger.with_holding(kernel_id, now.agent_id, now.allocation) if now else ledger
        )

    def _charge_claim(self, ledger: Ledger, claim: Claim | None) -> Ledger:
        if claim is None:
            return ledger
        users = self._claim_users.get(claim.claim_id, {}).values()
        unused = subtract_allocations(claim.allocation, (kernel.allocation for kernel in users))
        return ledger.with_holding(ClaimRef(claim.claim_id), claim.agent_id, unused)

    def label_excess(self, spec: KernelSpec | ClaimSpec, agents: int = 1) -> LabelExcess | None:
        """Return how the labels of a request exceed a sum of the node, None if they fit.

        Those of ended kernels do not count.
        """
        if not spec.labels:
            return None
        bytes_by_agent: Counter[str] = Counter()
        owners: list[Kernel | Claim] = [kernel for kernel in self if kernel.holds_devices]
        for owner in [*owners, *self._claims.values()]:
            bytes_by_agent[owner.agent_id] += labels_size(owner.labels)
        return find_label_excess(
            spec.labels,
            spec.agent_id,
            agent_bytes=bytes_by_agent[spec.agent_id],
            node_bytes=bytes_by_agent.total(),
            agents=agents,
        )

    @property
    def claims(self) -> Mapping[str, Claim]:
        return MappingProxyType(self._claims)

    def claim(self, claim_id: str) -> Claim:
        """Return a claim.

        Raises:
            UnknownClaim: there is no claim of that id.
        """
        if claim_id not in self._claims:
            raise UnknownClaim.of(claim_id)
        return self._claims[claim_id]

    def claim_kernels(self, claim_id: str) -> Mapping[str, Kernel]:
        """Return the kernels that hold devices of a claim, those being created included."""
        return MappingProxyType(self._claim_users.get(claim_id, {}))

    def put_claim(self, claim: Claim) -> None:
        """Add or replace a claim, and charge it with what its kernels do not hold."""
        before = self._claims.get(claim.claim_id)
        self._claims[claim.claim_id] = claim
        if before is None or before.allocation is not claim.allocation:
            self._ledger = self._charge_claim(self._ledger, claim)

    def drop_claim(self, claim_id: str) -> None:
        """Forget a claim; its devices are free. Dropping twice changes nothing."""
        self._claims.pop(claim_id, None)
        self._closed_claims.discard(claim_id)
        self._ledger = self._ledger.without(ClaimRef(claim_id))

    @property
    def closed_claims(self) -> frozenset[str]:
        """Claims that nothing can be created from: not yet recorded, or ended and not yet free."""
        return frozenset(self._closed_claims)

    def close_claim(self, claim_id: str) -> None:
        """Refuse creates from a claim."""
        self._closed_claims.add(claim_id)

    def open_claim(self, claim_id: str) -> None:
        """Allow creates from a claim."""
        self._closed_claims.discard(claim_id)

    def _notify(self, before: Kernel | None, now: Kernel | None, holding: Holding | None) -> None:
        for on_change in self._callbacks:
            on_change(before, now)
        if now is None:
            self._events.publish(EventKind.KERNEL_REMOVED, before, is_of_shares=holding is not None)
        elif now != before:
            if has_ended(before, now):
                log_end(now)
            holding_now = self._ledger.holdings.get(now.kernel_id)
            self._events.publish(EventKind.KERNEL, now, is_of_shares=holding_now != holding)

    def kernel_lock(self, kernel_id: str) -> asyncio.Lock:
        """Return the lock that a task working on a kernel holds."""
        return self._locks.setdefault(kernel_id, asyncio.Lock())

    def is_busy(self, kernel_id: str) -> bool:
        """Return whether a task is working on a kernel."""
        lock = self._locks.get(kernel_id)
        return lock is not None and lock.locked()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the kernels, taken before they are observed."""
        return Snapshot(dict(self._kernels), self._drops)

    def is_unchanged(self, kernel_id: str, since: Snapshot) -> bool:
        """Return whether an observation made since the snapshot is still current.

        For a kernel that is unknown now and was unknown then: whether no kernel was dropped
        meanwhile.
        """
        if self.is_busy(kernel_id):
            return False
        now = self._kernels.get(kernel_id)
        is_same = now is since.kernels.get(kernel_id)
        return is_same and (now is not None or self._drops == since.drops)

    def mark_unresolved(self, kernel_id: str, until: float, *, keep_failure: bool = False) -> None:
        """Mark a create as unresolved until `until`, when absence becomes proof.

        With `keep_failure` it is listed as `failed` if it left nothing, since no caller waits for
        its error.
        """
        self._unresolved[kernel_id] = UnresolvedCreate(until, keep_failure)

    def mark_resolved(self, kernel_id: str) -> None:
        """Mark a create as resolved."""
        self._unresolved.pop(kernel_id, None)

    @property
    def unresolved(self) -> Mapping[str, UnresolvedCreate]:
        """The unresolved creates."""
        return MappingProxyType(self._unresolved)

    @property
    def runtimes(self) -> Mapping[str, RuntimeStatus]:
        return MappingProxyType(self._runtimes)

    @property
    def is_listed(self) -> bool:
        """Whether the kernels of every runtime are known."""
        return all(status.is_listed for status in self._runtimes.values())

    def mark_available(self, name: str, ignored: tuple[str, ...] = (), reason: str = "") -> None:
        """Mark a runtime as available after a complete list was applied.

        `reason`: why it creates no kernels at the moment.
        """
        self._set_status(RuntimeStatus(name, RuntimeState.AVAILABLE, reason, True, ignored))

    def mark_unavailable(self, name: str, reason: str) -> None:
        """Mark a runtime as unavailable; its kernels stay as they are.

        Its kernels may change unobserved, so they count as not listed until the next complete list.
        """
        self._set_status(RuntimeStatus(name, RuntimeState.UNAVAILABLE, reason))

    def _set_status(self, status: RuntimeStatus) -> None:
        before = self.runtime(status.name)
        self._runtimes[status.name] = status
        if before.state is not status.state:
            self._events.publish(EventKind.RUNTIME, status)

    def runtime(self, name: str) -> RuntimeStatus:
        """Return the status of a runtime.

        Raises:
            UnknownRuntime: the runtime does not exist.
        """
        if name not in self._runtimes:
            available = ", ".join(self._runtimes)
            raise UnknownRuntime(f"unknown runtime {name} (this node has: {available})")
        return self._runtimes[name]

    def forget_runtime(self, name: str) -> None:
        """Remove a runtime from the state."""
        status = self.runtime(name)
        del self._runtimes[name]
        forgotten = replace(
            status, state=RuntimeState.UNAVAILABLE, reason="forgotten by an operator"
        )
        self._events.publish(EventKind.RUNTIME, forgotten)

    def require_runtime(self, name: str) -> None:
        """Refuse an operation on a runtime whose kernels are not known.

        Raises:
            RuntimeUnavailable: the runtime does not answer.
            NotReady: the runtime has not been listed yet.
        """
        status = self.runtime(name)
        if status.state is RuntimeState.UNAVAILABLE:
            raise RuntimeUnavailable(f"runtime {name} is unavailable: {status.reason}")
        if not status.is_listed:
            raise NotReady(f"the kernels of runtime {name} have not been listed yet")
