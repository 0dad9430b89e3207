"""Conditions of the host, independent of agentd's own state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from agentd.core.conditions import Condition
from agentd.host.systemd.availability import is_booted
from agentd.plugin_api import on_pci_bus

_GPUS = {"10de": ("NVIDIA", "nvidia", "cuda"), "1002": ("AMD", "amdgpu", "rocm")}
"""By PCI vendor: its name, the driver of its GPUs, and the plugin for them."""


def host_conditions(
    docker_socket: Path | None, plugins: Iterable[str], root: Path = Path("/")
) -> Iterator[Condition]:
    """Yield the conditions of the host; `docker_socket` is None if no engine is used.

    `plugins` are the loaded entry points.
    """
    if docker_socket is None and is_booted(root):
        yield from _cgroup_conditions(root)
    yield from _driver_conditions(root, frozenset(plugins))
    if docker_socket is not None and docker_socket.exists():
        yield from _live_restore_conditions(root)
        yield from _apparmor_conditions(root)


def _live_restore_conditions(root: Path) -> Iterator[Condition]:
    with suppress(OSError, ValueError):
        settings = json.loads((root / "etc/docker/daemon.json").read_bytes())
        if settings.get("live-restore") is True:
            return
    for folder in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if arguments[0].endswith(b"dockerd") and b"--live-restore" in arguments:
                return
    yield Condition(
        "host",
        "the Docker Engine has no live-restore: restarting it ends its kernels",
        '{"live-restore": true} in /etc/docker/daemon.json',
    )


def _apparmor_conditions(root: Path) -> Iterator[Condition]:
    with suppress(OSError):
        is_on = (root / "sys/module/apparmor/parameters/enabled").read_text("ascii") == "Y\n"
        parsers = ("sbin/apparmor_parser", "usr/sbin/apparmor_parser")
        if is_on and not any((root / parser).exists() for parser in parsers):
            yield Condition(
                "host",
                "AppArmor is on and apparmor_parser is missing: the engine cannot start containers",
                "install the package apparmor",
            )


def _cgroup_conditions(root: Path) -> Iterator[Condition]:
    if (root / "sys/fs/cgroup").is_dir() and not (
        root / "sys/fs/cgroup/cgroup.controllers"
    ).exists():
        yield Condition(
            "host",
            "this host has cgroup v1: the systemd runtime is unavailable, and the kernels of a"
            " service cannot be killed at once",
            "boot it with systemd.unified_cgroup_hierarchy=1",
        )


def _driver_conditions(root: Path, plugins: frozenset[str]) -> Iterator[Condition]:
    """Compare the GPUs on the PCI bus with drivers and plugins."""
    for vendor, (name, driver, plugin) in _GPUS.items():
        is_loaded = (root / "sys/module" / driver).exists()
        if is_loaded == (plugin in plugins) or not on_pci_bus(vendor, sysfs=root / "sys"):
            continue
        if is_loaded:
            reason = f"driver {driver} is loaded but plugin {plugin} is not"
            yield Condition("host", reason, f"install agentd-plugin-{plugin}")
        else:
            reason = f"plugin {plugin} has a GPU of {name} but driver {driver} is not loaded"
            yield Condition("host", reason, f"modprobe {driver}")
