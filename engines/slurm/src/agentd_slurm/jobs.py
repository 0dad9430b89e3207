"""Slurm's jobs, read from `squeue --json`.

JSON and not the text of scontrol: there a job's comment could pretend to be a line about its GPUs.
Releases after 22.05 wrap numbers and list states; both forms are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PLACEHOLDER = "agentd:"
"""The beginning of a placeholder job's comment; the holder of the GPU follows."""
PLACEHOLDER_NAME = "agentd"
ROOT = 0
ON_NODE = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
     "RESIZING", "STAGING"}
)  # fmt: skip
"""States in which a job may have processes on its nodes."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_GPUS = re.compile(r"(?:^|,)gpu((?::[^:,()]+){0,2})(\(([^()]*)\))?(?=,|$)")
_TYPE = re.compile(r"(?:^|,)(?:gres[:/])?gpu:([^:,=]+)")
_PART = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")
MOST_HOSTS = 65536


class UnreadableAnswer(Exception):
    """Slurm answered something that cannot be understood."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the queue. `gpus` are the indices it has on each node; None: Slurm tells none."""

    job_id: int
    user_id: int
    state: str
    comment: str = ""
    gpu_type: str = ""
    required_nodes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    gpus: Mapping[str, frozenset[int] | None] = field(default_factory=dict)

    @property
    def is_placeholder(self) -> bool:
        """Whether the job blocks a GPU for agentd; root alone submits such jobs."""
        return self.user_id == ROOT and self.comment.startswith(PLACEHOLDER)

    def is_on(self, node: str) -> bool:
        """Return whether the job may have processes on a node."""
        return self.state in ON_NODE and node in self.nodes


def parse_jobs(text: str) -> list[Job]:
    """Read the answer of `squeue --json`.

    Raises:
        UnreadableAnswer: it is not such an answer.
    """
    try:
        rows = json.loads(text)["jobs"]
        return [_job(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = f"{type(error).__name__}: {error}"
        raise UnreadableAnswer(f"squeue --json: unexpected answer ({shown})") from None


def _job(row: Mapping[str, Any]) -> Job:
    states = row["job_state"]
    nodes = tuple(expand_hosts(row.get("nodes") or ""))
    details = row.get("gres_detail") or []
    return Job(
        job_id=_number(row["job_id"]),
        user_id=_number(row["user_id"]),
        state=states if isinstance(states, str) else _state(states),
        comment=_text(row.get("comment")),
        gpu_type=_requested_type(row.get("tres_per_node") or ""),
        required_nodes=tuple(expand_hosts(row.get("required_nodes") or "")),
        nodes=nodes,
        gpus={node: indices(detail) for node, detail in zip(nodes, details, strict=False)},
    )


def _state(states: list[str]) -> str:
    """Return the one of several states that matters: COMPLETING stands beside another."""
    return next((state for state in states if state in ON_NODE), states[0])


def _text(value: object) -> str:
    """Return a comment, which newer releases divide by its writer."""
    if isinstance(value, dict):
        value = value.get("job")
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    number = value.get("number") if isinstance(value, dict) else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"expected a number, got {value!r}")
    return number


def _requested_type(text: str) -> str:
    match = _TYPE.search(text)
    return match[1] if match and not match[1].isdecimal() else ""


def indices(detail: str) -> frozenset[int] | None:
    """Return the indices of the GPUs in a job's `gres_detail` on one node.

    None where there are GPUs without indices: gres.conf names no files.
    """
    found: set[int] = set()
    for match in _GPUS.finditer(detail):
        count, inside = match[1].rpartition(":")[2], match[3] or ""
        if inside.startswith("IDX:"):
            found |= {*_ranges(inside.removeprefix("IDX:"))}
        elif count != "0":
            return None
    return frozenset(found)


def _ranges(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-2,5`; `N/A` and an empty list have none."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last or first) + 1)


def expand_hosts(text: str) -> list[str]:
    """Return the names in a host list such as `n[1-3,5],m1`.

    Raises:
        ValueError: it is malformed, or too long.
    """
    hosts: list[str] = []
    rest = text
    while rest:
        match = _PART.match(rest)
        if match is None or not match[0].rstrip(","):
            raise ValueError(f"invalid host list {text!r}")
        rest = rest[match.end() :]
        hosts += _bracketed(match[1], match[2], match[3])
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"host list exceeds the limit of {MOST_HOSTS}")
    return hosts


def _bracketed(before: str, inside: str | None, after: str) -> Iterator[str]:
    if inside is None:
        yield before + after
        return
    for part in inside.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"invalid range {part!r} in a host list")
        for number in range(int(first), min(int(last or first), int(first) + MOST_HOSTS) + 1):
            yield f"{before}{number:0{len(first)}d}{after}"
