"""`agentd-slurm sync`: keep Slurm and agentd in step, one look every few seconds."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pwd import getpwuid
from types import FrameType

from agentd.errors import AgentdError
from agentd.program.process import prepare_daemon
from agentd.program.sd_notify import Notifier
from agentd_slurm import controller
from agentd_slurm.claim_ids import job_of_claim
from agentd_slurm.commands.job_environment import log_line
from agentd_slurm.controller import QueuedJob, SlurmFailed
from agentd_slurm.decisions.prolog import ClaimDevices, PrologFacts, decide_prolog
from agentd_slurm.decisions.sync import (
    ClaimRunningJob,
    EndClaim,
    EndPlaceholder,
    RenamePlaceholder,
    StartPlaceholder,
    SyncAction,
    SyncFacts,
    decide_sync,
    unclaimed_jobs,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import Job, UnreadableAnswer
from agentd_slurm.node_client import NodeClient, socket_path
from agentd_slurm.processes import find_processes

SYNC_INTERVAL_S = 4.0
"""Seconds between two looks: placeholders follow within 12 s, and Slurm starts jobs 3 s late."""
ROUND_ERRORS = (AgentdError, SlurmFailed, UnreadableAnswer, UnusableMap, OSError)
"""The errors of one round; the next one is run as usual."""


class Synchronizer:
    """One node's look at agentd and Slurm, and what follows from it."""

    def __init__(self, node: str, client: NodeClient) -> None:
        self._node = node
        self._client = client
        self._unclaimed: frozenset[int] = frozenset()
        self._jobs: dict[QueuedJob, Job] = {}

    def read_facts(self) -> SyncFacts:
        """Read everything; claims first, so that a job which starts meanwhile is known."""
        claims = self._client.claims()
        devices, kernels = self._client.devices(), self._client.kernels()
        jobs = self._read_jobs()
        processes = find_processes(self._node)
        ids = (job for row in claims if (job := job_of_claim(row)) is not None)
        return SyncFacts(
            self._node,
            read_map(map_path()),
            claims,
            kernels,
            devices,
            jobs,
            frozenset(job for job in ids if processes.may_have(job)),
            processes.jobs,
            self._unclaimed,
        )

    def _read_jobs(self) -> list[Job]:
        """Return the jobs of this node, each asked for once in a state, and the placeholders."""
        placeholders = controller.list_placeholders(self._node)
        rows = [row for row in controller.list_jobs(self._node) if row.job_id not in placeholders]
        self._jobs = {row: self._jobs.get(row) or self._read_job(row) for row in rows}
        placeholder_jobs = [controller.get_job(job_id) for job_id in placeholders]
        return [*self._jobs.values(), *(job for job in placeholder_jobs if job is not None)]

    def _read_job(self, row: QueuedJob) -> Job:
        """Return a job, without its GPUs if its answer cannot be read."""
        job = None
        with suppress(UnreadableAnswer):
            job = controller.get_job(row.job_id)
        name = str(row.job_id)
        return job or Job(row.job_id, name, row.user_id, row.state, nodes=(self._node,))

    def run_once(self) -> list[SyncAction]:
        """Take one look, act on it, and return the actions.

        One that fails does not keep the others from being tried.

        Raises:
            the error of the first one that failed.
        """
        facts = self.read_facts()
        actions = decide_sync(facts)
        self._unclaimed = unclaimed_jobs(facts)
        errors: list[Exception] = []
        for action in actions:
            try:
                self._execute(action)
            except ROUND_ERRORS as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return actions

    def _execute(self, action: SyncAction) -> None:
        match action:
            case StartPlaceholder(gpu_type, holder):
                log_line("sync", f"{gpu_type} is blocked in Slurm: {holder}")
                controller.start_placeholder(self._node, gpu_type, holder)
            case RenamePlaceholder(job_id, holder):
                controller.rename_placeholder(job_id, holder)
            case EndPlaceholder(job_id):
                log_line("sync", f"placeholder {job_id} is ended: its GPU is free")
                controller.cancel(job_id)
            case EndClaim(job_id):
                self._end_claims(job_id)
            case ClaimRunningJob(job_id):
                self._claim_running(job_id)

    def _claim_running(self, job_id: int) -> None:
        """Claim the GPUs of a job that still runs without a claim, also if others hold them."""
        with self._client.locked(job_id):
            job = controller.get_job(job_id)
            if job is None or job.state != "RUNNING" or self._client.claims_of(job_id):
                return
            user = str(job.user_id)
            with suppress(KeyError):
                user = getpwuid(job.user_id).pw_name
            devices, gres_map = self._client.devices(), read_map(map_path())
            facts = PrologFacts(job_id, self._node, user, job, gres_map=gres_map, devices=devices)
            match decide_prolog(facts):
                case ClaimDevices(agent, request):
                    log_line("sync", f"job {job_id} runs without a claim: its GPUs are claimed")
                    self._client.create_claim(job_id, agent, {**request, "observed": True})
                case refusal:
                    log_line("sync", f"job {job_id} runs without a claim: {refusal.reason}")

    def _end_claims(self, job_id: int) -> None:
        """Release the claims of a job if it is still over, now that no prolog can claim again."""
        with self._client.locked(job_id):
            is_over = job_id not in {row.job_id for row in controller.list_jobs(self._node)}
            if is_over and not find_processes(self._node).may_have(job_id):
                for claim in self._client.claims_of(job_id):
                    log_line("sync", f"claim {claim['claim_id']} is released: its job is over")
                    self._client.release(claim)


def run_sync(node: str | None, *, once: bool = False) -> int:
    """Look until SIGTERM or SIGINT and return the exit status."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    prepare_daemon()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    notifier = Notifier(os.environ)
    client = NodeClient(socket_path())
    synchronizer: Synchronizer | None = None
    notifier.ready("starting")
    while not stopped.is_set():
        try:
            if synchronizer is None:
                synchronizer = Synchronizer(node or controller.own_node(), client)
            synchronizer.run_once()
        except ROUND_ERRORS as error:
            log_line("sync", str(error))
            notifier.status(str(error)[:200])
            if once:
                return 1
        else:
            notifier.status("in step")
        if once:
            return 0
        stopped.wait(SYNC_INTERVAL_S)
    return 0
