"""The self-check: compares the daemon's state with the state of its runtimes.

It changes nothing. Kernels with an operation in progress are skipped. A finding counts only if a
second pass finds it, too: a runtime shows an end before the ledger does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from agentd.core.allocation.ledger import ClaimRef, Ledger
from agentd.core.devices import MEMORY, DeviceId, Inventory
from agentd.core.invariants import (
    RULES,
    NodeSnapshot,
    PresentKernel,
    RecordedClaim,
    RecordedKernel,
    Violation,
    find_violations,
)
from agentd.core.kernel.adoption import adopt
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.states import KernelState
from agentd.core.partition.rules import AllocationMode
from agentd.core.slots import CPU, MEM, ONE
from agentd.host.claim_holders import HolderObserver
from agentd.services.node import Node
from agentd.services.protocols import Runtime
from agentd.state.folder import StateFolder

RECHECK_PAUSE_S = 0.5


class Check(msgspec.Struct, frozen=True):
    """One rule and its findings."""

    rule: str
    promise: str
    findings: Sequence[str] = ()


class SelfCheck:
    """Checks the node against every rule of `agentd.core.invariants`."""

    def __init__(
        self,
        node: Node,
        runtimes: Mapping[str, Runtime],
        store: StateFolder,
        holders: HolderObserver,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._runtimes = runtimes
        self._store = store
        self._holders = holders

    async def run(self) -> list[Check]:
        """Return a check for each rule.

        Raises:
            RuntimeUnavailable: a runtime does not list its kernels.
            StateUnavailable: the saved records cannot be listed.
        """
        findings = await self._find_violations()
        if findings:
            await asyncio.sleep(RECHECK_PAUSE_S)
            confirmed = set(await self._find_violations())
            findings = [violation for violation in findings if violation in confirmed]
        return [
            Check(rule, promise, tuple(v.detail for v in findings if v.rule == rule))
            for rule, promise in RULES.items()
        ]

    async def _find_violations(self) -> list[Violation]:
        snapshot = self._state.snapshot()
        kernels: list[ObservedKernel] = []
        strays: list[str] = []
        for name in self._state.runtimes:
            self._state.require_runtime(name)
            listing = await self._runtimes[name].list_kernels()
            kernels += listing.kernels
            strays += [
                item.description
                for item in listing.leftovers
                if item.kernel_id not in self._state.kernels
                and self._state.is_unchanged(item.kernel_id, snapshot)
            ]
        duplicates = [i for i in kernels if self._state.is_duplicate_id(i.kernel_id, i.runtime)]
        strays += [
            f"{i.runtime} kernel {i.kernel_id} ({i.handle}), duplicate id" for i in duplicates
        ]
        kernel_ids = {item.kernel_id for item in kernels} | self._state.kernels.keys()
        comparable = {k for k in kernel_ids if self._state.is_unchanged(k, snapshot)}
        comparable -= self._state.unresolved.keys() | {
            i.kernel_id for i in kernels if i.is_unreadable
        }
        saved_claims = self._store.load_claims()
        strays += self._stray_records(saved_claims)
        unique = [i for i in kernels if i not in duplicates]
        return find_violations(self._node_snapshot(unique, strays, comparable, saved_claims))

    def _stray_records(self, saved_claims: Collection[str]) -> list[str]:
        saved = {record.kernel_id for record in self._store.load_records()}
        kernels = sorted(saved - self._state.kernels.keys())
        claims = sorted(set(saved_claims) - self._state.claims.keys())
        return [f"record of kernel {i}" for i in kernels] + [f"record of claim {i}" for i in claims]

    def _node_snapshot(
        self,
        kernels: Sequence[ObservedKernel],
        strays: Sequence[str],
        comparable: Collection[str],
        saved_claims: Collection[str],
    ) -> NodeSnapshot:
        split = self._devices.split
        inventory = split.inventory
        return NodeSnapshot(
            is_shared=split.mode is AllocationMode.SHARED,
            capacities={
                f"{device_id}/{offer.slot}": offer.capacity
                for device_id, device in inventory.by_id.items()
                for offer in device.slots
            },
            holdings=_comparable_amounts(self._state.ledger, comparable),
            recorded={
                k.kernel_id: RecordedKernel(k.agent_id, k.state, k.handle)
                for k in self._state
                if k.kernel_id in comparable
            },
            present={
                i.kernel_id: _present_kernel(i, inventory)
                for i in kernels
                if i.kernel_id in comparable
            },
            strays=tuple(strays),
            divisible=frozenset({str(MEMORY)}),
            claims=dict(self._recorded_claims(saved_claims)),
        )

    def _recorded_claims(self, saved: Collection[str]) -> Iterator[tuple[str, RecordedClaim]]:
        """Yield the claims; one that is being made or ended is not compared."""
        for claim_id, claim in self._state.claims.items():
            is_open = claim_id not in self._state.closed_claims
            yield (
                str(ClaimRef(claim_id)),
                RecordedClaim(
                    claim.agent_id,
                    claim.is_observed,
                    is_recorded=claim_id in saved or not is_open,
                    has_ended=is_open and not self._holders.is_alive(claim.holder),
                ),
            )


def _comparable_amounts(ledger: Ledger, comparable: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the holders with their amounts, by device and slot."""
    holdings: dict[str, dict[str, int]] = {}
    for device_id, holders in ledger.shares_by_device.items():
        for holder, share in holders.items():
            if isinstance(holder, ClaimRef) or holder in comparable:
                for slot, _, amount in share.amounts:
                    holdings.setdefault(f"{device_id}/{slot}", {})[str(holder)] = amount
    return holdings


def _present_kernel(item: ObservedKernel, inventory: Inventory) -> PresentKernel:
    kernel = adopt(item, inventory).kernel
    if kernel.state is KernelState.UNREADABLE:
        return PresentKernel(item.handle, item.is_alive)
    amounts = {
        f"{share.device_id}/{slot}": amount
        for share in kernel.allocation.shares
        for slot, _, amount in share.amounts
    }
    return PresentKernel(item.handle, item.is_alive, amounts, dict(_reported_limits(item)))


def _reported_limits(item: ObservedKernel) -> Iterator[tuple[str, int]]:
    """Yield the limits that a runtime reports for a kernel."""
    for cores in item.cores or ():
        first, _, last = cores.partition("-")
        for core in range(int(first), int(last or first) + 1):
            yield f"{DeviceId(CPU, str(core))}/{CPU}", ONE
    if item.memory_bytes is not None:
        yield f"{MEMORY}/{MEM}", item.memory_bytes
