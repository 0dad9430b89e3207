"""Deciding what is wrong with a cluster's settings, this node's map, and their match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentd_slurm.decisions.prolog import contradiction, find_device, row_of
from agentd_slurm.gres_map import GresMap
from agentd_slurm.jobs import Job, expand_hosts
from agentd_slurm.placeholders import SlurmNode

_REQUIRED_WORDS = {
    "ProctrackType": "proctrack/cgroup",
    "PrologFlags": "Alloc",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
}
"""A word that each of these settings has, which are lists or single words."""
_KNOWN_GRES = frozenset({"gpu", "shard", "mps"})
_GRES = re.compile(r"(?:^|,)gpu:([^:,(]+):([0-9]+)")
_NEVER = frozenset({"", "(null)", "INFINITE", "NONE", "-1"})


class SlurmCheck(NamedTuple):
    """One check; `detail` has the value and the expectation."""

    name: str
    passed: bool
    detail: str


def check_settings(
    settings: Mapping[str, str], node: str, slurm_node: SlurmNode
) -> Iterator[SlurmCheck]:
    """Yield a check for each setting of slurm.conf that the engine requires, or that harms it."""
    for name, required in _REQUIRED_WORDS.items():
        value = settings.get(name, "nothing")
        is_set = required.lower() in value.lower().split(",")
        yield SlurmCheck(name, is_set, f"got {value}, expected {required}")
    for name in ("Prolog", "Epilog", "TaskProlog"):
        value = settings.get(name, "")
        is_set = value not in _NEVER
        yield SlurmCheck(name, is_set, f"got {value or 'nothing'}, expected a path")
    roots = settings.get("DisableRootJobs", "No")
    detail = f"got {roots}, expected No: placeholders are jobs of root"
    yield SlurmCheck("DisableRootJobs", roots.lower() == "no", detail)
    yield from _check_power(settings, node, slurm_node)
    yield from _notes(settings)


def _check_power(
    settings: Mapping[str, str], node: str, slurm_node: SlurmNode
) -> Iterator[SlurmCheck]:
    """Yield whether Slurm may suspend the node, on which kernels of agentd may run."""
    program = settings.get("SuspendProgram", "")
    if program in _NEVER or settings.get("SuspendTime", "") in _NEVER:
        return
    excluded = {*settings.get("SuspendExcParts", "").split(",")} & {*slurm_node.partitions}
    try:
        hosts = expand_hosts(settings.get("SuspendExcNodes", "").partition(":")[0])
    except ValueError:
        hosts = []
    detail = f"got {program}, expected {node} in SuspendExcNodes: it would end agentd's kernels"
    yield SlurmCheck("SuspendProgram", bool(excluded) or node in hosts, detail)


def _notes(settings: Mapping[str, str]) -> Iterator[SlurmCheck]:
    """Yield settings that may be right or wrong, which a site decides."""
    unknown = {*settings.get("GresTypes", "").lower().split(",")} - _KNOWN_GRES - _NEVER
    if unknown:
        yield _note("GresTypes", f"nothing is claimed for {', '.join(sorted(unknown))}")
    if "deferbatch" not in settings.get("PrologFlags", "").lower():
        yield _note("PrologFlags", "no DeferBatch: a script may start before another node refuses")
    if (program := settings.get("RebootProgram", "")) not in _NEVER:
        yield _note("RebootProgram", f"{program} ends agentd's kernels: drain its devices first")
    plugin, devices = settings.get("TaskPlugin", ""), settings.get("ConstrainDevices", "no")
    if "cgroup" not in plugin or devices != "yes":
        yield _note("TaskPlugin", f"{plugin}, ConstrainDevices={devices}: jobs can open any GPU")
    if (preempt := settings.get("PreemptType", "")) == "preempt/qos":
        yield _note("PreemptType", f"{preempt}: placeholders need a qos that none preempts")


def _note(name: str, text: str) -> SlurmCheck:
    return SlurmCheck(name, passed=True, detail=f"note: {text}")


def check_map(gres_map: GresMap, devices: Sequence[Mapping[str, Any]]) -> SlurmCheck:
    """Return whether each device of the map is one that agentd can give."""
    lookups = (find_device(index, gres_map, devices) for index in gres_map.devices)
    problems = [text for text in lookups if isinstance(text, str)]
    types = shared_types(gres_map, devices)
    if len({*types}) < len(types):
        problems.append("shared GPUs have types of models: use agentctl slurm gres --types device")
    return SlurmCheck("devices", not problems, "; ".join(problems) or "all present")


def shared_types(gres_map: GresMap, devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the type in gres.conf of each GPU of the map that other agents have, too."""
    rows = ((device, row_of(device, devices)) for device in gres_map.devices.values())
    return [device.gres_type for device, row in rows if row and len(row["agents"]) > 1]


def check_gres(gres_map: GresMap, gres: str) -> SlurmCheck:
    """Return whether the node's `Gres=` names exactly the devices of the map, in its order."""
    configured = [(match[1].lower(), int(match[2])) for match in _GRES.finditer(gres)]
    counts = Counter(device.gres_type for device in gres_map.devices.values())
    required = [(name.lower(), count) for name, count in counts.items()]
    expected = ",".join(f"gpu:{name}:{count}" for name, count in counts.items())
    return SlurmCheck(
        "Gres", configured == required, f"got {gres or 'nothing'}, expected {expected}"
    )


def check_job(job: Job | None, node: str, gres_map: GresMap) -> SlurmCheck:
    """Return whether a job was read, and Slurm's types of its GPUs are those of the map."""
    types = job.types.get(node, {}) if job else {}
    problems = [text for index in types if (text := contradiction(index, gres_map, types))]
    return SlurmCheck("jobs", not problems, "; ".join(problems) or "read as by a prolog")
