"""The JSON that creates a container, derived from a plan; pure.

See ContainerCreate in the Engine API for the members. The environment and the edits of plugins are
merged in `core.kernel.plan`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from agentd.config.runtimes import DockerSettings
from agentd.core.allocation.ports import Port
from agentd.core.kernel.edits import Mount
from agentd.core.kernel.options import MAX_GROUP_ID, TOO_LONG, Ulimit, is_too_long
from agentd.core.kernel.plan import LABEL_PREFIX, KernelPlan
from agentd.core.kernel.record import SCHEMA
from agentd.core.kernel.states import KernelSpec
from agentd.core.names import quote_untrusted
from agentd.core.slots import CPU, MEM
from agentd.errors import Problem
from agentd.runtimes.docker.docker_facts import DockerFacts
from agentd.runtimes.docker.mounts import MountSource

SCHEMA_LABEL = f"{LABEL_PREFIX}schema"
NODE_LABEL = f"{LABEL_PREFIX}node"
AGENT_LABEL = f"{LABEL_PREFIX}agent"
KERNEL_LABEL = f"{LABEL_PREFIX}kernel"
RECORD_LABEL = f"{LABEL_PREFIX}record"
DEVICES_LABEL = f"{LABEL_PREFIX}devices"

LOG_DRIVER = "local"
"""It keeps bytes unchanged and rotates; the engine's default, json-file, does neither."""

_ENGINE_TARGETS = ("/proc", "/sys", "/dev", "/dev/null")
"""Paths that the engine fills itself, without which no container starts."""
_MAX_ID = MAX_GROUP_ID

UNPUBLISHED_NETWORKS = ("none", "host")
"""Networks on which the engine publishes no ports."""


class PullPolicy(StrEnum):
    """When an image is pulled."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


class Tmpfs(msgspec.Struct, frozen=True):
    """A tmpfs mount of `size` bytes; None for the engine's limit (half of the memory)."""

    target: str
    size: int | None = None


class ContainerOptions(msgspec.Struct, frozen=True):
    """The options of a request that a container has; None leaves the choice to the node."""

    pull_policy: PullPolicy = PullPolicy.MISSING
    platform: str | None = None
    network: str | None = None
    tmpfs: tuple[Tmpfs, ...] = ()
    shm_size: int | None = None
    pids_limit: int | None = None
    ulimits: Mapping[str, Ulimit] = {}
    init: bool = False
    groups: tuple[int | str, ...] = ()
    entrypoint: tuple[str, ...] | None = None


CONTAINER_MEMBERS = frozenset(
    {
        *("command", "env", "image", "working_dir", "user", "mounts", "ports"),
        *ContainerOptions.__struct_fields__,
    }
)
"""Members of a request that this runtime carries out."""


def container_options(spec: KernelSpec) -> ContainerOptions:
    """Return the options of a request."""
    return msgspec.convert(spec.options, ContainerOptions)


def program_of(spec: KernelSpec) -> str:
    """Return the first word of a kernel's command line; nothing if the image has it."""
    return next(iter((*(container_options(spec).entrypoint or ()), *spec.command)), "")


def network_of(spec: KernelSpec, settings: DockerSettings) -> str:
    """Return the network of a container."""
    return container_options(spec).network or settings.network


def request_problems(spec: KernelSpec, settings: DockerSettings) -> Iterator[Problem]:
    """Yield the problems of a request under these settings, or on any engine."""
    options = container_options(spec)
    if not spec.image:
        yield Problem("image", "is missing; the docker runtime requires an image")
    if options.entrypoint == () and not spec.command:
        yield Problem("command", "is empty; without an entrypoint it is required")
    networks = (settings.network, *settings.allowed_networks)
    if network_of(spec, settings) not in networks:
        why = f"invalid network {options.network!r}: expected one of {', '.join(networks)}"
        yield Problem("network", why)
    yield from settings.limit_problems(options.pids_limit, options.ulimits)
    yield from _problems_of_targets(spec)
    if is_too_long(spec.working_dir or ""):
        yield Problem("working_dir", TOO_LONG)
    if spec.user and not _has_ids(spec.user):
        yield Problem(
            "user", f"invalid user {quote_untrusted(spec.user)}: expected ids from 0 to {_MAX_ID}"
        )
    targets = [target for _, target in targets_of(spec)]
    for target in sorted({target for target in targets if targets.count(target) > 1}):
        yield Problem("mounts", f"duplicate target {target}")


def targets_of(spec: KernelSpec) -> Iterator[tuple[str, str]]:
    """Yield the place of each mount and tmpfs in a request, and its target."""
    for number, mount in enumerate(spec.mounts):
        yield f"mounts.{number}.target", mount.target
    for number, tmpfs in enumerate(container_options(spec).tmpfs):
        yield f"tmpfs.{number}.target", tmpfs.target


def _problems_of_targets(spec: KernelSpec) -> Iterator[Problem]:
    """Yield targets that an engine refuses, in clearer words than its own."""
    for where, target in targets_of(spec):
        path = os.path.normpath(f"/{target.strip('/')}")
        if is_too_long(target):
            yield Problem(where, TOO_LONG)
        elif ".." in target.split("/") or path == "/":
            yield Problem(where, f"invalid path {target!r}: expected a folder below /, without ..")
        elif path in _ENGINE_TARGETS or path.startswith(("/proc/", "/sys/")):
            yield Problem(where, f"{path} belongs to the container, expected another target")


