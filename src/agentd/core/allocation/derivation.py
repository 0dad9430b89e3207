"""Derivation: the amounts of a device's slots that a kernel holds without naming them.

The slots of a device are parts of one thing. A kernel that holds a part of one slot holds at least
that part of the others, rounded down to their quantum, and one quantum of each. So a device has
room for an amount of a slot only if it has every derived amount free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agentd.core.slots import SlotMeasure, SlotName


def available_quanta(
    free_amounts: Sequence[int],
    measures: Mapping[SlotName, SlotMeasure],
    slot: SlotName,
    named: Collection[SlotName],
) -> int:
    """Return the quanta of a slot that a device has room for.

    `free_amounts` are those of each slot of the device, in base units. Slots that are not `named`,
    as this one is, are derived from it.
    """
    measure = measures[slot]
    quanta = free_amounts[measure.position] // measure.quantum
    if not quanta:
        return 0
    whole = measure.usable // measure.quantum
    for name, other in measures.items():
        if name in named:
            continue
        free = free_amounts[other.position] // other.quantum
        if not free:
            return 0
        # the largest part whose derived amount, whole * free at most, is still free
        quanta = min(quanta, ((free + 1) * whole - 1) // (other.usable // other.quantum))
    return quanta


def compute_limit_excess(amounts: Sequence[int], usable: Sequence[int]) -> int:
    """Return how much more a share counts towards a limit than its amount of the primary slot.

    A share counts with the largest of its fractions of the usable capacities, in base units of the
    primary slot, rounded up. The first of `amounts` and of `usable` is the primary slot.
    """
    primary, whole = amounts[0], usable[0]
    usage = primary
    for amount, other in zip(amounts[1:], usable[1:], strict=True):
        if other:
            usage = max(usage, -(-amount * whole // other))
    return usage - primary
