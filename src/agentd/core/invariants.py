"""Invariants: rules that hold on a node at all times, also after a crash of agentd.

Judges a `NodeSnapshot`: kernels and holdings as they are recorded, beside the containers and
processes that are there. The daemon's self-check takes it from the inside, tests take it from the
outside; the rules are the same. Amounts are compared by device and slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from agentd.core.kernel.states import ENDED, LIVE, STARTING, KernelState

Holdings = Mapping[str, Mapping[str, int]]
"""By device and slot (`name/id/slot`), by kernel: how much, in base units.

0 of the slot "" holds the whole device.
"""


class Violation(NamedTuple):
    """A rule that does not hold, and where."""

    rule: str
    detail: str


RULES = {
    "capacity": "shares on a device add up to at most its capacity",
    "owner": "outside shared mode no device is held by two agents",
    "accounted": "every kernel that is there is in the books, and holds what it was given",
    "limits": "every kernel is held to the cores and the memory that it was given",
    "ghost": "every holder in the ledger is a kernel that lives or is being started",
    "stray": "no container, process, folder, port, cgroup or intent is left of a kernel",
}
"""What a snapshot is judged by."""

SURVIVAL = "survival"
"""What lived before a crash lives after it, the same, and holds the same."""


class RecordedKernel(msgspec.Struct, frozen=True):
    """A kernel as the books have it; `handle` is what the runtime knows it by."""

    agent_id: str
    state: KernelState
    handle: str | None


class Present(msgspec.Struct, frozen=True):
    """What is there of a kernel; `given` is what it says itself that it holds.

    `held_to` is what its runtime limits it to now. Both are by device and slot, as holdings are.
    None: that cannot be told.
    """

    handle: str
    is_alive: bool
    given: Mapping[str, int] | None = None
    held_to: Mapping[str, int] | None = None


class RecordedClaim(msgspec.Struct, frozen=True):
    """A claim as the ledger has it; an observed one may meet other holders."""

    agent_id: str
    is_observed: bool = False


class NodeSnapshot(msgspec.Struct, frozen=True):
    """One look at a node; `divisible` devices (memory) go to several agents in every mode.

    `capacities` are by device and slot. A kernel may hold another slot than a device offers: the
    device is held whole, and there is no capacity to compare with. Claims are holders by the name
    `claim ID`.
    """

    is_shared: bool
    capacities: Mapping[str, int]
    holdings: Holdings
    accounted: Mapping[str, RecordedKernel]
    present: Mapping[str, Present]
    strays: tuple[str, ...] = ()
    divisible: frozenset[str] = msgspec.field(default_factory=frozenset)
    claims: Mapping[str, RecordedClaim] = {}


def violations(snapshot: NodeSnapshot) -> list[Violation]:
    """Return every rule that does not hold; in the order of `RULES`."""
    return [
        *_over_capacity(snapshot),
        *_with_two_owners(snapshot),
        *_unaccounted(snapshot),
        *_unlimited(snapshot),
        *_ghosts(snapshot),
        *(Violation("stray", stray) for stray in snapshot.strays),
    ]


def _over_capacity(snapshot: NodeSnapshot) -> Iterator[Violation]:
    for place, holders in snapshot.holdings.items():
        granted = _granted(holders, snapshot)
        held, capacity = sum(granted.values()), snapshot.capacities.get(place)
        if capacity is not None and held > capacity:
            who = ", ".join(sorted(holders))
            yield Violation("capacity", f"{place}: {held} of {capacity} is held, by {who}")


def _granted(holders: Mapping[str, int], snapshot: NodeSnapshot) -> Mapping[str, int]:
    """Return the holders without observed claims, whose devices an engine gave."""
    claims = snapshot.claims
    return {
        holder: amount
        for holder, amount in holders.items()
        if not (holder in claims and claims[holder].is_observed)
    }


def _with_two_owners(snapshot: NodeSnapshot) -> Iterator[Violation]:
    by_device: dict[str, dict[str, int]] = {}
    for place, amounts in snapshot.holdings.items():
        held = by_device.setdefault(_device_of(place), {})
        for holder, amount in _granted(amounts, snapshot).items():
            held[holder] = held.get(holder, 0) + amount
    for device, holders in by_device.items():
        if snapshot.is_shared or device in snapshot.divisible:
            continue
        recorded: dict[str, RecordedKernel | RecordedClaim] = {
            **snapshot.accounted,
            **snapshot.claims,
        }
        owners = {
            recorded[holder].agent_id
            for holder, amount in holders.items()
            if amount and holder in recorded
        }
        if len(owners) > 1:
            who = ", ".join(sorted(holders))
            agents = ", ".join(sorted(owners))
            yield Violation("owner", f"{device} is held by {who}, of agents {agents}")


def _device_of(place: str) -> str:
    return place.rpartition("/")[0]


def _unaccounted(snapshot: NodeSnapshot) -> Iterator[Violation]:
    for kernel_id, present in snapshot.present.items():
        accounted = snapshot.accounted.get(kernel_id)
        if accounted is None:
            yield Violation(
                "stray", f"kernel {kernel_id} ({present.handle}) runs but is not recorded"
            )
        elif present.is_alive and accounted.state in ENDED:
            why = f"kernel {kernel_id} ({present.handle}) lives, and is {accounted.state}"
            yield Violation("accounted", why)
        elif present.is_alive and accounted.state in LIVE:
            yield from _given_and_held(snapshot, kernel_id, accounted, present)


def _given_and_held(
    snapshot: NodeSnapshot, kernel_id: str, accounted: RecordedKernel, present: Present
) -> Iterator[Violation]:
    if accounted.handle != present.handle:
        why = f"kernel {kernel_id} is {present.handle}, and the books have {accounted.handle}"
        yield Violation("accounted", why)
    for device, amount in (present.given or {}).items():
        held = snapshot.holdings.get(device, {}).get(kernel_id)
        if held != amount:
            why = f"kernel {kernel_id} was given {amount} of {device}, the ledger has {held or 0}"
            yield Violation("accounted", why)


def _unlimited(snapshot: NodeSnapshot) -> Iterator[Violation]:
    """Compare limits with what was given; what was given none of, such as cores, is not limited."""
    for kernel_id, present in snapshot.present.items():
        if not present.is_alive or present.given is None or present.held_to is None:
            continue
        for name in sorted({device.partition("/")[0] for device in present.held_to}):
            given, held_to = (
                {d: amount for d, amount in amounts.items() if d.partition("/")[0] == name}
                for amounts in (present.given, present.held_to)
            )
            if given and given != held_to:
                why = f"kernel {kernel_id} was given {_listed(given)}, and is held to"
                yield Violation("limits", f"{why} {_listed(held_to)}")


def _listed(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} of {device}" for device, amount in sorted(amounts.items()))


def _ghosts(snapshot: NodeSnapshot) -> Iterator[Violation]:
    holders = {kernel for by_kernel in snapshot.holdings.values() for kernel in by_kernel}
    for kernel_id in sorted(holders - snapshot.claims.keys()):
        accounted = snapshot.accounted.get(kernel_id)
        if accounted is None or accounted.state in ENDED:
            state = accounted.state if accounted else "unknown"
            yield Violation("ghost", f"kernel {kernel_id} holds devices and is {state}")
    for kernel_id, accounted in snapshot.accounted.items():
        present = snapshot.present.get(kernel_id)
        if accounted.state in LIVE and not (present and present.is_alive):
            why = f"kernel {kernel_id} is {accounted.state} in the books, and does not live"
            yield Violation("ghost", why)


def changes(
    before: NodeSnapshot, after: NodeSnapshot, touched: Collection[str] = ()
) -> list[Violation]:
    """Return the kernels that changed or vanished between two snapshots, but for touched ones."""
    found = []
    for kernel_id, lived in before.present.items():
        if kernel_id in touched or not lived.is_alive:
            continue
        now, accounted = after.present.get(kernel_id), after.accounted.get(kernel_id)
        if now is None or not now.is_alive or now.handle != lived.handle:
            what = f"is {now.handle if now and now.is_alive else 'gone'}"
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} was {lived.handle}, {what}"))
        elif accounted is None or accounted.state not in LIVE | STARTING:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} lives and is not accounted for"))
        elif now.given != lived.given:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} holds {now.given}"))
    return found
