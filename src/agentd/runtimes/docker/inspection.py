"""Container inspections: parsing, and comparison with the request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from agentd.core.allocation.ports import Port
from agentd.core.kernel.edits import DeviceNode
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import Ending, ObservedState
from agentd.core.names import is_name, name_or_empty
from agentd.errors import RuntimeFailure
from agentd.host.probe import parse_cpu_list
from agentd.runtimes.docker.container_config import (
    AGENT_LABEL,
    DEVICES_LABEL,
    KERNEL_LABEL,
    NODE_LABEL,
    RECORD_LABEL,
)
from agentd.runtimes.docker.docker_client import parse_container_id
from agentd.runtimes.docker.docker_errors import DockerResponseLost, clean_message
from agentd.runtimes.docker.mounts import MountSource, refuse_replaced, verify_mounts

_OWN_LABELS = (NODE_LABEL, KERNEL_LABEL, AGENT_LABEL, RECORD_LABEL, DEVICES_LABEL)
_REQUIRED_MEMBERS = {"Id", "Name", "State", "Config", "HostConfig"}
_STATES = {
    "created": ObservedState.CREATED,
    "running": ObservedState.RUNNING,
    "restarting": ObservedState.RUNNING,
    "paused": ObservedState.PAUSED,
}


def validate_inspection(inspection: object) -> Mapping[str, Any]:
    """Validate an inspection of a container.

    Raises:
        DockerResponseLost: the response is malformed.
    """
    if isinstance(inspection, dict) and inspection.keys() >= _REQUIRED_MEMBERS:
        parse_container_id(inspection["Id"])
        return inspection
    raise DockerResponseLost("malformed container inspection of the engine")


def summary_as_inspection(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an element of a list to the form of an inspection, with agentd's labels only.

    A thousand are kept at a time, and the labels of callers may be long.
    """
    labels = summary.get("Labels") or {}
    return {
        "Id": parse_container_id(summary.get("Id")),
        "Name": (summary.get("Names") or [""])[0],
        "Image": summary.get("ImageID"),
        "State": {"Status": summary.get("State", "running")},
        "Config": {"Labels": {name: labels[name] for name in _OWN_LABELS if name in labels}},
    }


def container_labels(inspection: Mapping[str, Any]) -> Mapping[str, str]:
    """Return a container's labels."""
    return inspection["Config"].get("Labels") or {}


def container_kernel_id(inspection: Mapping[str, Any]) -> str | None:
    """Return the kernel id in a container's labels, None without a valid one."""
    kernel_id = container_labels(inspection).get(KERNEL_LABEL)
    return kernel_id if is_name(kernel_id) else None


def parse_inspection(inspection: Mapping[str, Any]) -> ObservedKernel:
    """Return the kernel of a container."""
    labels, state = container_labels(inspection), inspection["State"]
    started_at, finished_at = (
        _seconds(state.get("StartedAt")),
        _seconds(state.get("FinishedAt")),
    )
    if started_at and finished_at and _STATES.get(state["Status"]) is None:
        finished_at = max(started_at, finished_at)  # the engine records the start later
    limits = inspection.get("HostConfig", {})
    cores = limits.get("CpusetCpus")  # such as "0-3,8"; nothing if it has all, or if unknown
    return ObservedKernel(
        kernel_id=labels[KERNEL_LABEL],
        agent_id=name_or_empty(labels.get(AGENT_LABEL)),
        runtime="docker",
        handle=inspection["Id"],
        state=_STATES.get(state["Status"], ObservedState.EXITED),
        record=labels.get(RECORD_LABEL, ""),
        device_label=labels.get(DEVICES_LABEL, ""),
        started_at=started_at,
        ending=Ending(
            exit_code=state.get("ExitCode"),
            oom_killed=bool(state.get("OOMKilled")),
            finished_at=finished_at,
            reason=clean_message(state.get("Error") or ""),
        ),
        cores=tuple(map(str, parse_cpu_list(cores))) if cores else None,
        memory_bytes=limits.get("Memory"),
        ports=tuple(_parse_ports(limits.get("PortBindings") or {})),
        is_partial="HostConfig" not in inspection,
    )


def _parse_ports(bindings: Mapping[str, Sequence[Mapping[str, str]] | None]) -> Iterator[Port]:
    for name, bindings_of_port in bindings.items():
        number, _, protocol = name.partition("/")
        for binding in bindings_of_port or ():
            host = binding.get("HostPort", "")
            if number.isdecimal() and host.isdecimal():
                yield Port(int(number), int(host), protocol or "tcp", binding.get("HostIp", ""))


def _seconds(text: str | None) -> float | None:
    """Parse the engine's time, including nanoseconds; None for its zero time."""
    if not text or text.startswith("0001-"):
        return None
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def verify_container(
    inspection: Mapping[str, Any],
    requested: Mapping[str, Any],
    plan: KernelPlan,
    sources: Sequence[MountSource],
) -> None:
    """Check a started container; `requested` is the HostConfig of its create request.

    If the command has already ended, only the engine's own view can be checked.

    Raises:
        RuntimeFailure: the engine dropped or changed something.
    """
    host_config = inspection["HostConfig"]
    device_requests = [_request_key(item) for item in host_config.get("DeviceRequests") or ()]
    for request in requested["DeviceRequests"]:
        if _request_key(request) not in device_requests:
            ids = ", ".join(request["DeviceIDs"])
            raise RuntimeFailure(f"the engine omitted {request['Driver']} {ids}")
    nodes = [_device_paths(item) for item in host_config.get("Devices") or ()]
    for node in requested["Devices"]:
        if _device_paths(node) not in nodes:
            raise RuntimeFailure(f"the engine omitted {node['PathInContainer']}")
    for limit in ("CpusetCpus", "Memory"):
        if (host_config.get(limit) or 0) != (requested[limit] or 0):
            difference = f"{limit}: got {host_config.get(limit)!r}, expected {requested[limit]!r}"
            raise RuntimeFailure(f"the engine changed a limit: {difference}")
    if pid := inspection["State"].get("Pid"):
        with suppress(PermissionError, ProcessLookupError, FileNotFoundError):
            verify_mounts(pid, plan.spec.mounts, sources)
        for device_node in plan.edits.device_nodes:
            with suppress(PermissionError, ProcessLookupError):
                _verify_device_node(pid, device_node)
    refuse_replaced(plan.spec.mounts, sources)


def _device_paths(node: Mapping[str, Any]) -> tuple[str, str]:
    return node.get("PathOnHost") or "", node.get("PathInContainer") or ""


def _request_key(request: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    return request.get("Driver") or "", tuple(request.get("DeviceIDs") or ())


def _verify_device_node(pid: int, node: DeviceNode) -> None:
    path = f"/proc/{pid}/root/{node.container_path.lstrip('/')}"
    number = _read_device_number(path)
    if number is None and _read_device_number(f"/proc/{pid}/root") is not None:
        raise RuntimeFailure(f"the engine omitted {node.container_path}")
    if number is not None and number != _read_device_number(node.host_path):
        raise RuntimeFailure(f"{node.container_path} in the container is not {node.host_path}")


def _read_device_number(path: str) -> int | None:
    """Return the device number of a file (0 for other files), None if it does not exist."""
    try:
        return Path(path).stat().st_rdev
    except FileNotFoundError:
        return None
