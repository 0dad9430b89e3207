"""Authorization: the rights of callers on this node, checked before a call is carried out."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.core.access import Caller, Right, roles_with
from agentd.core.claim.claim import Claim
from agentd.core.conditions import ActiveCondition
from agentd.core.devices import Device, DeviceId
from agentd.core.kernel.states import Kernel
from agentd.errors import Forbidden, UnknownAgent, UnknownClaim, UnknownDevice, UnknownKernel
from agentd.services.node import Node


class Access:
    """The rules of `agentd.core.access`, applied to this node's agents, kernels and devices."""

    def __init__(self, node: Node) -> None:
        self._state, self._devices = node.state, node.devices

    def authorize(
        self,
        caller: Caller,
        right: Right,
        *,
        agent: str | None = None,
        kernel: str | None = None,
        claim: str | None = None,
        device: DeviceId | None = None,
    ) -> None:
        """Refuse a caller that cannot see the target or lacks the right.

        Raises:
            UnknownAgent: the agent does not exist, or the caller must not see it.
            UnknownKernel: the same, for the kernel; or its claim is another user's, and the caller
                wants more than to look.
            UnknownClaim: the same, for the claim.
            UnknownDevice: the same, for the device.
            Forbidden: the caller sees the target but must not change it.
        """
        if agent is not None and not caller.sees(agent):
            visible = ", ".join(self.agents(caller))
            raise UnknownAgent(f"unknown agent {agent} (this node has: {visible})")
        if kernel is not None and not _is_visible(caller, self._state.kernels.get(kernel)):
            raise UnknownKernel(f"unknown kernel {kernel}")
        if claim is not None and not _is_visible(caller, self._state.claims.get(claim)):
            raise UnknownClaim.of(claim)
        if device is not None:
            self._require_device(caller, device)
        if not caller.has_right(right):
            raise Forbidden(caller.name, caller.role.value, right.value, roles_with(right))
        if kernel is not None and right is not Right.LOOK and not self._may_use(caller, kernel):
            raise UnknownKernel(f"unknown kernel {kernel}")

    def require_all(self, caller: Caller) -> None:
        """Refuse a caller that does not see the whole node.

        Raises:
            Forbidden: the caller's view is limited to some agents.
        """
        if caller.agents is not None:
            right = "all of the node"
            raise Forbidden(caller.name, caller.role.value, right, roles_with(Right.NODE))

    def agents(self, caller: Caller) -> list[str]:
        """Return the agents that a caller sees, in the node's order."""
        return [agent for agent in self._devices.split.partitions if caller.sees(agent)]

    def kernels(self, caller: Caller) -> list[Kernel]:
        """Return the kernels that a caller sees."""
        return [kernel for kernel in self._state if caller.sees(kernel.agent_id)]

    def devices(self, caller: Caller) -> list[Device]:
        """Return the devices that a caller sees, which are those of its agents' partitions."""
        devices = self._devices.split.inventory.devices
        if caller.agents is None:
            return list(devices)
        return [device for device in devices if self.sees_device(caller, device.device_id)]

    def sees_device(self, caller: Caller, device_id: DeviceId) -> bool:
        """Return whether a device is in a partition that a caller sees."""
        return caller.agents is None or any(
            caller.sees(agent) for agent in self._devices.split.owners(device_id)
        )

    def visible_conditions(
        self, caller: Caller, conditions: Iterable[ActiveCondition]
    ) -> list[ActiveCondition]:
        """Return the conditions that a caller sees.

        They are those of its own agents, kernels, claims and devices, and those about the node.
        Their texts decide nothing: others choose words in them.
        """
        return [item for item in conditions if _sees_condition(caller, item)]

    def owners(self, about: str) -> tuple[str, ...] | None:
        """Return the agents whose thing the subject of a condition is, None for the node's."""
        kind, _, name = about.partition("/")
        known: Kernel | Claim | None
        match kind:
            case "agent":
                return (name,)
            case "device":
                device_name, _, device_id = name.partition("/")
                return tuple(self._devices.split.owners(DeviceId(device_name, device_id)))
            case "kernel":
                known = self._state.kernels.get(name)
            case "claim":
                known = self._state.claims.get(name)
            case _:
                return None
        return () if known is None else (known.agent_id,)

    def _may_use(self, caller: Caller, kernel_id: str) -> bool:
        """Return whether a caller may use the claim of a kernel; true for one without a claim."""
        kernel = self._state.kernels.get(kernel_id)
        claim = self._state.claims.get(kernel.claim_id or "") if kernel else None
        return claim is None or claim.may_be_used_by(caller)

    def _require_device(self, caller: Caller, wanted: DeviceId) -> None:
        if caller.agents is None:
            return
        devices = [d for d in self.devices(caller) if d.device_id.name == wanted.name]
        if not any(device.has_name(wanted.id) for device in devices):
            available = ", ".join(device.device_id.id for device in devices) or "none"
            raise UnknownDevice(f"unknown device {wanted} (this node has: {available})")


def _sees_condition(caller: Caller, item: ActiveCondition) -> bool:
    if caller.agents is None:
        return True
    if (agents := item.condition.agents) is not None:
        return bool(agents) and all(map(caller.sees, agents))
    return item.owners is None or any(map(caller.sees, item.owners))


def _is_visible(caller: Caller, known: Kernel | Claim | None) -> bool:
    """Return whether a caller sees a kernel or claim; an unknown one requires a view of all."""
    return caller.agents is None if known is None else caller.sees(known.agent_id)
