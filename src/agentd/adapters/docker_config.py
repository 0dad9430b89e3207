"""From a plan to the JSON that creates a container; pure but for resolving mounts.

Source of the members: the Engine API's ContainerCreate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentd.core.edits import Mount
from agentd.core.kernel import Port
from agentd.core.plan import LABEL_PREFIX, KernelPlan
from agentd.core.record import SCHEMA
from agentd.errors import Problem

SCHEMA_LABEL = f"{LABEL_PREFIX}schema"
NODE_LABEL = f"{LABEL_PREFIX}node"
AGENT_LABEL = f"{LABEL_PREFIX}agent"
KERNEL_LABEL = f"{LABEL_PREFIX}kernel"
RECORD_LABEL = f"{LABEL_PREFIX}record"
DEVICES_LABEL = f"{LABEL_PREFIX}devices"

PUBLISHED_ON = "127.0.0.1"

LOG_DRIVER = "local"
"""Keeps bytes as they are and rotates by itself; the engine's default, json-file, does neither."""


def container_config(plan: KernelPlan, network: str) -> dict[str, Any]:
    """Return the body of the engine's create call."""
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
            DEVICES_LABEL: plan.statement,
        },
        "ExposedPorts": {_port(port): {} for port in spec.ports},
        "HostConfig": _host_config(plan, network),
    }
    if spec.command:
        config["Cmd"] = list(spec.command)
    if spec.working_dir:
        config["WorkingDir"] = spec.working_dir
    if spec.user:
        config["User"] = spec.user
    return config


def _host_config(plan: KernelPlan, network: str) -> dict[str, Any]:
    edits = plan.edits
    return {
        "NetworkMode": network,
        "CpusetCpus": ",".join(plan.cpus),
        "Memory": plan.memory_bytes,
        "MemorySwap": plan.memory_bytes,
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
        "Mounts": [
            *(_mount(os.path.realpath(m.source), m.target, m.read_only) for m in plan.spec.mounts),
            *(_mount(m.source, m.target, m.read_only) for m in edits.mounts),
        ],
        "GroupAdd": list(edits.groups),
        "PortBindings": {
            _port(port): [
                {"HostIp": PUBLISHED_ON, "HostPort": str(other.host or "")}
                for other in plan.spec.ports
                if _port(other) == _port(port)
            ]
            for port in plan.spec.ports
        },
        "SecurityOpt": ["no-new-privileges"],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": LOG_DRIVER},
    }


def _port(port: Port) -> str:
    return f"{port.container}/{port.protocol}"


def _mount(source: str, target: str, read_only: bool) -> dict[str, Any]:  # noqa: FBT001 - a member of the value
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def mount_problems(mounts: Sequence[Mount], allowed: Sequence[Path]) -> Iterator[Problem]:
    """Yield what is wrong with a request's mounts, symlinks and `..` resolved."""
    folders = [Path(os.path.realpath(folder)) for folder in allowed]
    for index, mount in enumerate(mounts):
        source = Path(os.path.realpath(mount.source))
        where = f"mounts.{index}.source"
        if not any(source == folder or folder in source.parents for folder in folders):
            have = ", ".join(map(str, allowed)) or "none"
            why = f"{mount.source} is below no allowed folder; allowed-mounts: {have}"
            yield Problem(where, why)
        elif not source.exists():
            yield Problem(where, f"{mount.source} does not exist")
