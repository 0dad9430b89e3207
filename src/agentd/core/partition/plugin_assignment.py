"""Dealings: how a plugin divides its own devices among the agents in auto-split.

A dealing is kept, and used again while the agents, the known devices and their slots are the same.
So neither a missing device nor a link that is down moves other devices to another agent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from agentd.core.devices import Device
from agentd.core.slots import SlotName


class PluginAssignment(msgspec.Struct, frozen=True):
    """Each agent's devices, and the devices that the plugin was asked about.

    Devices are named by the stable id of the one that had their place first.

    `slots` has the slots of every known device, also of those that no agent gets. `reason` is
    why the agents get different numbers of devices; empty if they do not.
    """

    devices: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[SlotName, ...]]
    reason: str = ""

    @classmethod
    def of(
        cls, shares: Mapping[str, Iterable[Device]], known: Iterable[Device], reason: str = ""
    ) -> PluginAssignment:
        """Return the dealing that gives each agent its share of the known devices."""
        return cls(
            {agent: tuple(d.place.stable_id for d in share) for agent, share in shares.items()},
            {device.place.stable_id: device.slot_names for device in known},
            reason,
        )

    def is_for(self, agents: Sequence[str], known: Iterable[Device]) -> bool:
        """Return whether a plugin would be asked about the same agents and devices."""
        slots = {device.place.stable_id: device.slot_names for device in known}
        return [*self.devices] == [*agents] and dict(self.slots) == slots

    def shares(self, devices: Collection[Device]) -> dict[str, list[Device]]:
        """Return each agent's share of the devices that are there."""
        by_place = {device.place.stable_id: device for device in devices}
        return {
            agent: [by_place[name] for name in names if name in by_place]
            for agent, names in self.devices.items()
        }
