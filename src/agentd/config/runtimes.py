"""[runtime]: the settings of each runtime."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from agentd.core.allocation.ports import PortRange
from agentd.core.kernel.options import (
    MAX_GROUP_ID,
    ULIMITS,
    Ulimit,
    over_ceiling,
    parse_group,
)
from agentd.errors import Problem
from agentd.tomlfile.section import AbsolutePath, Section, SizeBytes, refuse_bool

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL",
    "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""Capabilities of root in a container.

The engine's default without raw sockets, device nodes, the audit log, and capabilities of files and
of other processes.
"""

_ALL_CAPABILITIES = [
    "AUDIT_CONTROL",
    "AUDIT_READ",
    "AUDIT_WRITE",
    "BLOCK_SUSPEND",
    "BPF",
    "CHECKPOINT_RESTORE",
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "IPC_LOCK",
    "IPC_OWNER",
    "KILL",
    "LEASE",
    "LINUX_IMMUTABLE",
    "MAC_ADMIN",
    "MAC_OVERRIDE",
    "MKNOD",
    "NET_ADMIN",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_RAW",
    "PERFMON",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYSLOG",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_CHROOT",
    "SYS_MODULE",
    "SYS_NICE",
    "SYS_PACCT",
    "SYS_PTRACE",
    "SYS_RAWIO",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "WAKE_ALARM",
]
"""Source: capabilities(7)."""


LogSize = Annotated[SizeBytes, Field(ge=4096)]
LogFiles = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1000)]
PidsLimit = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=2**22)]
Seconds = Annotated[float, Field(ge=0, le=86400)]


MountFolders = tuple[AbsolutePath, ...]
Networks = tuple[Annotated[str, Field(min_length=1)], ...]
Group = Annotated[
    int | str,
    BeforeValidator(
        parse_group,
        json_schema_input_type=Annotated[int, Field(ge=0, le=MAX_GROUP_ID)] | str,
    ),
]
Groups = tuple[Group, ...]


def _validate_ulimits(value: object) -> object:
    if isinstance(value, Mapping) and (unknown := sorted(set(value) - set(ULIMITS))):
        allowed = ", ".join(ULIMITS)
        raise ValueError(f"invalid ulimit {', '.join(unknown)}: expected one of {allowed}")
    return value


def _both_limits(raw: object) -> object:
    return {"soft": raw, "hard": raw} if isinstance(raw, int) else raw


Ceiling = Annotated[int, BeforeValidator(refuse_bool), Field(ge=-1, le=2**63 - 1)]
Ulimits = Annotated[Mapping[str, Ceiling], BeforeValidator(_validate_ulimits)]


class UlimitSettings(Section):
    """A limit of setrlimit(2) that a kernel has unless its request says otherwise."""

    soft: Ceiling = Field(description="The limit that applies.")
    hard: Ceiling = Field(description="The maximum up to which a kernel can raise it.")


DefaultUlimit = Annotated[
    UlimitSettings,
    BeforeValidator(_both_limits, json_schema_input_type=Ceiling | UlimitSettings),
]


def _as_ulimits(limits: Mapping[str, UlimitSettings]) -> dict[str, Ulimit]:
    """Return default limits as those of a request."""
    return {name: Ulimit(limit.soft, limit.hard) for name, limit in limits.items()}


def _refuse_over_ceilings(
    value: Mapping[str, UlimitSettings], info: ValidationInfo
) -> Mapping[str, UlimitSettings]:
    limits = _as_ulimits(value)
    inverted = (name for name, limit in limits.items() if limit.is_inverted)
    problems = [f"the soft limit of {name} is above its hard limit" for name in inverted]
    ceilings = info.data.get("ulimits", {})
    problems += [f"{name}: {why}" for name, why in over_ceiling(limits, ceilings)]
    if problems:
        raise ValueError("; ".join(problems))
    return value


DefaultUlimits = Annotated[
    Mapping[str, DefaultUlimit],
    BeforeValidator(_validate_ulimits),
    AfterValidator(_refuse_over_ceilings),
]
CEILINGS: Mapping[str, int] = {"rtprio": 0, "nice": 20}
"""No real-time priority, and no niceness below 0: both can starve the other processes."""


