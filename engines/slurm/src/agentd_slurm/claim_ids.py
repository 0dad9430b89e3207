"""The claims of a job: their ids begin with a prefix that only admins use, and labels name the job.

An id may be taken by a record of before, so the labels, and not the id, say whose a claim is.
A device that jobs share, by shards or MPS, is held whole by one claim for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ENGINE = "slurm"
PREFIX = "slurm-"
SHARED_PREFIX = "slurm-dev-"
SHARED_LABELS = {"engine": ENGINE}
ENDED = frozenset({"terminated", "failed", "lost"})
"""States of a kernel that holds nothing any more."""
MAX_IDS = 16
"""Ids that are tried for one job."""
_ID = re.compile(rf"{re.escape(PREFIX)}([1-9][0-9]{{0,9}})(?:-[0-9]+)?")


def claim_ids(job_id: int) -> Iterator[str]:
    """Yield the ids that the claim of a job may have, the usual one first."""
    yield f"{PREFIX}{job_id}"
    for number in range(2, MAX_IDS + 1):
        yield f"{PREFIX}{job_id}-{number}"


def shared_claim_id(stable_id: str) -> str:
    """Return the id of the claim of a device that jobs share."""
    from hashlib import sha256  # noqa: PLC0415 - few jobs share devices, and it loads slowly

    return f"{SHARED_PREFIX}{sha256(stable_id.encode()).hexdigest()[:16]}"


def is_shared_claim(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim holds a device for all jobs that share it."""
    is_ours = claim["labels"].get("engine") == ENGINE
    return is_ours and str(claim["claim_id"]).startswith(SHARED_PREFIX)


def labels_of(job_id: int) -> dict[str, str]:
    """Return the labels by which the claims of a job are found."""
    return {"engine": ENGINE, "job": str(job_id)}


def job_of_claim(claim: Mapping[str, Any]) -> int | None:
    """Return the job that a claim was made for by a prolog; None for any other claim."""
    job_id = _parse_job_id(claim["claim_id"])
    is_ours = job_id is not None and labels_of(job_id).items() <= claim["labels"].items()
    return job_id if is_ours else None


def jobs_of_kernels(kernels: Iterable[Mapping[str, Any]]) -> set[int | None]:
    """Return the jobs whose claims live kernels use; None stands for kernels without one."""
    return {_parse_job_id(row["claim_id"]) for row in kernels if row["state"] not in ENDED}


def jobs_kernels(
    kernels: Iterable[Mapping[str, Any]], job_id: int, agents: Iterable[str]
) -> list[str]:
    """Return the ids of the kernels that were made from the claims of a job.

    Its claim may have ended with the create, or have the id of an earlier claim of another agent.
    """
    chosen = {*agents}
    return [
        row["kernel_id"]
        for row in kernels
        if _parse_job_id(row["claim_id"]) == job_id and row["agent_id"] in chosen
    ]


def _parse_job_id(claim_id: str | None) -> int | None:
    match = _ID.fullmatch(claim_id or "")
    return int(match[1]) if match else None
