"""Calls to slurmctld, by Slurm's own commands.

A prolog has no PATH. The commands are in the folder that the site's settings name, else where the
slurmd is that runs here, else where distributions and sites install them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from agentd.procfs import read_uids
from agentd_slurm.jobs import (
    ON_NODE,
    PLACEHOLDER,
    PLACEHOLDER_NAME,
    ROOT,
    Job,
    UnclearJob,
    UnreadableAnswer,
    parse_job,
)
from agentd_slurm.placeholders import (
    PLACEHOLDER_FORMAT,
    Placeholder,
    SlurmNode,
    choose_partitions,
    parse_node,
    parse_placeholders,
    submit_options,
)
from agentd_slurm.settings import InvalidSettings, PlaceholderSettings, read_settings

T = TypeVar("T")
TIMEOUT_S = 30.0
"""Seconds for an answer: scontrol looks up names of users, which takes long where LDAP is away."""
PAUSE_S = 1.0
"""Seconds between two questions to a slurmctld that does not answer."""
FOLDERS = "/usr/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"
_SLURMD = re.compile(r"slurm(?:step)?d(?:-wlm)?(?: \(deleted\))?")
_UNKNOWN_JOB = "Invalid job id"
_NO_ANSWER = re.compile(
    r"[Uu]nable to contact|timed out|Zero Bytes|standby|[Cc]onnection|Unexpected message"
)
"""Errors of a slurmctld that restarts, or hands over to another."""
MAX_REASON = 1024


class SlurmFailed(Exception):
    """A command of Slurm failed, or slurmctld does not answer."""


class ControllerUnavailable(SlurmFailed):
    """slurmctld does not answer, which may pass."""


def find_program(name: str) -> str:
    """Return the path of a command of Slurm.

    Raises:
        SlurmFailed: it is not installed.
    """
    try:
        folders = [read_settings().bin]
    except InvalidSettings as error:
        raise SlurmFailed(str(error)) from None
    if not folders[0]:
        folders = [*_slurmd_folders(), FOLDERS, os.environ.get("PATH", "")]
    searched = os.pathsep.join(folders)
    if path := shutil.which(name, path=searched):
        return path
    raise SlurmFailed(f"{name} not found in {searched}")


def _slurmd_folders() -> list[str]:
    """Return the folders of the slurmd that runs this hook, or else of one of root's processes."""
    for pid in _own_ancestors_and_others():
        try:
            program = str(Path(f"/proc/{pid}/exe").readlink())
        except OSError:  # it has ended, or is another user's
            continue
        folder, _, base = program.rpartition("/")
        if _SLURMD.fullmatch(base) and read_uids(pid) == {ROOT} and _has_our_files(pid):
            return [f"{folder.removesuffix('/sbin')}/bin", folder]
    return []


