"""Calls to slurmctld, by Slurm's own commands.

A prolog has no PATH: the commands are looked for where distributions and sites install them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

from agentd_slurm.jobs import PLACEHOLDER, PLACEHOLDER_NAME, Job, parse_jobs

TIMEOUT_S = 10.0
FOLDERS = "/usr/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"
_UNKNOWN = "Invalid job id"
MOST_REASON = 1024


class SlurmFailed(Exception):
    """A command of Slurm failed, or slurmctld does not answer."""


def find_program(name: str) -> str:
    """Return the path of a command of Slurm.

    Raises:
        SlurmFailed: it is not installed.
    """
    folders = os.pathsep.join(filter(None, (os.environ.get("PATH"), FOLDERS)))
    if found := shutil.which(name, path=folders):
        return found
    raise SlurmFailed(f"{name} not found in {folders}")


def run(name: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command of Slurm and return what it prints.

    Raises:
        SlurmFailed: it cannot be run, fails, or does not end in time.
    """
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - its arguments are numbers and checked names
            [find_program(name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environ,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{name}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmFailed(f"{name}: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise SlurmFailed(f"{name}: {' '.join(said.split())}")
    return done.stdout.decode(errors="replace")


def jobs(node: str) -> list[Job]:
    """Return the jobs that slurmctld knows and that could concern a node."""
    del node  # squeue 22.05 lists every job in JSON, whatever it is asked for
    return parse_jobs(run("squeue", "--all", "--json"))


def job(job_id: int, timeout_s: float = TIMEOUT_S) -> Job | None:
    """Return a job; None if slurmctld does not know it."""
    try:
        answer = run("squeue", "--all", "--json", f"--jobs={job_id}", timeout_s=timeout_s)
    except SlurmFailed as error:
        if _UNKNOWN in str(error):
            return None
        raise
    return next((found for found in parse_jobs(answer) if found.job_id == job_id), None)


def send_back(job_id: int, reason: str) -> None:
    """Requeue a job, or cancel one that cannot be requeued; the reason is its `AdminComment`.

    Raises:
        SlurmFailed: it could be neither requeued nor cancelled.
    """
    comment = f"agentd: {reason}"[:MOST_REASON]
    with suppress(SlurmFailed):  # the job must go, with or without a comment
        run("scontrol", "update", f"JobId={job_id}", f"AdminComment={comment}")
    requeue(job_id)


def requeue(job_id: int) -> None:
    """Requeue a job, or cancel one that cannot be requeued; not one that waits again already.

    Raises:
        SlurmFailed: neither could be done.
    """
    try:
        run("scontrol", "requeue", str(job_id))
    except SlurmFailed:
        run("scancel", "--state=RUNNING", str(job_id))


def start_placeholder(node: str, gpu_type: str, holder: str) -> None:
    """Submit the job that blocks one GPU of a node."""
    run(
        "sbatch",
        "--parsable",
        f"--job-name={PLACEHOLDER_NAME}",
        f"--comment={PLACEHOLDER}{holder}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        f"--gres=gpu:{gpu_type}:1",
        "--mem=1",
        "--no-requeue",
        "--nice=-2147483645",
        "--chdir=/",
        "--output=/dev/null",
        "--export=NONE",
        "--wrap=exec sleep infinity",
    )


def rename_placeholder(job_id: int, holder: str) -> None:
    """Write another holder into a placeholder's comment."""
    run("scontrol", "update", f"JobId={job_id}", f"Comment={PLACEHOLDER}{holder}")


def cancel(job_id: int) -> None:
    """Cancel a job; one that has ended meanwhile is not an error."""
    try:
        run("scancel", str(job_id))
    except SlurmFailed as error:
        if _UNKNOWN not in str(error):
            raise


def configuration() -> dict[str, str]:
    """Return slurmctld's settings by name."""
    lines = (line.partition("=") for line in run("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, found, value in lines if found}


def node_gres(node: str) -> str:
    """Return the `Gres=` of a node."""
    words = run("scontrol", "--oneliner", "show", "node", node).split()
    return next((word.removeprefix("Gres=") for word in words if word.startswith("Gres=")), "")


def own_node() -> str:
    """Return the name by which Slurm knows this host.

    Raises:
        SlurmFailed: slurm.conf does not name it.
    """
    if name := os.environ.get("SLURMD_NODENAME"):
        return name
    return run("scontrol", "show", "aliases").strip() or os.uname().nodename.partition(".")[0]
