"""Every setting of agentd with its default and validation.

Keys are kebab-case in TOML and upper snake case in the environment
(`AGENTD__RESOURCE__ALLOCATION_MODE`). The default file and the reference are generated from the
descriptions of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import SettingsConfigDict

from agentd.config.agents import AgentSettings
from agentd.config.plugins import PluginSettings
from agentd.config.runtimes import DockerSettings, RuntimeSettings
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.names import find_duplicates
from agentd.core.partition.rules import (
    AllocationMode,
    Ids,
    SplitOrder,
    SplitRules,
    parse_device_rule,
)
from agentd.core.partition.split import DEFAULT_AGENT
from agentd.core.slots import BUILT_IN, MEM, AmountError, parse_amount
from agentd.errors import Problem
from agentd.http.settings import RpcSettings
from agentd.tomlfile.environment import FileSettings
from agentd.tomlfile.section import (
    DEFAULT_SLOTS,
    AbsolutePath,
    Name,
    Section,
    SizeBytes,
    refuse_bool,
)

PositiveBytes = Annotated[SizeBytes, Field(gt=0)]


class NodeSettings(Section):
    """[node]: the identity of the node and its state folder."""

    id: Name | None = Field(
        default=None, description="Node id. Default: derived from /etc/machine-id."
    )
    state_dir: AbsolutePath = Field(
        default=Path("/var/lib/agentd"),
        description="State folder: devices, records and logs of kernels.",
    )
    runtime: Literal["docker", "systemd", "process"] = Field(
        default="docker", description='Runtime of kernels: "docker", "systemd" or "process".'
    )
    keep_ended: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)] = Field(
        default=1000, description="Maximum ended kernels that stay listed; the oldest are pruned."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description='Minimum log level: "debug", "info", "warning" or "error".'
    )


class HostSettings(Section):
    """[host]: cores and memory to declare instead of the probed ones (containers, tests)."""

    cpus: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=4096)] | None = Field(
        default=None,
        description="Number of cores; missing ones count but are not pinned.",
    )
    mem: PositiveBytes | None = Field(default=None, description="Memory of the node.")


def _validate_engine_devices(value: object) -> object:
    tables = value.values() if isinstance(value, Mapping) else ()
    is_by_name = isinstance(value, Mapping) and all(
        isinstance(ids, (list, tuple)) and all(isinstance(item, str) for item in ids)
        for ids in tables
    )
    if value != "all" and not is_by_name:
        raise ValueError(
            f'invalid devices {value!r}: expected "all" or a table such as {{ cuda = ["cuda0"] }}'
        )
    return value


EngineDevices = Annotated[
    Literal["all"] | Mapping[str, tuple[str, ...]], BeforeValidator(_validate_engine_devices)
]


class ResourceSettings(Section):
    """[resource]: how devices are divided and allocated."""

    allocation_mode: AllocationMode = Field(
        default=AllocationMode.SHARED, description='"shared", "auto-split" or "manual".'
    )
    reserved_cpu: int | tuple[str, ...] = Field(
        default=0, description="Reserved cores: a count (the first ones) or a list of ids."
    )
    reserved_mem: SizeBytes = Field(default=0, description="Memory reserved for the system.")
    memory_align_size: PositiveBytes = Field(
        default=16 * 2**20, description="Unit of memory for auto-split and percentages."
    )
    allocation_strategy: Strategy = Field(
        default=Strategy.EVENLY, description='Order of devices: "fill" or "evenly".'
    )
    affinity_policy: Affinity = Field(
        default=Affinity.INTERLEAVED, description='NUMA: "interleaved" or "prefer-single-node".'
    )
    allow_fragmentation: bool = Field(
        default=False, description="Allow unequal parts of several devices for one amount."
    )
    auto_split_order: SplitOrder = Field(
        default=SplitOrder.ID, description='Order of auto-split: "id", "numa" or "plugin".'
    )
    default_slots: Mapping[str, object] = Field(
        default=DEFAULT_SLOTS, description="Defaults for requests without cpu or mem."
    )
    engine_devices: Mapping[Name, EngineDevices] = Field(
        default={},
        description="Devices withheld after a boot until an engine is ready, by engine.",
    )
    withhold_busy: bool = Field(
        default=False, description="Withhold devices that an unclaimed process uses."
    )

    @field_validator("reserved_cpu", mode="before")
    @classmethod
    def _validate_reserved_cpu(cls, value: object) -> int | tuple[str, ...]:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if isinstance(value, (list, tuple)):
            rule = parse_device_rule(list(value))
            if isinstance(rule, Ids):
                return rule.names
        raise ValueError(
            f'invalid value {value!r}: expected a count (1) or a list of cores (["0"])'
        )

    @field_validator("default_slots")
    @classmethod
    def _validate_default_slots(cls, value: Mapping[str, object]) -> Mapping[str, object]:
        if unknown := sorted(set(value) - set(DEFAULT_SLOTS)):
            raise ValueError(f"{', '.join(unknown)}: only cpu and mem have defaults")
        slots = {**DEFAULT_SLOTS, **value}
        problems = []
        for slot in BUILT_IN:
            try:
                if not parse_amount(slots[slot.name], slot) and slot.name == MEM:
                    problems.append("mem: got 0, expected more: kernels need memory")
            except AmountError as error:
                problems.append(f"{slot.name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return slots


class MetricsSettings(Section):
    """[metrics]: the content of GET /metrics."""

    per_kernel: bool = Field(
        default=True,
        description="Series for each kernel: 10, and 2 for each device.",
    )


class Settings(FileSettings):
    """All of `agent.toml`, with the environment taking precedence."""

    model_config = SettingsConfigDict(
        env_prefix="AGENTD__",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    node: NodeSettings = NodeSettings()
    rpc: RpcSettings = RpcSettings()
    host: HostSettings = HostSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    resource: ResourceSettings = ResourceSettings()
    agents: tuple[AgentSettings, ...] = ()
    plugins: PluginSettings = PluginSettings()
    metrics: MetricsSettings = MetricsSettings()

    @field_validator("agents")
    @classmethod
    def _validate_unique_ids(cls, value: tuple[AgentSettings, ...]) -> tuple[AgentSettings, ...]:
        ids = [agent.id for agent in value]
        if duplicates := find_duplicates(ids):
            raise ValueError(f"duplicate id {', '.join(duplicates)}; agent ids must be unique")
        return value

    @classmethod
    def explain_unknown(cls, key: str, value: object) -> str | None:
        """Return the reason for a table of the older form."""
        return AgentSettings.explain_unknown(key, value)

    def docker_settings_by_agent(self) -> dict[str, DockerSettings]:
        """Return the settings of the docker runtime for each agent with means of its own."""
        docker = self.runtime.docker
        return {
            agent.id: docker.model_copy(update=means)
            for agent in self.agents
            if (means := agent.means())
        }

    def means_elsewhere(self) -> Iterator[Problem]:
        """Yield agents' means that the runtime of this node does not have."""
        runtime = self.node.runtime
        for index, agent in enumerate(self.agents if runtime != "docker" else ()):
            for name in agent.means():
                reason = f"is for the docker runtime; this node's runtime is {runtime}"
                yield Problem(f"agents.{index}.{name.replace('_', '-')}", reason)

    def unknown_agents(self) -> Iterator[Problem]:
        """Yield problems of tokens and sockets for agents without an [[agents]] table."""
        known = {agent.id for agent in self.agents} or {DEFAULT_AGENT}
        for key, entries in (("tokens", self.rpc.tokens), ("sockets", self.rpc.sockets)):
            for index, entry in enumerate(entries):
                if unknown := sorted(set(entry.agents) - known):
                    available = f"(configured: {', '.join(sorted(known))})"
                    reason = f"unknown agent {', '.join(unknown)} {available}"
                    yield Problem(f"rpc.{key}.{index}.agents", reason)

    def split_rules(self) -> SplitRules:
        """Return the rules of the partition."""
        return SplitRules(
            mode=self.resource.allocation_mode,
            agents=tuple(agent.to_rule() for agent in self.agents),
            reserved_cpu=self.resource.reserved_cpu,
            reserved_mem=self.resource.reserved_mem,
            align=self.resource.memory_align_size,
            order=self.resource.auto_split_order,
            exclude={table.name: table.exclude for table in self.plugins.tables if table.exclude},
        )

    def policy(self) -> AllocationPolicy:
        """Return the allocation policy."""
        return AllocationPolicy(
            self.resource.allocation_strategy,
            self.resource.affinity_policy,
            self.resource.allow_fragmentation,
        )