def _has_our_files(pid: int) -> bool:
    """Return whether a process sees our file system: a program of a container lies elsewhere."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/root").samefile("/")
    return False


def _own_ancestors_and_others() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            break
    yield from (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def run_command(name: str, *arguments: str) -> str:
    """Run a command of Slurm and return what it prints.

    Raises:
        ControllerUnavailable: slurmctld did not answer it in time.
        SlurmFailed: it cannot be run, or fails.
    """
    chosen = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    try:
        process = subprocess.run(  # noqa: S603 - its arguments are numbers and checked names
            [find_program(name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**chosen, "LC_ALL": "C"},  # users' modules set others, such as SLURM_CLUSTERS
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ControllerUnavailable(f"{name}: no answer within {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise SlurmFailed(f"{name}: {error.strerror}") from None
    if process.returncode:
        reason = (process.stderr or process.stdout).decode(
            errors="replace"
        ).strip() or f"exit status {process.returncode}"
        kind = ControllerUnavailable if _NO_ANSWER.search(reason) else SlurmFailed
        raise kind(f"{name}: {' '.join(reason.split())}")
    return process.stdout.decode(errors="replace")


def until_answered(call: Callable[[], T], deadline: float) -> T:
    """Return what a call returns, repeated until a deadline while slurmctld does not answer.

    Raises:
        SlurmFailed: the call failed, or the time is over.
    """
    while True:
        try:
            return call()
        except ControllerUnavailable:
            if time.monotonic() + PAUSE_S > deadline:
                raise
            time.sleep(PAUSE_S)


class QueuedJob(NamedTuple):
    """A row of the queue; a user chooses none of its fields."""

    job_id: int
    user_id: int
    state: str
    start_time: str


def list_jobs(node: str) -> list[QueuedJob]:
    """Return the jobs that may have processes on a node.

    Raises:
        UnreadableAnswer: squeue answers something else.
    """
    words = ("--all", "--noheader", "--array", "--states=all", "--format=%A %U %T %S")
    text = run_command("squeue", *words, f"--nodelist={node}")
    try:
        rows = [line.split() for line in text.splitlines()]
        jobs = [QueuedJob(int(job), int(user), state, start) for job, user, state, start in rows]
    except ValueError as error:
        raise UnreadableAnswer(f"squeue: unexpected answer ({error})") from None
    return [job for job in jobs if job.state in ON_NODE]


def list_placeholders(node: str) -> list[Placeholder]:
    """Return the placeholders of a node, pending ones too."""
    names = (f"--user={ROOT}", f"--name={PLACEHOLDER_NAME}")
    words = ("--all", "--noheader", "--states=all", f"--format={PLACEHOLDER_FORMAT}")
    return parse_placeholders(run_command("squeue", *words, *names), node)


def get_job(job_id: int) -> Job | None:
    """Return a job; None if slurmctld does not know it.

    Raises:
        UnclearJob: a text of its user looks like another job.
        UnreadableAnswer: it cannot be understood, or is about another job.
    """
    try:
        answered_job = _show_job(str(job_id))
    except UnclearJob as error:  # the whole array of its last task, or a job of components
        if error.job == str(job_id):
            raise
        answered_job = _show_job(error.job)
    if answered_job is not None and answered_job.job_id != job_id:
        raise UnreadableAnswer(f"scontrol show job {job_id}: got job {answered_job.job_id} first")
    return answered_job


def _show_job(name: str) -> Job | None:
    try:
        return parse_job(run_command("scontrol", "--all", "-o", "-d", "show", "job", name))
    except SlurmFailed as error:
        if _UNKNOWN_JOB in str(error):
            return None
        raise


def requeue_with_reason(name: str, reason: str) -> None:
    """Requeue a job, or cancel one that cannot be requeued; the reason is its `AdminComment`.

    Raises:
        SlurmFailed: it could be neither requeued nor cancelled.
    """
    comment = f"agentd: {reason}"[:MAX_REASON]
    try:
        run_command("scontrol", "update", f"JobId={name}", f"AdminComment={comment}")
    except ControllerUnavailable:
        raise
    except SlurmFailed:  # the job must go, with or without a comment
        pass
    requeue(name)


def requeue(name: str) -> None:
    """Requeue a job, or cancel one that cannot be requeued; not one that waits again already.

    A component is requeued by its leader, which means all components, and cancelled alone.

    Raises:
        SlurmFailed: neither could be done.
    """
    try:
        run_command("scontrol", "requeue", name.partition("+")[0])
    except ControllerUnavailable:
        raise
    except SlurmFailed:
        run_command("scancel", "--state=RUNNING", name)


def start_placeholder(
    node: str,
    gpu_type: str,
    holder: str,
    settings: PlaceholderSettings,
    *,
    is_test: bool = False,
) -> None:
    """Submit the job that blocks one GPU of a node, or only test whether Slurm would take it.

    Raises:
        SlurmFailed: Slurm refuses it in each partition of the node.
    """
    partitions = run_command("scontrol", "--all", "--oneliner", "show", "partition")
    errors: list[SlurmFailed] = []
    for partition in choose_partitions(partitions, read_node(node), settings):
        try:
            run_command(
                "sbatch",
                f"--partition={partition}",
                *submit_options(node, gpu_type, settings),
                f"--job-name={PLACEHOLDER_NAME}",
                f"--comment={PLACEHOLDER}{holder}",
                "--nodes=1",
                "--ntasks=1",
                "--mem=1",
                "--no-requeue",
                "--chdir=/",
                "--output=/dev/null",
                "--export=NONE",
                *(["--test-only"] if is_test else []),
                "--wrap=exec sleep infinity",
            )
        except SlurmFailed as error:
            errors.append(error)
        else:
            return
    raise (
        errors[0]
        if errors
        else SlurmFailed(f"no partition of {node} takes jobs of root beside others")
    )


def rename_placeholder(job_id: int, holder: str) -> None:
    """Write another holder into a placeholder's comment."""
    run_command("scontrol", "update", f"JobId={job_id}", f"Comment={PLACEHOLDER}{holder}")


def cancel(job_id: int) -> None:
    """Cancel a job; one that has ended meanwhile is not an error."""
    try:
        run_command("scancel", str(job_id))
    except SlurmFailed as error:
        if _UNKNOWN_JOB not in str(error):
            raise


def read_configuration() -> dict[str, str]:
    """Return slurmctld's settings by name."""
    lines = (line.partition("=") for line in run_command("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, separator, value in lines if separator}


def read_node(node: str) -> SlurmNode:
    """Return a node as Slurm sees it."""
    return parse_node(run_command("scontrol", "--oneliner", "--details", "show", "node", node))


def own_node() -> str:
    """Return the name by which Slurm knows this host.

    Raises:
        SlurmFailed: slurm.conf does not name it.
    """
    if name := os.environ.get("SLURMD_NODENAME"):
        return name
    names = run_command("scontrol", "show", "aliases").split()
    return names[0] if names else os.uname().nodename.partition(".")[0]
