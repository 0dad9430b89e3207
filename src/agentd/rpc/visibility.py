"""Views restricted to the things that a caller may see."""

from __future__ import annotations

from msgspec.structs import replace

from agentd.core.access import Caller, Role
from agentd.core.allocation.ledger import Holder
from agentd.core.claim.claim import Claim, ClaimStatus, Collision, EndedClaim
from agentd.core.conditions import ActiveCondition
from agentd.core.devices import Device
from agentd.core.kernel.states import Kernel
from agentd.events import Audit, Event, EventKind
from agentd.rpc import rendering
from agentd.services.access import Access
from agentd.services.node import Node
from agentd.services.refusals import Refusal
from agentd.views import DeviceView


class Visibility:
    """The views of a node, restricted for each caller."""

    def __init__(self, node: Node, access: Access) -> None:
        self._state, self._devices = node.state, node.devices
        self._access = access

    def visible_device(self, device: Device, caller: Caller) -> DeviceView:
        """Return a device; kernels that the caller cannot see appear as `other`.

        Only administrators see its files.
        """
        split, ledger = self._devices.split, self._state.ledger
        if caller.role is not Role.ADMIN:
            device = replace(device, files=())
        if caller.agents is None:
            return rendering.device_view(device, split, ledger)

        def is_visible(holder: Holder) -> bool:
            holding = ledger.holdings.get(holder)
            return holding is not None and caller.sees(holding.agent_id)

        view = rendering.device_view(device, split, ledger, is_visible)
        view["agents"] = [agent for agent in view["agents"] if caller.sees(agent)]
        return view

    def visible_event(self, event: Event, caller: Caller) -> tuple[EventKind, object] | None:
        """Return the kind and payload of an event for a caller, None if it must not see it.

        For a kernel of another agent the caller learns only that a device it owns, too, has
        changed.
        """
        match event.value:
            case (
                Kernel(agent_id=agent)
                | ClaimStatus(claim=Claim(agent_id=agent))
                | EndedClaim(claim=Claim(agent_id=agent))
                | Claim(agent_id=agent)
            ) if event.kind is EventKind.FREE or not caller.sees(agent):
                return (EventKind.FREE, {}) if self._touches_visible_device(event, caller) else None
            case Device() as device:
                is_visible = self._access.sees_device(caller, device.device_id)
                if is_visible and event.kind is EventKind.DEVICE:
                    return event.kind, self.visible_device(device, caller)
            case Audit(agent_id=agent) | Refusal(agent_id=agent):
                is_visible = caller.sees(agent)
            case ActiveCondition() as condition:
                is_visible = bool(self._access.visible_conditions(caller, [condition]))
            case value:
                is_visible = caller.agents is None or not isinstance(value, Collision)
        if not is_visible:
            return None
        return event.kind, rendering.event_view(event, self._devices.split, self._state.ledger)

    def _touches_visible_device(self, event: Event, caller: Caller) -> bool:
        """Return whether a holder took, or gave back, part of a device that the caller sees."""
        holder = event.value if isinstance(event.value, Kernel | Claim) else event.value.claim  # type: ignore[attr-defined]
        return event.changes_shares and any(
            self._access.sees_device(caller, share.device_id) for share in holder.allocation.shares
        )
