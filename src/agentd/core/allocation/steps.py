"""Steps: the order in which the slots of a request are decided.

Accelerators come first by device name, then cpu, then mem. Named slots of the same devices, those
of one primary slot, are one step: the primary slot decides if it is named, else the first in
natural order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentd.core.devices import natural_key
from agentd.core.groups import group
from agentd.core.slots import CPU, MEM, ResourceSlots, SlotName, SlotType, device_name_of


class SlotStep(msgspec.Struct, frozen=True):
    """Slots of the same devices that a request names, with amounts in base units.

    The first is the deciding `slot`, the others are in natural order.
    """

    slot: SlotName
    amounts: Mapping[SlotName, int]


def order_steps(slots: ResourceSlots, types: Mapping[SlotName, SlotType]) -> list[SlotStep]:
    """Return the steps of a request in the order in which they are decided."""
    families = group((types[slot].family, slot) for slot in slots)
    slot_steps = []
    for primary, names in families.items():
        if len(names) > 1:
            names.sort(key=lambda name: (name != primary, natural_key(name)))
        slot_steps.append(SlotStep(names[0], {name: slots[name] for name in names}))
    return sorted(slot_steps, key=_step_key)


def _step_key(step: SlotStep) -> tuple[int, object, object]:
    name = device_name_of(step.slot)
    rank = (CPU, MEM).index(name) + 1 if name in (CPU, MEM) else 0
    return rank, natural_key(name), step.slot