def _has_ids(user: str) -> bool:
    """Return whether an engine accepts the numeric ids in a user (`1000:100`)."""
    ids = [part for part in user.split(":") if part.removeprefix("-").isdecimal()]
    return all(len(part) <= len(str(_MAX_ID)) and 0 <= int(part) <= _MAX_ID for part in ids)


def container_config(
    plan: KernelPlan, settings: DockerSettings, sources: Sequence[MountSource], engine: DockerFacts
) -> dict[str, Any]:
    """Return the body of the engine's create call; `sources` belong to the spec's mounts."""
    spec = plan.spec
    config: dict[str, Any] = {
        "Image": spec.image,
        "Env": [f"{name}={value}" for name, value in plan.env.items()],
        "Labels": {
            **spec.labels,
            SCHEMA_LABEL: str(SCHEMA),
            NODE_LABEL: plan.node_id,
            AGENT_LABEL: spec.agent_id,
            KERNEL_LABEL: spec.kernel_id,
            RECORD_LABEL: plan.record,
            DEVICES_LABEL: plan.device_label,
        },
        "ExposedPorts": {_port(port): {} for port in plan.ports},
        "HostConfig": {
            **_limits(plan, settings, engine),
            **_devices(plan),
            "NetworkMode": network_of(spec, settings),
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "Mounts": _mounts(plan, sources, engine),
            "PortBindings": _bindings(plan.ports),
            "CapDrop": ["ALL"],
            "CapAdd": list(settings.capabilities),
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {
                "Type": LOG_DRIVER,
                "Config": {
                    "max-size": str(settings.log_max_size),
                    "max-file": str(settings.log_max_files),
                    "compress": str(settings.log_max_files > 1).lower(),
                },
            },
        },
    }
    if spec.command:
        config["Cmd"] = list(spec.command)
    if (entrypoint := container_options(spec).entrypoint) is not None:
        config["Entrypoint"] = list(entrypoint) or [""]  # Podman 5.4 ignores []
    if spec.working_dir:
        config["WorkingDir"] = spec.working_dir
    if spec.user:
        config["User"] = spec.user
    return config


def _limits(plan: KernelPlan, settings: DockerSettings, engine: DockerFacts) -> dict[str, Any]:
    """Return the limits of a container, without those that the engine discards or refuses."""
    options = container_options(plan.spec)
    memory_bytes = 0 if MEM in engine.not_enforced else plan.memory_bytes
    ulimits = settings.with_default_ulimits(options.ulimits)
    limits: dict[str, Any] = {
        "CpusetCpus": "" if CPU in engine.not_enforced else ",".join(plan.cpus),
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        "Ulimits": [
            {"Name": name, "Soft": limit.soft, "Hard": limit.hard}
            for name, limit in ulimits.items()
        ],
    }
    if "pids_limit" not in engine.not_enforced:
        limits["PidsLimit"] = options.pids_limit or settings.pids_limit
    if options.init:
        limits["Init"] = True
    if options.shm_size is not None:
        limits["ShmSize"] = options.shm_size
    return limits


def _devices(plan: KernelPlan) -> dict[str, Any]:
    edits = plan.edits
    return {
        "Devices": [
            {
                "PathOnHost": node.host_path,
                "PathInContainer": node.container_path,
                "CgroupPermissions": node.permissions,
            }
            for node in edits.device_nodes
        ],
        "DeviceRequests": [
            *({"Driver": "cdi", "DeviceIDs": list(edits.cdi)} for _ in edits.cdi[:1]),
            *(
                {
                    "Driver": request.driver,
                    "DeviceIDs": list(request.device_ids),
                    "Capabilities": [list(request.capabilities)],
                }
                for request in edits.device_requests
            ),
        ],
        "GroupAdd": list(edits.groups),
    }


def _mounts(
    plan: KernelPlan, sources: Sequence[MountSource], engine: DockerFacts
) -> list[dict[str, Any]]:
    wanted = [
        *zip((source.path for source in sources), plan.spec.mounts, strict=True),
        *((mount.source, mount) for mount in plan.edits.mounts),
    ]
    return [
        *(_bind(source, mount, engine) for source, mount in wanted),
        *(
            {
                "Type": "tmpfs",
                "Target": tmpfs.target,
                "TmpfsOptions": {"SizeBytes": tmpfs.size} if tmpfs.size else {},
            }
            for tmpfs in container_options(plan.spec).tmpfs
        ),
    ]


def _bind(source: str, mount: Mount, engine: DockerFacts) -> dict[str, Any]:
    """Return a bind mount; submounts of a read-only one are read-only, or left out."""
    bound: dict[str, Any] = {
        "Type": "bind",
        "Source": source,
        "Target": mount.target,
        "ReadOnly": mount.read_only,
    }
    if mount.read_only:
        member = "ReadOnlyForceRecursive" if engine.reads_recursively else "NonRecursive"
        bound["BindOptions"] = {member: True}
    return bound


def _bindings(ports: Sequence[Port]) -> dict[str, list[dict[str, str]]]:
    bindings: dict[str, list[dict[str, str]]] = {}
    for port in ports:
        bound = {"HostIp": port.address, "HostPort": str(port.host or "")}
        bindings.setdefault(_port(port), []).append(bound)
    return bindings


def _port(port: Port) -> str:
    return f"{port.container}/{port.protocol}"
