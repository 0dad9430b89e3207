"""Container edits: the changes to a kernel that give it its devices, as data.

The term and most members are those of the Container Device Interface
(https://github.com/cncf-tags/container-device-interface).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentd.errors import PluginUnavailable


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of the host and its path in the kernel; permissions as in `rwm`."""

    host_path: str
    container_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host file or folder in the kernel."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A request to a device driver of the engine, such as NVIDIA's."""

    driver: str
    device_ids: tuple[str, ...]
    capabilities: tuple[str, ...] = ("gpu",)


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """The edits of one plugin."""

    env: Mapping[str, str] = field(default_factory=dict)
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    cdi: tuple[str, ...] = ()
    device_requests: tuple[DeviceRequest, ...] = ()
    groups: tuple[str, ...] = ()


def merge_edits(
    hiding: Iterable[ContainerEdits], giving: Mapping[str, ContainerEdits]
) -> ContainerEdits:
    """Merge the edits of all plugins; those that give a device override those that hide others.

    `giving` is by the plugin's device name.

    Raises:
        PluginUnavailable: two giving plugins set one variable to different values.
    """
    env: dict[str, str] = {}
    setters: dict[str, str] = {}
    for plugin, edits in giving.items():
        for name, value in edits.env.items():
            if env.setdefault(name, value) != value:
                conflict = f"{setters[name]} sets {name} to {env[name]!r}, and plugin {plugin}"
                raise PluginUnavailable(f"plugin {conflict} to {value!r}")
            setters.setdefault(name, plugin)
    given_edits = giving.values()
    hidden = {name: value for edits in hiding for name, value in edits.env.items()}
    return ContainerEdits(
        env={**hidden, **env},
        device_nodes=tuple(dict.fromkeys(node for e in given_edits for node in e.device_nodes)),
        mounts=tuple(dict.fromkeys(mount for edits in given_edits for mount in edits.mounts)),
        cdi=tuple(name for edits in given_edits for name in edits.cdi),
        device_requests=tuple(req for edits in given_edits for req in edits.device_requests),
        groups=tuple(dict.fromkeys(group for edits in given_edits for group in edits.groups)),
    )