class KernelSettings(Section):
    """The part of each runtime's settings that all have: what kernels may use."""

    pids_limit: PidsLimit = Field(default=4096, description="Maximum processes per kernel.")
    stop_timeout: Seconds = Field(default=10, description="Seconds between TERM and KILL.")
    ulimits: Ulimits = Field(
        default=CEILINGS,
        description="Maximum of each ulimit in a request; -1 or missing: unlimited.",
    )
    default_ulimits: DefaultUlimits = Field(
        default={},
        description="Ulimits of kernels whose requests do not set them, within `ulimits`.",
    )
    allowed_groups: Groups = Field(
        default=(), description="Groups, by name or number, that a request may add to its kernel."
    )

    def with_default_ulimits(self, requested: Mapping[str, Ulimit]) -> dict[str, Ulimit]:
        """Return the ulimits of a kernel: those of its request, and the defaults of others."""
        return {**_as_ulimits(self.default_ulimits), **requested}

    def limit_problems(
        self, pids_limit: int | None, ulimits: Mapping[str, Ulimit]
    ) -> Iterator[Problem]:
        """Yield the limits of a request that exceed the maximum."""
        if (pids_limit or 0) > self.pids_limit:
            reason = f"{pids_limit} exceeds the limit of {self.pids_limit}"
            yield Problem("pids_limit", reason)
        for name, why in over_ceiling(ulimits, self.ulimits):
            yield Problem(f"ulimits.{name}", why)


class DockerSettings(KernelSettings):
    """[runtime.docker]: the Docker Engine."""

    socket: Path = Field(default=Path("/var/run/docker.sock"), description="Socket of the engine.")
    network: str = Field(
        default="bridge",
        min_length=1,
        description='Default network: "bridge", "none", "host" or a network\'s name.',
    )
    allowed_mounts: MountFolders = Field(
        default=(), description="Host folders below which a request may mount."
    )
    allowed_networks: Networks = Field(
        default=(), description="Further networks that a request may select."
    )
    publish_address: str = Field(
        default="127.0.0.1", description="Host address on which ports are published."
    )
    publish_ports: str = Field(default="1024-65535", description="Host ports for publishing.")
    capabilities: tuple[str, ...] = Field(
        default=CAPABILITIES, description="Capabilities of root in a kernel; others are dropped."
    )
    log_max_size: LogSize = Field(
        default=20 * 2**20, description="Size at which the engine rotates a log."
    )
    log_max_files: LogFiles = Field(default=5, description="Number of log files per kernel.")
    registry_auth: Path | None = Field(
        default=None,
        description="Registry credentials, in the format of Docker's config.json.",
    )

    @field_validator("publish_address")
    @classmethod
    def _validate_address(cls, value: str) -> str:
        try:
            if "%" not in value:
                return str(ipaddress.ip_address(value))
            raise ValueError
        except ValueError:
            raise ValueError(
                f"invalid address {value!r}: expected an IP address such as 127.0.0.1 or ::"
            ) from None

    @field_validator("publish_ports")
    @classmethod
    def _validate_port_range(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 2**16):
            raise ValueError(f'invalid port range {value!r}: expected one such as "30000-32767"')
        return value

    @field_validator("capabilities")
    @classmethod
    def _validate_capabilities(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in value if name not in _ALL_CAPABILITIES]:
            raise ValueError(
                f"invalid capability {', '.join(unknown)}: expected {', '.join(_ALL_CAPABILITIES)}"
            )
        return value

    @property
    def ports(self) -> PortRange:
        """The range from which host ports are assigned."""
        first, _, last = self.publish_ports.partition("-")
        return PortRange(self.publish_address, int(first), int(last))


class ProcessSettings(KernelSettings):
    """[runtime.process]: plain processes."""

    user: Annotated[str, Field(min_length=1)] = Field(
        default="nobody", description="User of kernels if agentd is root."
    )
    log_max_size: LogSize = Field(default=20 * 2**20, description="Size at which a log is rotated.")
    log_max_files: LogFiles = Field(default=5, description="Number of log files per kernel.")


class SystemdSettings(KernelSettings):
    """[runtime.systemd]: transient units of systemd."""

    user: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="User of kernels. Default: a user of its own for each kernel.",
    )


class RuntimeSettings(Section):
    """[runtime]: settings of each runtime."""

    docker: DockerSettings = DockerSettings()
    systemd: SystemdSettings = SystemdSettings()
    process: ProcessSettings = ProcessSettings()
