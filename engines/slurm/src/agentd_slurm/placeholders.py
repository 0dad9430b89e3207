"""Placeholder jobs: each occupies, in Slurm, one GPU that another user of agentd has.

Slurm's answers about them and their node, read from `squeue` and `scontrol`. Root alone submits
placeholders, so their texts are not those of users.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from agentd_slurm.jobs import ON_NODE, PLACEHOLDER, WAITING, UnreadableAnswer, expand_hosts
from agentd_slurm.settings import PlaceholderSettings

PLACEHOLDER_FORMAT = "%A|%T|%r|%L|%b|%n|%k"
CLOSED = frozenset(
    {"DOWN", "DRAIN", "FAIL", "REBOOT_REQUESTED", "REBOOT_ISSUED", "MAINTENANCE", "RESERVED",
     "POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"}
)  # fmt: skip
"""Flags of a node that has no placeholders: one would keep it from getting idle."""
OPEN = frozenset({"IDLE", "MIXED", "COMPLETING", "PLANNED", "CLOUD", "RESERVED"})
"""Flags of a node that starts a job at once."""
_UNITS_S = (1, 60, 3600)
_USED = re.compile(r"(?:gpu|shard|mps)[^()]*\(IDX:([0-9,-]+)\)")


class Placeholder(NamedTuple):
    """A placeholder of a node that was not ended yet; `reason` is why it does not run."""

    job_id: int
    state: str
    reason: str
    time_left_s: float
    gpu_type: str
    holder: str


class SlurmNode(NamedTuple):
    """A node in Slurm; `used` are the indices of GPUs that its jobs have, also shards of them."""

    flags: frozenset[str] = frozenset()
    partitions: tuple[str, ...] = ()
    gres: str = ""
    used: frozenset[int] = frozenset()


def parse_placeholders(text: str, node: str) -> list[Placeholder]:
    """Read the placeholders of a node from an answer of squeue.

    Raises:
        UnreadableAnswer: it is not in `PLACEHOLDER_FORMAT`.
    """
    placeholders = []
    try:
        for line in text.splitlines():
            job_id, state, reason, left, gres, required, comment = line.split("|", 6)
            is_ours = required == node and comment.startswith(PLACEHOLDER)
            if is_ours and state in WAITING | ON_NODE and state != "COMPLETING":
                gpu_type = gres.rpartition(":")[0].rpartition(":")[2]
                holder, seconds = comment.removeprefix(PLACEHOLDER), _parse_seconds(left)
                row = Placeholder(int(job_id), state, reason, seconds, gpu_type, holder)
                placeholders.append(row)
    except ValueError as error:
        raise UnreadableAnswer(f"squeue: unexpected answer ({error})") from None
    return placeholders


def _parse_seconds(text: str) -> float:
    """Return the seconds of `1-02:03:04` or `4:59`; infinity for a word."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts):
        return math.inf
    seconds = sum(int(part) * unit for part, unit in zip(reversed(parts), _UNITS_S, strict=False))
    return seconds + 86400 * int(days or 0)


def parse_node(text: str) -> SlurmNode:
    """Read an answer of `scontrol --oneliner --details show node`; texts of operators come last."""
    fields = dict(word.partition("=")[::2] for word in reversed(text.split()))
    used: set[int] = set()
    for match in _USED.finditer(fields.get("GresUsed", "")):
        used |= {int(index) for index in expand_hosts(f"[{match[1]}]")}
    flags = frozenset(flag.strip("*~#!%$@^-") for flag in fields.get("State", "").split("+"))
    partitions = tuple(filter(None, fields.get("Partitions", "").split(",")))
    return SlurmNode(flags, partitions, fields.get("Gres", ""), frozenset(used))


def choose_partitions(text: str, node: SlurmNode, settings: PlaceholderSettings) -> list[str]:
    """Return values of `--partition=` for a placeholder, the best one first.

    `text` is the answer of `scontrol --oneliner show partition`. All partitions of the node that
    take a job of root for a part of a node come together, then each alone: a limit of one of them
    may refuse all.
    """
    if settings.partition:
        return [settings.partition]
    names = []
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        if (
            fields.get("PartitionName") in node.partitions
            and fields.get("State") == "UP"
            and fields.get("DisableRootJobs") != "YES"
            and fields.get("OverSubscribe") != "EXCLUSIVE"
            and fields.get("ExclusiveUser") != "YES"
            and (settings.reservation or fields.get("ReqResv") != "YES")
        ):
            names.append((-int(fields.get("PriorityTier", "1")), fields["PartitionName"]))
    ordered = [name for _, name in sorted(names)]
    return [",".join(ordered), *ordered] if ordered[1:] else ordered


def submit_options(node: str, gpu_type: str, settings: PlaceholderSettings) -> list[str]:
    """Return the options of sbatch for a placeholder of one GPU."""
    chosen = {name: getattr(settings, name) for name in ("account", "qos", "reservation", "time")}
    return [
        *(f"--{name}={value}" for name, value in chosen.items() if value),
        f"--nice={settings.nice}",
        f"--nodelist={node}",
        f"--gres=gpu:{gpu_type}:1",
    ]
