"""The description of a node's GPUs for Slurm: gres.conf and the node's `Gres=`.

A type is a model, as sites name them in jobs, or a device of its own, so that a placeholder can
name it. Slurm counts GPUs in the order of the types in `Gres=`, those of a type in the order of
their lines and files in gres.conf (seen with 22.05). So devices of a type stand together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from agentd_slurm.gres_map import GresDevice, GresMap, as_type

NO_GPUS = ("cpu", "mem")
"""Device names that Slurm manages itself."""
_FILE = re.compile(r"/[A-Za-z0-9/_.:@+-]+")
"""Names of files that mean themselves in gres.conf, where commas and brackets make lists."""
_VENDOR = re.compile(r"\b(?:nvidia|amd|tesla|geforce|quadro|instinct|radeon)\b")
_MODEL = re.compile(r"\b[a-z]+[0-9]+[a-z]*\b|\b(?:[a-z]+ ){1,2}[0-9]+\b(?: ti\b)?(?: super\b)?")
"""The part of a product's name that sites use: a100, mi250x, rtx 3090."""
STAND_IN_MAJOR = 4095
"""No driver can have it: Linux registers character devices below 512 (CHRDEV_MAJOR_MAX)."""


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


def model_types(devices: Sequence[Mapping[str, Any]], named: Iterable[str] = ()) -> dict[str, str]:
    """Return the type of each device by its id: as `TYPE[=ID,...]` names it, else its model.

    Raises:
        NoGres: a name is not usable, or two models would have the same type.
    """
    ids = [device["id"] for device in devices]
    types: dict[str, str] = {}
    for text in named:
        name, _, listed = text.partition("=")
        chosen = listed.split(",") if listed else ids
        if not name[:1].isalpha() or as_type(name) != name or not set(chosen) <= set(ids):
            raise NoGres(f"invalid --type {text!r}: expected a name, or NAME={','.join(ids)}")
        types |= dict.fromkeys(chosen, name)
    models: dict[str, str] = {}
    for device in devices:
        if device["id"] not in types:
            name, model = _model_type(device), device["model"]
            if (other := models.setdefault(name, model)) != model:
                reason = f"{other} and {model} would have the same type {name}"
                raise NoGres(f"{reason}; name them with --type TYPE={device['id']},...")
            types[device["id"]] = name
    return types


def _model_type(device: Mapping[str, Any]) -> str:
    """Return a short name of a device's model, with the profile of a MIG instance."""
    words = " ".join(re.findall(r"[a-z0-9]+", _VENDOR.sub("", device["model"].lower())))
    match = _MODEL.search(words)
    name = (match[0] if match else words).replace(" ", "")
    profile = re.fullmatch(r".*:(.+)-mig", device["slot"])
    model = name if name[:1].isalpha() else as_type(device["device_name"])
    return f"{model}_{profile[1]}" if profile else model


def gres_map(
    agent: str, devices: Iterable[Mapping[str, Any]], types: Mapping[str, str] | None = None
) -> GresMap:
    """Return the map of an agent's devices; `types` has their types by id if they share some."""
    types = types or {}
    rows = ((row["id"], row["stable_id"], types.get(row["id"], "")) for row in devices)
    return GresMap.of(agent, map(GresDevice._make, rows))


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


def gres_conf(
    devices: GresMap, files: Mapping[str, Sequence[str]], cores: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines of gres.conf, each of devices of one type with the same cores.

    `files` and `cores` have the files and the `Cores=` of devices by their stable id.
    """
    near = cores or {}

    def line_of(entry: tuple[int, GresDevice]) -> tuple[str, str, int | None]:
        index, device = entry
        alone = index if len(files[device.stable_id]) > 1 else None
        return device.gres_type, near.get(device.stable_id, ""), alone

    lines = []
    for (gres_type, indices, alone), group in groupby(sorted(devices.devices.items()), line_of):
        names = ",".join(name for _, device in group for name in files[device.stable_id])
        key = "File" if alone is None else "MultipleFiles"
        cores_text = f" Cores={indices}" if indices else ""
        lines.append(f"Name=gpu Type={gres_type} {key}={names}{cores_text}")
    return lines


def node_gres(devices: GresMap) -> str:
    """Return the node's `Gres=` for slurm.conf."""
    counts = Counter(device.gres_type for _, device in sorted(devices.devices.items()))
    return "Gres=" + ",".join(f"gpu:{name}:{count}" for name, count in counts.items())
