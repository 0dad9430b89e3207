"""[[agents]]: the logical agents, with their devices (manual mode) or limits (shared mode)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails

from agentd.config.runtimes import Groups, MountFolders, Networks
from agentd.core.partition.rules import (
    AgentRule,
    DeviceRule,
    LimitRule,
    MemoryRule,
    parse_device_rule,
    parse_limit_rule,
    parse_memory_rule,
)
from agentd.core.slots import CPU, MEM, device_name_of
from agentd.tomlfile.section import AgentId, Section

_R = TypeVar("_R")
MEANS = ("allowed_mounts", "network", "allowed_networks", "registry_auth", "allowed_groups")
"""Fields of an agent that replace those of `[runtime.docker]` for its kernels."""

OLDER_FORM = (
    "belongs to an older form, which divides slots; assign whole devices with `devices` in manual"
    " mode, amounts with `limits` in shared mode: docs/explanation/slots-and-devices.md has both"
    " forms"
)
"""Why the tables of the slot-based form are refused (BEP-1044, "Before" and "After")."""


class AgentResources(Section):
    """[agents.resource]: the devices of one agent (manual mode) or its limits (shared mode)."""

    cpu: Annotated[Any, BeforeValidator(parse_device_rule)] = Field(
        default=None, description='["0", "1"], "0-3", a count, or "50%".'
    )
    mem: Annotated[Any, BeforeValidator(parse_memory_rule)] = Field(
        default=None, description='"16g" or "50%".'
    )
    devices: Mapping[str, Any] = Field(
        default={},
        description='{ cuda = ["cuda0"] }: ids, UUIDs, PCI addresses, a count, "50%", "all".',
    )

    limits: Mapping[str, Any] = Field(
        default={},
        description='{ cuda = 0.5, mem = "16g", cpu = "50%" }: limits, shared mode.',
    )

    @field_validator("limits")
    @classmethod
    def _validate_limits(cls, value: Mapping[str, Any]) -> dict[str, LimitRule]:
        return _parse_all(value, _parse_limit)

    @field_validator("devices")
    @classmethod
    def _validate_devices(cls, value: Mapping[str, Any]) -> dict[str, DeviceRule]:
        return _parse_all(value, _parse_device)

    @classmethod
    def explain_unknown(cls, key: str, value: object) -> str | None:
        """Return how to assign devices instead, None if `value` assigns nothing."""
        if key == "allocations":
            return OLDER_FORM
        if line := _slot_name_problem(key, value):
            return line
        if isinstance(value, (list, str, int)):
            return f"unknown key; if it is a device name, write devices = {{ {key} = … }}"
        return None


def _parse_all(value: Mapping[str, Any], read: Callable[[str, object], _R]) -> dict[str, _R]:
    """Parse the rule of each key.

    Raises:
        ValidationError: rules are invalid; each error has its key as location.
    """
    rules: dict[str, _R] = {}
    errors: list[InitErrorDetails] = []
    for name, raw in value.items():
        try:
            rules[name] = read(name, raw)
        except ValueError as error:
            errors.append(
                InitErrorDetails(type="value_error", loc=(name,), input=raw, ctx={"error": error})
            )
    if errors:
        raise ValidationError.from_exception_data(AgentResources.__name__, errors)
    return rules


def _slot_in_key(name: str, raw: object) -> str | None:
    """Return the slot that a key names (`"cuda.shares"`, or a table without quotes), if any."""
    if "." in name:
        return name
    return f"{name}.{next(iter(raw), '')}" if isinstance(raw, Mapping) else None


def _parse_limit(name: str, raw: object) -> LimitRule:
    if slot := _slot_in_key(name, raw):
        reason = "limits are set by device name, for all of its slots"
        raise ValueError(f"{slot} is a slot; {reason}: write {device_name_of(name)} = 0.5")
    return parse_limit_rule(raw)


def _parse_device(name: str, raw: object) -> DeviceRule:
    if name in (CPU, MEM):
        raise ValueError(f"set {name} beside devices, not inside")
    if slot_line := _slot_name_problem(name, raw):
        raise ValueError(slot_line)
    return parse_device_rule(raw)


def _slot_name_problem(name: str, raw: object) -> str | None:
    """Explain a slot name in place of a device name, None if `name` is not a slot name."""
    slot, device = _slot_in_key(name, raw), device_name_of(name)
    if slot is None:
        return None
    return (
        f"{slot} is a slot, not a device name; agents are assigned whole devices:"
        f' write {device} = ["{device}0"] under devices,'
        f' or in shared mode limits = {{ {device} = "0.5" }} for a part of them'
    )


class AgentSettings(Section):
    """[[agents]]: one logical agent."""

    id: AgentId = Field(description="Agent id, at most 48 characters.")
    user: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="User of its process kernels. Default: runtime.process.user.",
    )
    allowed_mounts: MountFolders | None = Field(
        default=None, description="Host folders below which its requests may mount."
    )
    network: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Default network of its kernels."
    )
    allowed_networks: Networks | None = Field(
        default=None, description="Further networks that its requests may select."
    )
    registry_auth: Path | None = Field(
        default=None, description="Registry credentials of its pulls."
    )
    allowed_groups: Groups | None = Field(
        default=None, description="Groups that its requests may add to their kernels."
    )
    resource: AgentResources | None = None

    @classmethod
    def explain_unknown(cls, key: str, value: object) -> str | None:
        """Return the reason for a table of the older form."""
        return OLDER_FORM if key == "agent" and isinstance(value, Mapping) else None

    def means(self) -> dict[str, Any]:
        """Return its means that replace those of `[runtime.docker]`, by field."""
        return {name: value for name in MEANS if (value := getattr(self, name)) is not None}

    def with_means_of(self, other: AgentSettings) -> AgentSettings:
        """Return this entry with another one's means."""
        return self.model_copy(update={name: getattr(other, name) for name in MEANS})

    def to_rule(self) -> AgentRule:
        """Return this entry as a rule for the partition."""
        if self.resource is None:
            return AgentRule(self.id)
        cpu: DeviceRule | None = self.resource.cpu
        mem: MemoryRule | None = self.resource.mem
        devices = self.resource.devices
        is_described = cpu is not None or mem is not None or bool(devices)
        return AgentRule(self.id, cpu, mem, devices, is_described, self.resource.limits)
