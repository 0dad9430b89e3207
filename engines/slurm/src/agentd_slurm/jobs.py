"""Slurm's jobs, read from `scontrol --oneliner --details show job`.

A user chooses texts of a job, in which anything may stand, newlines too. The answer has the ids,
the job's name, its user, the MCS label, then the fields that are read here, and then the other
texts: comment and paths. So the name and the label alone could pretend to be fields, and each is
followed by fields that stand in an answer once. Accounts and WCKeys are shown in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
_DEVICES = re.compile(
    r"(?:^|,)(gpu|shard|mps)(?::([^:,()]+))?(?::([0-9]+))?(?:\(([^()]*)\))?(?=,|$)"
)
_HEAD = re.compile(r"((?:\w+=\S+ )*?)JobName=")
_AFTER_NAME = re.compile(r" UserId=[^=]*\(([0-9]{1,10})\) GroupId=[^=]*\([0-9]+\) MCS_label=")
_AFTER_LABEL = re.compile(r" Priority=[0-9]+ Nice=-?[0-9]+ Account=")
_GRES = re.compile(r" JOB_GRES=\S*")
_NODES = re.compile(r"\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_PART = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")
MAX_HOSTS = 65536
MAX_GPUS = 4096
"""GPUs of one node."""


class UnreadableAnswer(Exception):
    """Slurm answered something that cannot be understood."""


class UnclearJob(UnreadableAnswer):
    """A text of a job's user may be fields of another job; `job` is the `name` of the job."""

    def __init__(self, job: str) -> None:
        super().__init__(f"job {job}: its name, label or comment looks like another job")
        self.job = job


class Job(NamedTuple):
    """One job of the queue. `gpus` are its indices on each node, None if Slurm has none.

    `shared` are those of GPUs that it shares, by shards or MPS. `types` has the types of its GPUs
    in gres.conf by index, where Slurm's answer names them.
    `name` is the word by which Slurm's commands know it alone: ARRAYID_TASK, LEADER+OFFSET, or its
    id. The id of an array's last task or of a leader means all of them.
    """

    job_id: int
    name: str
    user_id: int
    state: str
    comment: str = ""
    nodes: tuple[str, ...] = ()
    gpus: Mapping[str, frozenset[int] | None] = {}
    shared: Mapping[str, frozenset[int] | None] = {}
    types: Mapping[str, Mapping[int, str]] = {}

    @property
    def is_placeholder(self) -> bool:
        """Whether the job blocks a GPU for agentd; root alone submits such jobs."""
        return self.user_id == ROOT and self.comment.startswith(PLACEHOLDER)

    def is_on(self, node: str) -> bool:
        """Return whether the job may have processes on a node."""
        return self.state in ON_NODE and node in self.nodes


def parse_job(text: str) -> Job:
    """Read the first job of an answer, which is the job that was asked for.

    Raises:
        UnclearJob: fields that follow the name or the label stand in it more than once: in such a
            text, or as another job.
        UnreadableAnswer: it is not such an answer.
    """
    head = _HEAD.match(text)
    ids = dict(word.split("=", 1) for word in head[1].split()) if head else {}
    if head is None or not re.fullmatch("[0-9]{1,10}", ids.get("JobId", "")):
        raise UnreadableAnswer(f"scontrol show job: unexpected answer {text[:80]!r}")
    name = ids["JobId"]
    if "ArrayJobId" in ids:
        name = f"{ids['ArrayJobId']}_{ids.get('ArrayTaskId')}"
    elif "HetJobId" in ids:
        name = f"{ids['HetJobId']}+{ids.get('HetJobOffset')}"
    after_head = text[head.end() :]
    users, labels = [*_AFTER_NAME.finditer(after_head)], [*_AFTER_LABEL.finditer(after_head)]
    if not users or not labels:
        raise UnreadableAnswer(f"scontrol show job {name}: no UserId= or Priority= in the answer")
    if users[1:] or labels[1:]:
        raise UnclearJob(name)
    return _parse_fields(int(ids["JobId"]), name, int(users[0][1]), after_head[labels[0].end() :])


def _parse_fields(job_id: int, name: str, user_id: int, after_label: str) -> Job:
    """Read what stands behind the label of a job; what a user chooses comes last."""
    try:
        details = _parse_details(after_label)
        return Job(
            job_id=job_id,
            name=name,
            user_id=user_id,
            state=_field(after_label, "JobState"),
            comment=_field(after_label, "Comment"),
            nodes=tuple(expand_hosts(_field(after_label, "NodeList"))),
            gpus={node: parse_gpu_indices(text) for node, text in details.items()},
            shared={
                node: parse_gpu_indices(text, "shard", "mps") for node, text in details.items()
            },
            types={node: parse_types(text) for node, text in details.items()},
        )
    except ValueError as error:
        raise UnreadableAnswer(f"scontrol show job {name}: {error}") from None


def _field(text: str, name: str) -> str:
    """Return the first word of a field, empty if there is none."""
    match = re.search(rf" {name}=(\S*)", text)
    return match[1] if match and match[1] != "(null)" else ""


def _parse_details(text: str) -> dict[str, str]:
    """Return the nodes of a job with its `GRES=` there, such as `gpu:a100:1(IDX:0)`."""
    details: dict[str, str] = {}
    match = _GRES.search(text)
    while match and (match := _NODES.match(text, match.end())):
        details |= dict.fromkeys(expand_hosts(match[1]), match[2])
    return details


def parse_gpu_indices(detail: str, *names: str) -> frozenset[int] | None:
    """Return the indices of the GPUs in a job's `GRES=` on one node, or of others by `names`.

    None where there are GPUs without indices: gres.conf names no files.
    """
    numbers: set[int] = set()
    for name, type_or_count, count, indices in _DEVICES.findall(detail):
        if name not in (names or ("gpu",)):
            continue
        if indices.startswith("IDX:"):
            numbers |= {*_parse_ranges(indices.removeprefix("IDX:"))}
        elif (count or type_or_count) != "0":
            return None
    return frozenset(numbers)


def parse_types(detail: str) -> dict[int, str]:
    """Return the types of the GPUs in a job's `GRES=` on one node, by index."""
    return {
        index: gpu_type
        for name, gpu_type, count, indices in _DEVICES.findall(detail)
        if name == "gpu" and count and indices.startswith("IDX:")
        for index in _parse_ranges(indices.removeprefix("IDX:"))
    }


def _parse_ranges(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-2,5`; `N/A` and an empty list have none."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), min(int(last or first), MAX_GPUS) + 1)


def expand_hosts(text: str) -> list[str]:
    """Return the names in a host list such as `n[1-3,5],m1`.

    Raises:
        ValueError: it is malformed, or too long.
    """
    hosts: list[str] = []
    remaining = text
    while remaining:
        match = _PART.match(remaining)
        if match is None or not match[0].rstrip(","):
            raise ValueError(f"invalid host list {text!r}")
        remaining = remaining[match.end() :]
        hosts += _expand_brackets(match[1], match[2], match[3])
        if len(hosts) > MAX_HOSTS:
            raise ValueError(f"host list exceeds the limit of {MAX_HOSTS}")
    return hosts


def _expand_brackets(before: str, ranges: str | None, after: str) -> Iterator[str]:
    if ranges is None:
        yield before + after
        return
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"invalid range {part!r} in a host list")
        for number in range(int(first), min(int(last or first), int(first) + MAX_HOSTS) + 1):
            yield f"{before}{number:0{len(first)}d}{after}"
