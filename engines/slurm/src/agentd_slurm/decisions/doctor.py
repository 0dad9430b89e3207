"""Deciding what is wrong with a cluster's settings, this node's map, and their match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentd_slurm.decisions.prolog import find_device
from agentd_slurm.gres import node_gres
from agentd_slurm.gres_map import GresMap

_REQUIRED_WORDS = {
    "ProctrackType": "proctrack/cgroup",
    "PrologFlags": "Alloc",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
}
"""A word that each of these settings has, which are lists or single words."""
_GRES = re.compile(r"(?:^|,)gpu:[^:,(]+:[0-9]+")


class SlurmCheck(NamedTuple):
    """One check; `detail` has the value and the expectation."""

    name: str
    passed: bool
    detail: str


def check_settings(settings: Mapping[str, str]) -> Iterator[SlurmCheck]:
    """Yield a check for each setting of slurm.conf that the engine requires."""
    for name, required in _REQUIRED_WORDS.items():
        value = settings.get(name, "nothing")
        is_set = required.lower() in value.lower().split(",")
        yield SlurmCheck(name, is_set, f"got {value}, expected {required}")
    for name in ("Prolog", "Epilog"):
        value = settings.get(name, "")
        is_set = value not in ("", "(null)")
        yield SlurmCheck(name, is_set, f"got {value or 'nothing'}, expected a path")
    roots = settings.get("DisableRootJobs", "No")
    detail = f"got {roots}, expected No: placeholders are jobs of root"
    yield SlurmCheck("DisableRootJobs", roots.lower() == "no", detail)


def check_map(gres_map: GresMap, devices: Sequence[Mapping[str, Any]]) -> SlurmCheck:
    """Return whether each device of the map is one that agentd can give."""
    lookups = (find_device(index, gres_map, devices) for index in gres_map.devices)
    problems = [text for text in lookups if isinstance(text, str)]
    return SlurmCheck("devices", not problems, "; ".join(problems) or "all present")


def check_gres(gres_map: GresMap, gres: str) -> SlurmCheck:
    """Return whether the node's `Gres=` names the types of the map in its order.

    Slurm counts the GPUs in that order.
    """
    configured = ",".join(match[0].strip(",") for match in _GRES.finditer(gres))
    expected = node_gres(gres_map).removeprefix("Gres=")
    return SlurmCheck(
        "Gres", configured == expected, f"got {gres or 'nothing'}, expected {expected}"
    )
