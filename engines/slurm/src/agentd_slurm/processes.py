"""Which jobs have processes on this node: their cgroups and their slurmstepds.

proctrack/cgroup puts each job's processes below `slurm/uid_U/job_J` on cgroup v1 and below
`slurmstepd.scope/job_J` on v2; where one host runs several slurmds, below `slurm_NODE` and
`NODE_slurmstepd.scope`. A slurmstepd is in the cgroup of its job; on v2 one more, of no job, keeps
the scope alive (`slurmstepd infinity`, in `slurmstepd.scope/system`). A kernel of agentd is in a
cgroup of agentd's and is not counted.

Users choose names and titles of processes, and the names of cgroups below their own slice. So a
slurmstepd is a process of root that runs the program, and cgroups of user sessions do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from agentd.procfs import read_lines

_JOB = (
    r"[0-9]+:[^:]*:(?:(?!/user\.slice|/user@).)*?"
    r"/(?:slurm(?:_{node})?/uid_[0-9]+|(?:{node}_)?slurmstepd\.scope)/job_([0-9]+)(?:/|$)"
)
_STEPD = re.compile(r"slurmstepd: \[([0-9]+)[.+]")
_NODE_CGROUP = re.compile(r"/(?:slurm_[^/]+|[^/]+_slurmstepd\.scope)/")
"""The cgroups of one of several slurmds on this host."""
_JOBLESS_CGROUP = re.compile(r"slurmstepd\.scope/system$")
_PROGRAM = "slurmstepd"
_ROOT = ["Uid:", *("0",) * 4]


class NodeProcesses(NamedTuple):
    """The jobs that have a process in a cgroup, or a slurmstepd.

    `has_unnamed` says that a slurmstepd does not show its job yet: it may be any.
    """

    jobs: frozenset[int]
    has_unnamed: bool = False

    def may_have(self, job_id: int) -> bool:
        """Return whether the job may have a process or a slurmstepd here."""
        return self.has_unnamed or job_id in self.jobs


def jobs_in_cgroup(lines: Iterable[str], node: str) -> frozenset[int]:
    """Return the jobs of this node's slurmd that `/proc/PID/cgroup` names."""
    job = re.compile(_JOB.format(node=re.escape(node)))
    return frozenset(int(match[1]) for line in lines if (match := job.match(line)))


def find_processes(node: str, proc: Path = Path("/proc")) -> NodeProcesses:
    """Look at every process of this machine.

    Raises:
        OSError: a process could be neither read nor found to be gone.
    """
    jobs: set[int] = set()
    has_unnamed = False
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            cgroups = read_lines(folder / "cgroup")
            own_jobs = jobs_in_cgroup(cgroups, node)
            if not own_jobs and any(
                _NODE_CGROUP.search(c) or _JOBLESS_CGROUP.search(c) for c in cgroups
            ):
                continue
            jobs |= own_jobs
            if _is_stepd(folder):
                title = "\n".join(read_lines(folder / "cmdline"))
                if match := _STEPD.match(title):
                    jobs.add(int(match[1]))
                elif title:
                    has_unnamed = True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return NodeProcesses(frozenset(jobs), has_unnamed)


def _is_stepd(folder: Path) -> bool:
    """Return whether a process is a slurmstepd of root's, which Debian names slurmstepd-wlm."""
    if not any(line.split() == _ROOT for line in read_lines(folder / "status")):
        return False
    try:
        return (folder / "exe").readlink().name.startswith(_PROGRAM)
    except PermissionError:  # its name is then root's own
        return read_lines(folder / "comm") == [_PROGRAM]
