"""The description of a node's GPUs for Slurm: gres.conf and the node's `Gres=`.

One line for each device, each with a type of its own, so that a job can name one device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentd_slurm.gres_map import GresDevice, GresMap

NO_GPUS = ("cpu", "mem")
"""Device names that Slurm manages itself."""
_FILE = re.compile(r"/[A-Za-z0-9/_.:@+-]+")
"""Names of files that mean themselves in gres.conf, where commas and brackets make lists."""


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


def files_of(
    devices: Iterable[Mapping[str, Any]], stand_ins: str | None = None
) -> dict[str, list[str]]:
    """Return the device files of each device by its stable id.

    A device without one gets a stand-in in the folder `stand_ins`, if that is given.

    Raises:
        NoGres: gres.conf cannot express the files of some devices.
    """
    files: dict[str, list[str]] = {}
    without = []
    for row in devices:
        names = list(row["files"]) or ([f"{stand_ins}/{row['id']}"] if stand_ins else [])
        files[row["stable_id"]] = names
        if not names:
            has_reason = row["state"] != "ok" and row["reason"]
            without.append(f"{row['id']} ({row['reason']})" if has_reason else row["id"])
        if unreadable := [name for name in names if not _FILE.fullmatch(name)]:
            raise NoGres(f"gres.conf cannot name a device file of {row['id']}: {unreadable[0]!r}")
    if without:
        raise NoGres(
            f"no device file of its own: {', '.join(without)}; for stand-ins name a folder with"
            " --files"
        )
    return files


def gres_conf(devices: GresMap, files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of gres.conf; `files` has the files of each device by its stable id."""
    return [
        f"Name=gpu Type={device.gres_type} {'File' if len(names) == 1 else 'MultipleFiles'}="
        + ",".join(names)
        for _, device in sorted(devices.devices.items())
        for names in [files[device.stable_id]]
    ]


def node_gres(devices: GresMap) -> str:
    """Return the node's `Gres=` for slurm.conf."""
    entries = (f"gpu:{device.gres_type}:1" for _, device in sorted(devices.devices.items()))
    return f"Gres={','.join(entries)}"
