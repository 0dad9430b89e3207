"""Asking a plugin to deal its devices: what it is asked about, and its answer, checked.

An answer that breaks the contract is a lie. It is never mended: the plugin fails with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from agentd.core.devices import (
    Device,
    Health,
    named_devices,
    with_shared_health,
)
from agentd.core.names import quote_untrusted
from agentd.core.partition.auto_split import shares_in_order
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.places import in_places
from agentd.core.remembered_devices import merge_remembered
from agentd.core.slots import format_amount
from agentd.plugin_api import DeviceInfo, PartitionInfo
from agentd.pluginhost.output import one_line
from agentd.pluginhost.validation import InvalidAnswer
from agentd.services.protocols import PluginListing
from agentd.state.folder import StateFolder


class AssignmentRules(msgspec.Struct, frozen=True):
    """The agents that plugins deal to, the store with earlier dealings, and excluded devices."""

    agents: tuple[str, ...]
    store: StateFolder
    exclude: Mapping[str, tuple[str, ...]] = {}

    def known_devices(self, listing: PluginListing) -> list[Device]:
        """Return listed and missing devices that agents may get, in the order of their places."""
        name = listing.name
        remembered = [d for d in self.store.load_devices().devices if d.device_id.name == name]
        listed = listing.with_last_form(remembered).devices
        known = merge_remembered(with_shared_health(listed), remembered)
        excluded = named_devices(known, self.exclude.get(name, ()))
        return in_places(device for device in known if device.device_id not in excluded)

    def load_assignment(self, name: str, known: Sequence[Device]) -> PluginAssignment | None:
        """Return the dealing that was made for the same agents and devices."""
        dealing = self.store.load_devices().dealings.get(name)
        return dealing if dealing and dealing.is_for(self.agents, known) else None


def device_infos(known: Sequence[Device]) -> list[DeviceInfo]:
    """Return devices as a plugin is asked about them."""
    return [
        DeviceInfo(
            device.device_id.id,
            device.stable_id,
            device.slot,
            format_amount(device.capacity, device.kind),
            device.aliases,
            device.parent,
            device.model,
            device.numa_node,
            (Health.UNKNOWN if device.gone else device.health).value,
            device.reason,
            device.attributes,
            device.is_simulated,
            {other.slot: format_amount(other.capacity, other.kind) for other in device.secondary},
            device.files,
            device.parent_aliases,
        )
        for device in known
    ]


def validate_assignment(
    info: PartitionInfo | None, known: Sequence[Device], agents: Sequence[str]
) -> PluginAssignment:
    """Return a plugin's answer as a dealing of the devices that it was asked about.

    Raises:
        InvalidAnswer: the answer breaks the contract.
    """
    if info is None:
        return PluginAssignment.of(shares_in_order(known, agents), known)
    by_id = {device.device_id.id: device for device in known}
    for agent in info.devices:
        if agent not in agents:
            raise InvalidAnswer(
                f"it deals devices to an unknown agent {quote_untrusted(agent)}"
                f" (there are: {', '.join(agents)})"
            )
    counts = Counter(device_id for ids in info.devices.values() for device_id in ids)
    for device_id, count in counts.items():
        if device_id not in by_id:
            raise InvalidAnswer(f"it deals an unknown device {quote_untrusted(device_id)}")
        if count > 1:
            raise InvalidAnswer(f"it deals {device_id} more than once")
    shares = {agent: [by_id[n] for n in info.devices.get(agent, ())] for agent in agents}
    reason = one_line(info.reason)
    if not reason:
        _refuse_unequal(shares)
    return PluginAssignment.of(shares, known, reason)


def _refuse_unequal(shares: Mapping[str, Sequence[Device]]) -> None:
    """Refuse numbers of devices with the same slots that differ by more than one."""
    counts = {
        agent: Counter(device.slot_names for device in share) for agent, share in shares.items()
    }
    for slots in sorted({slots for device_counts in counts.values() for slots in device_counts}):
        numbers = {agent: device_counts[slots] for agent, device_counts in counts.items()}
        if max(numbers.values()) - min(numbers.values()) > 1:
            text = ", ".join(f"{agent} {number}" for agent, number in numbers.items())
            raise InvalidAnswer(
                f"it deals unequal numbers of devices with {', '.join(slots)} without a reason:"
                f" {text}"
            )
