"""What holds on a node at every moment, and what no crash of agentd may change.

Judges a `Census`: what the books say (kernels, and who holds how much of what) beside what
is there (containers, processes). The daemon's self-check takes it from the inside, tests
take it from the outside; the rules are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agentd.core.kernel import ENDED, LIVE, STARTING, KernelState

Holdings = Mapping[str, Mapping[str, int]]
"""By device, by kernel: how much of it, in base units; 0 keeps back the whole device."""


class Violation(NamedTuple):
    """A rule that does not hold, and where."""

    rule: str
    detail: str


RULES = {
    "capacity": "shares on a device add up to at most its capacity",
    "owner": "outside shared mode no device is held by two agents",
    "accounted": "every kernel that is there is in the books, and holds what it was given",
    "ghost": "every holder in the ledger is a kernel that lives or is being started",
    "stray": "no container, process, folder, port, cgroup or intent is left of a kernel",
}
"""What a census is judged by."""

SURVIVAL = "survival"
"""What lived before a crash lives after it, the same, and holds the same."""


@dataclass(frozen=True, slots=True)
class Booked:
    """A kernel as the books have it; `handle` is what the runtime knows it by."""

    agent_id: str
    state: KernelState
    handle: str | None


@dataclass(frozen=True, slots=True)
class There:
    """What is there of a kernel; `given` is what it says itself that it holds, by device.

    `given` is None where that cannot be told.
    """

    handle: str
    is_alive: bool
    given: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Census:
    """One look at a node; `divisible` devices (memory) go to several agents in every mode."""

    is_shared: bool
    capacities: Mapping[str, int]
    holdings: Holdings
    booked: Mapping[str, Booked]
    there: Mapping[str, There]
    strays: tuple[str, ...] = ()
    divisible: frozenset[str] = field(default_factory=frozenset)


def violations(census: Census) -> list[Violation]:
    """Return every rule that does not hold; in the order of `RULES`."""
    return [
        *_over_capacity(census),
        *_with_two_owners(census),
        *_unaccounted(census),
        *_ghosts(census),
        *(Violation("stray", stray) for stray in census.strays),
    ]


def _over_capacity(census: Census) -> Iterator[Violation]:
    for device, holders in census.holdings.items():
        held, capacity = sum(holders.values()), census.capacities.get(device, 0)
        if held > capacity:
            who = ", ".join(sorted(holders))
            yield Violation("capacity", f"{device}: {held} of {capacity} is held, by {who}")


def _with_two_owners(census: Census) -> Iterator[Violation]:
    for device, holders in census.holdings.items():
        if census.is_shared or device in census.divisible:
            continue
        owners = {
            census.booked[kernel].agent_id
            for kernel, amount in holders.items()
            if amount and kernel in census.booked
        }
        if len(owners) > 1:
            who = ", ".join(sorted(holders))
            agents = ", ".join(sorted(owners))
            yield Violation("owner", f"{device} is held by {who}, of agents {agents}")


def _unaccounted(census: Census) -> Iterator[Violation]:
    for kernel_id, there in census.there.items():
        booked = census.booked.get(kernel_id)
        if booked is None:
            yield Violation("stray", f"kernel {kernel_id} ({there.handle}) is in no book")
        elif there.is_alive and booked.state in ENDED:
            why = f"kernel {kernel_id} ({there.handle}) lives, and is booked as {booked.state}"
            yield Violation("accounted", why)
        elif there.is_alive and booked.state in LIVE:
            yield from _given_and_held(census, kernel_id, booked, there)


def _given_and_held(
    census: Census, kernel_id: str, booked: Booked, there: There
) -> Iterator[Violation]:
    if booked.handle != there.handle:
        why = f"kernel {kernel_id} is {there.handle}, and is booked as {booked.handle}"
        yield Violation("accounted", why)
    for device, amount in (there.given or {}).items():
        held = census.holdings.get(device, {}).get(kernel_id)
        if held != amount:
            why = f"kernel {kernel_id} was given {amount} of {device}, the ledger has {held or 0}"
            yield Violation("accounted", why)


def _ghosts(census: Census) -> Iterator[Violation]:
    holders = {kernel for by_kernel in census.holdings.values() for kernel in by_kernel}
    for kernel_id in sorted(holders):
        booked = census.booked.get(kernel_id)
        if booked is None or booked.state in ENDED:
            state = booked.state if booked else "unknown"
            yield Violation("ghost", f"kernel {kernel_id} holds devices and is {state}")
    for kernel_id, booked in census.booked.items():
        there = census.there.get(kernel_id)
        if booked.state in LIVE and not (there and there.is_alive):
            yield Violation("ghost", f"kernel {kernel_id} is booked as {booked.state}, and is not")


def changes(before: Census, after: Census, touched: Collection[str] = ()) -> list[Violation]:
    """Return what did not survive from one look to the next, but for kernels that were touched."""
    found = []
    for kernel_id, lived in before.there.items():
        if kernel_id in touched or not lived.is_alive:
            continue
        now, booked = after.there.get(kernel_id), after.booked.get(kernel_id)
        if now is None or not now.is_alive or now.handle != lived.handle:
            what = f"is {now.handle if now and now.is_alive else 'gone'}"
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} was {lived.handle}, {what}"))
        elif booked is None or booked.state not in LIVE | STARTING:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} lives and is not booked so"))
        elif now.given != lived.given:
            found.append(Violation(SURVIVAL, f"kernel {kernel_id} holds {now.given}"))
    return found
