"""What a caller is shown: nobody is named whom it cannot see."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentd.core.access import Caller
from agentd.core.devices import Device
from agentd.core.kernel import Kernel
from agentd.rpc import rendering
from agentd.services.access import OTHER, Access
from agentd.services.devices import NodeDevices
from agentd.services.events import Audit, Event, EventKind
from agentd.services.state import NodeState
from agentd.views import DeviceView, NodeView

_TEXTS = frozenset({"detail", "reason", "why"})
"""The members that are written for people, and name whom they are about."""


class Visible:
    """The views of a node, as each caller may see them."""

    def __init__(self, state: NodeState, devices: NodeDevices, access: Access) -> None:
        self._state = state
        self._devices = devices
        self._access = access

    def device(self, device: Device, caller: Caller) -> DeviceView:
        """Return a device that the caller sees, with the kernels of others as `other`."""
        view = rendering.device_view(device, self._devices.split, self._state.ledger)
        if caller.agents is None:
            return view
        mine = {kernel.kernel_id for kernel in self._access.kernels(caller)}
        view["agents"] = [agent for agent in view["agents"] if caller.sees(agent)]
        view["reason"] = self._access.redacted(caller, view["reason"])
        for holder in view["holders"]:
            if holder["kernel_id"] not in mine:
                holder["kernel_id"] = OTHER
        return view

    def node(self, view: NodeView, caller: Caller) -> NodeView:
        """Return the node without warnings about others."""
        if caller.agents is not None:
            warnings = view["warnings"]
            view["warnings"] = [w for w in warnings if self._access.redacted(caller, w) == w]
        return view

    def event(self, event: Event, caller: Caller) -> object:
        """Return what an event carries; None if the caller cannot see what it is about."""
        match event.value:
            case Kernel(agent_id=agent) | Audit(agent_id=agent) if not caller.sees(agent):
                return None
            case Device() as device:
                if not self._access.sees_device(caller, device.device_id):
                    return None
                if event.kind is EventKind.DEVICE:
                    return self.device(device, caller)
        return rendering.event_view(event, self._devices.split, self._state.ledger)

    def redacted(self, content: Any, caller: Caller, said: Collection[str] = ()) -> Any:  # noqa: ANN401 - JSON
        """Return JSON with others left out of its texts, but for names that the caller `said`."""
        if caller.agents is None:
            return content
        if isinstance(content, Mapping):
            return {
                key: self._access.redacted(caller, value, said)
                if key in _TEXTS and isinstance(value, str)
                else self.redacted(value, caller, said)
                for key, value in content.items()
            }
        if isinstance(content, (list, tuple)):
            return [self.redacted(item, caller, said) for item in content]
        return content
