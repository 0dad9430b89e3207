"""Invariants: rules that hold on a node at all times, also after a crash of agentd.

They are checked on a `NodeSnapshot`: the recorded kernels and their shares beside the observed
containers and processes. The daemon's self-check builds it from the inside, tests from the outside.
Amounts are compared by device and slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from agentd.core.kernel.states import ENDED, LIVE, KernelState

Holdings = Mapping[str, Mapping[str, int]]
"""Shares by device and slot (`name/id/slot`) and kernel, in base units.

0 of the slot "" quarantines the whole device.
"""


class Violation(msgspec.Struct, frozen=True):
    """A violated rule, and where."""

    rule: str
    detail: str


RULES = {
    "capacity": "the shares of a device add up to at most its capacity",
    "owner": "outside shared mode no device is held by two agents",
    "accounted": "every kernel and claim is recorded, and holds its allocation",
    "limits": "every kernel is limited to its cores and memory",
    "ghost": "every holder in the ledger is a live or starting kernel, or a claim of a live holder",
    "stray": "a removed kernel leaves no container, process, folder, port, cgroup or intent",
}
"""The promise of each rule."""


class RecordedKernel(msgspec.Struct, frozen=True):
    """A recorded kernel; `handle` is the runtime's name for it."""

    agent_id: str
    state: KernelState
    handle: str | None


class PresentKernel(msgspec.Struct, frozen=True):
    """An observed kernel; `allocation` is by its own label, by device and slot.

    `limits` holds the current limits of its runtime in the same form; None if unknown.
    """

    handle: str
    is_alive: bool
    allocation: Mapping[str, int] | None = None
    limits: Mapping[str, int] | None = None


class RecordedClaim(msgspec.Struct, frozen=True):
    """A claim as the ledger has it; an observed one may meet other holders.

    `is_recorded` says whether the state folder has it, `has_ended` whether its process or cgroup
    has.
    """

    agent_id: str
    is_observed: bool = False
    is_recorded: bool = True
    has_ended: bool = False


class NodeSnapshot(msgspec.Struct, frozen=True):
    """One snapshot of a node; several agents may share `divisible` devices (memory) in any mode.

    `capacities` are by device and slot. A kernel may hold another slot than a device offers: the
    device is held whole, and there is no capacity to compare with. Claims are holders by the name
    `claim ID`.
    """

    is_shared: bool
    capacities: Mapping[str, int]
    holdings: Holdings
    recorded: Mapping[str, RecordedKernel]
    present: Mapping[str, PresentKernel]
    strays: tuple[str, ...] = ()
    divisible: frozenset[str] = msgspec.field(default_factory=frozenset)
    claims: Mapping[str, RecordedClaim] = {}


def find_violations(snapshot: NodeSnapshot) -> list[Violation]:
    """Return all violated rules in the order of `RULES`."""
    return [
        *_capacity_violations(snapshot),
        *_owner_violations(snapshot),
        *_record_violations(snapshot),
        *_claim_violations(snapshot),
        *_limit_violations(snapshot),
        *_dead_holders(snapshot),
        *(Violation("stray", stray) for stray in snapshot.strays),
    ]


def _capacity_violations(snapshot: NodeSnapshot) -> Iterator[Violation]:
    for key, holders in snapshot.holdings.items():
        granted = _granted_amounts(holders, snapshot)
        held_amount, capacity = sum(granted.values()), snapshot.capacities.get(key)
        if capacity is not None and held_amount > capacity:
            names = ", ".join(sorted(holders))
            yield Violation("capacity", f"{key}: {held_amount} of {capacity} are held, by {names}")


def _granted_amounts(holders: Mapping[str, int], snapshot: NodeSnapshot) -> Mapping[str, int]:
    """Return the holders without observed claims, whose devices an engine gave."""
    claims = snapshot.claims
    return {
        holder: amount
        for holder, amount in holders.items()
        if not (holder in claims and claims[holder].is_observed)
    }


