"""The description of a node's GPUs for Slurm: gres.conf and the node's `Gres=`.

One line for each device, each with a type of its own, so that a job can name one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentd_slurm.gres_map import GresDevice, GresMap

NO_GPUS = ("cpu", "mem")
"""Device names that Slurm manages itself."""


class NoGres(Exception):
    """The node offers nothing to write into gres.conf."""


def choose_agent(requested: str | None, agents: Sequence[str]) -> str:
    """Return the agent whose devices Slurm gets.

    Raises:
        NoGres: it is unknown, or none is named and the node has several.
    """
    known = ", ".join(sorted(agents))
    if requested is None:
        if len(agents) == 1:
            return agents[0]
        raise NoGres(f"this node has {len(agents)} agents; name one with --agent ({known})")
    if requested not in agents:
        raise NoGres(f"unknown agent {requested} (this node has: {known})")
    return requested


def gpus_of(agent: str, devices: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the accelerators of an agent that are present, as `/v1/devices` lists them.

    Raises:
        NoGres: there are none, or two would have the same type.
    """
    gpus = [
        device
        for device in devices
        if device["device_name"] not in NO_GPUS
        and agent in device["agents"]
        and device["state"] != "gone"
    ]
    if not gpus:
        raise NoGres(f"agent {agent} has no accelerators on this node")
    types: dict[str, str] = {}
    for device in gpus:
        gres_type = GresDevice(device["id"], device["stable_id"]).gres_type
        if (other := types.setdefault(gres_type, device["id"])) != device["id"]:
            raise NoGres(f"devices {other} and {device['id']} would have the same type {gres_type}")
    return gpus


def gres_map(agent: str, devices: Iterable[Mapping[str, Any]]) -> GresMap:
    """Return the map of an agent's devices."""
    return GresMap.of(agent, (GresDevice(row["id"], row["stable_id"]) for row in devices))


def gres_conf(devices: GresMap, files: Mapping[str, str]) -> list[str]:
    """Return the lines of gres.conf; `files` has each device's file by its stable id."""
    return [
        f"Name=gpu Type={device.gres_type} File={files[device.stable_id]}"
        for _, device in sorted(devices.devices.items())
    ]


def node_gres(devices: GresMap) -> str:
    """Return the node's `Gres=` for slurm.conf."""
    entries = (f"gpu:{device.gres_type}:1" for _, device in sorted(devices.devices.items()))
    return f"Gres={','.join(entries)}"
