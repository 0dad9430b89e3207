"""Allocations for the tests of plugins."""

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.devices import DeviceId
from agentd.core.slots import ONE, SlotKind


def given(name: str, *stable_ids: str) -> Allocation:
    """An allocation of whole devices of a plugin."""
    return Allocation(
        tuple(
            Share(DeviceId(name, f"{name}{n}"), stable_id, f"{name}.device", SlotKind.COUNT, ONE)
            for n, stable_id in enumerate(stable_ids)
        )
    )