def _owner_violations(snapshot: NodeSnapshot) -> Iterator[Violation]:
    holders_by_device: dict[str, dict[str, int]] = {}
    for key, amounts in snapshot.holdings.items():
        amount_by_holder = holders_by_device.setdefault(key.rpartition("/")[0], {})
        for holder, amount in _granted_amounts(amounts, snapshot).items():
            amount_by_holder[holder] = amount_by_holder.get(holder, 0) + amount
    for device, holders in holders_by_device.items():
        if snapshot.is_shared or device in snapshot.divisible:
            continue
        recorded: dict[str, RecordedKernel | RecordedClaim] = {
            **snapshot.recorded,
            **snapshot.claims,
        }
        owners = {
            recorded[holder].agent_id
            for holder, amount in holders.items()
            if amount and holder in recorded
        }
        if len(owners) > 1:
            names = ", ".join(sorted(holders))
            agents = ", ".join(sorted(owners))
            yield Violation("owner", f"{device} is held by {names}, of agents {agents}")


def _record_violations(snapshot: NodeSnapshot) -> Iterator[Violation]:
    for kernel_id, present in snapshot.present.items():
        recorded = snapshot.recorded.get(kernel_id)
        if recorded is None:
            yield Violation(
                "stray", f"kernel {kernel_id} ({present.handle}) runs but is not recorded"
            )
        elif present.is_alive and recorded.state in ENDED:
            reason = f"kernel {kernel_id} ({present.handle}) lives but is {recorded.state}"
            yield Violation("accounted", reason)
        elif present.is_alive and recorded.state in LIVE:
            yield from _compare_with_ledger(snapshot, kernel_id, recorded, present)


def _claim_violations(snapshot: NodeSnapshot) -> Iterator[Violation]:
    for holder, claim in snapshot.claims.items():
        if not claim.is_recorded:
            yield Violation("accounted", f"{holder} has no record")
        if claim.has_ended:
            yield Violation("ghost", f"{holder} holds devices but its holder has ended")


def _compare_with_ledger(
    snapshot: NodeSnapshot, kernel_id: str, recorded: RecordedKernel, present: PresentKernel
) -> Iterator[Violation]:
    if recorded.handle != present.handle:
        reason = f"kernel {kernel_id} is {present.handle}, recorded as {recorded.handle}"
        yield Violation("accounted", reason)
    for device, amount in (present.allocation or {}).items():
        held = snapshot.holdings.get(device, {}).get(kernel_id)
        if held != amount:
            reason = f"kernel {kernel_id} has {amount} of {device}, the ledger {held or 0}"
            yield Violation("accounted", reason)


def _limit_violations(snapshot: NodeSnapshot) -> Iterator[Violation]:
    """Compare limits with allocations; a kernel without cores, for example, has no such limit."""
    for kernel_id, present in snapshot.present.items():
        if not present.is_alive or present.allocation is None or present.limits is None:
            continue
        for name in sorted({device.partition("/")[0] for device in present.limits}):
            amounts, limits = (
                {d: amount for d, amount in by_device.items() if d.partition("/")[0] == name}
                for by_device in (present.allocation, present.limits)
            )
            if amounts and amounts != limits:
                reason = f"kernel {kernel_id} has {_join_amounts(amounts)}, but its limits are"
                yield Violation("limits", f"{reason} {_join_amounts(limits)}")


def _join_amounts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} of {device}" for device, amount in sorted(amounts.items()))


def _dead_holders(snapshot: NodeSnapshot) -> Iterator[Violation]:
    holders = {kernel for by_kernel in snapshot.holdings.values() for kernel in by_kernel}
    for kernel_id in sorted(holders - snapshot.claims.keys()):
        recorded = snapshot.recorded.get(kernel_id)
        if recorded is None or recorded.state in ENDED:
            state = recorded.state if recorded else "unknown"
            yield Violation("ghost", f"kernel {kernel_id} holds devices but is {state}")
    for kernel_id, recorded in snapshot.recorded.items():
        present = snapshot.present.get(kernel_id)
        if recorded.state in LIVE and not (present and present.is_alive):
            reason = f"kernel {kernel_id} is recorded as {recorded.state} but is not alive"
            yield Violation("ghost", reason)
