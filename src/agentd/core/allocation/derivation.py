"""Derivation: the amounts of a device's slots that a kernel holds without naming them.

The slots of a device are parts of one thing. A kernel that holds a part of one slot holds at least
that part of the others, rounded down to their quantum, and one quantum of each. So a device has
room for an amount of a slot only if it has every derived amount free.

The usable capacity of a slot is its capacity rounded down to the quantum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SlotMeasure(NamedTuple):
    """One slot of a device: its place among the device's slots, and how it is counted.

    `usable` is the usable capacity in base units.
    """

    place: int
    quantum: int
    usable: int


def room(left: Sequence[int], measures: Sequence[SlotMeasure]) -> int:
    """Return the quanta of a slot that a device has room for.

    `left` is what is free of each slot of the device, in base units. The first of `measures` is the
    slot, the others are derived from it.
    """
    own = measures[0]
    quanta = left[own.place] // own.quantum
    if len(measures) == 1 or not quanta:
        return quanta
    whole = own.usable // own.quantum
    for other in measures[1:]:
        free = left[other.place] // other.quantum
        if not free:
            return 0
        # the largest part whose derived amount, whole * free at most, is still free
        quanta = min(quanta, ((free + 1) * whole - 1) // (other.usable // other.quantum))
    return quanta


def beyond_primary(amounts: Sequence[int], usable: Sequence[int]) -> int:
    """Return how much more a share counts towards a limit than its amount of the primary slot.

    A share counts with the largest of its fractions of the usable capacities, in base units of the
    primary slot, rounded up. The first of `amounts` and of `usable` is the primary slot.
    """
    primary, whole = amounts[0], usable[0]
    counts = primary
    for amount, other in zip(amounts[1:], usable[1:], strict=True):
        if other:
            counts = max(counts, -(-amount * whole // other))
    return counts - primary
