"""`agentd-slurm sync`: keep Slurm and agentd in step, one look every few seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pwd import getpwuid
from types import FrameType
from typing import NamedTuple

from agentd.client import Client
from agentd.core.groups import group
from agentd.errors import AgentdError
from agentd.program.process import prepare_daemon
from agentd.program.sd_notify import Notifier
from agentd_slurm import controller
from agentd_slurm.claim_ids import ENGINE, job_of_claim
from agentd_slurm.commands.job_environment import known_node, log_line
from agentd_slurm.controller import MAX_REASON, QueuedJob, SlurmFailed
from agentd_slurm.decisions.doctor import check_map
from agentd_slurm.decisions.prolog import ClaimDevices, PrologFacts, RefuseJob, decide_prolog
from agentd_slurm.decisions.sync import (
    MIN_PAUSE_S,
    ClaimRunningJob,
    EndClaim,
    EndPlaceholder,
    GiveUpPlaceholder,
    RenamePlaceholder,
    StartPlaceholder,
    SyncAction,
    SyncFacts,
    claims_to_end,
    decide_sync,
    holders_of,
    pause_s,
    stuck_claims,
    unclaimed_jobs,
    wanted_placeholders,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import Job, UnreadableAnswer
from agentd_slurm.node_client import ANSWER_S, SHARED, NodeClient, socket_path
from agentd_slurm.processes import find_processes
from agentd_slurm.settings import InvalidSettings, PlaceholderSettings, read_settings

ABOUT = f"engine/{ENGINE}"
REMEDY = "run: agentd-slurm doctor (options of placeholders: /etc/agentd/slurm.toml)"
MAX_CONDITIONS = 32
"""Conditions that agentd takes from one engine."""
MIN_RETRY_S, MAX_RETRY_S = 4.0, 30.0
"""Seconds after which a placeholder that failed is tried again; they double each time."""
ROUND_ERRORS = (
    AgentdError,
    SlurmFailed,
    UnreadableAnswer,
    UnusableMap,
    InvalidSettings,
    OSError,
)
"""The errors of one look; the next one is taken as usual."""


class _Failure(NamedTuple):
    """A placeholder that could not be made, and when (monotonic) it is tried again."""

    reason: str
    retry_at: float
    pause_s: float


class Synchronizer:
    """One node's look at agentd and Slurm, and what follows from it."""

    def __init__(self, node: str | None) -> None:
        self._given_node = self._node = node or ""
        self.pause_s = MIN_PAUSE_S
        """Seconds until the next look."""
        self._client = NodeClient(socket_path())
        self._jobs: dict[QueuedJob, Job] = {}
        self._settings = PlaceholderSettings()
        self._failures: dict[str, _Failure] = {}
        self._started: set[str] = set()
        self._stuck: frozenset[str] = frozenset()
        self._has_compared = False
        self._reported: list[dict[str, str]] | None = None
        self._told: set[str] = set()

    def read_facts(self) -> SyncFacts:
        """Read everything; claims first, so that a job which starts meanwhile is known."""
        claims = self._client.claims()
        devices, kernels = self._client.devices(), self._client.kernels()
        placeholders = controller.list_placeholders(self._node)
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
            processes.jobs - {row.job_id for row in placeholders},
            placeholders,
            controller.read_node(self._node),
            bool(self._settings.reservation),
            frozenset(t for t, f in self._failures.items() if f.retry_at > time.monotonic()),
            self._stuck,
        )

    def _read_jobs(self) -> list[Job]:
        """Return the jobs of this node, each asked for once in a state."""
        started_at = time.monotonic()
        rows = controller.list_jobs(self._node)
        self.pause_s = pause_s(time.monotonic() - started_at)
        self._jobs = {row: self._jobs.get(row) or self._read_job(row) for row in rows}
        return [*self._jobs.values()]

    def _read_job(self, row: QueuedJob) -> Job:
        """Return a job, without its GPUs if its answer cannot be read."""
        job = None
        with suppress(UnreadableAnswer):
            job = controller.get_job(row.job_id)
        name = str(row.job_id)
        return job or Job(row.job_id, name, row.user_id, row.state, nodes=(self._node,))

    def run_once(self) -> list[str]:
        """Take one look, act on it, and return what failed; a new failure is logged.

        An action that fails does not keep the others from being tried.
        """
        errors: list[str] = []
        seen: list[str] = []
        try:
            self._node = self._given_node or known_node() or self._node or controller.own_node()
            if (settings := read_settings().placeholder) != self._settings:
                self._settings, self._failures = settings, {}
            facts = self.read_facts()
            stuck = stuck_claims(facts)
            seen = [
                f"{claim} is kept by processes in the cgroup job_{job}, which is over: end them"
                for claim, job in stuck.items()
                if claim in facts.stuck
            ]
            if not (check := check_map(facts.gres_map, facts.devices)).passed:
                seen.append(f"the map of devices does not fit: {check.detail}")
            self._stuck = frozenset(stuck)
            started_before, self._started = self._started, set()
            for action in decide_sync(facts):
                try:
                    self._execute(action, started_before)
                except ROUND_ERRORS as error:
                    errors.append(str(error))
            running = {row.gpu_type for row in facts.placeholders if row.state == "RUNNING"}
            wanted = wanted_placeholders(facts).keys() - running
            self._failures = {t: f for t, f in self._failures.items() if t in wanted}
            self._has_compared = not errors
        except ROUND_ERRORS as error:
            errors.append(str(error))
        types_by_reason = group((f.reason, t) for t, f in self._failures.items())
        errors += [
            f"GPU {', '.join(sorted(types))} is not blocked in Slurm: {reason}"
            for reason, types in types_by_reason.items()
        ]
        try:
            self.report([*dict.fromkeys(errors + seen)])
        except AgentdError as error:
            errors.append(str(error))
        for text in {*errors, *seen} - self._told:
            log_line("sync", text)
        self._told = {*errors, *seen}
        return errors

    def report(self, reasons: Sequence[str]) -> None:
        """Make these the conditions of the engine in agentd, if they are not yet."""
        conditions = [{"reason": text[:MAX_REASON], "remedy": REMEDY} for text in reasons]
        del conditions[MAX_CONDITIONS:]
        client = Client(socket_path(), timeout_s=ANSWER_S)
        shown = [row["reason"] for row in client.node()["conditions"] if row["about"] == ABOUT]
        row = next((row for row in client.engines() if row["engine"] == ENGINE), None)
        is_ready = self._has_compared or (row is not None and row["ready"])
        if (
            conditions != self._reported
            or row is None
            or row["ready"] != is_ready
            or any(given["reason"] not in shown for given in conditions)
        ):
            client.set_engine(ENGINE, ready=is_ready, conditions=conditions)
            self._reported = conditions

    def stop(self) -> None:
        """End the placeholders of this node, and the conditions."""
        for row in controller.list_placeholders(self._node):
            controller.cancel(row.job_id)
        self.report([])

    def _execute(self, action: SyncAction, started_before: Collection[str]) -> None:
        match action:
            case StartPlaceholder(gpu_type, _) if gpu_type in started_before:
                self._postpone(gpu_type, "Slurm changed or ended it (JobSubmitPlugins, scancel)")
            case StartPlaceholder(gpu_type, holder):
                self._start_placeholder(gpu_type, holder)
            case RenamePlaceholder(job_id, holder):
                controller.rename_placeholder(job_id, holder)
            case EndPlaceholder(job_id, reason):
                log_line("sync", f"placeholder {job_id} is ended: {reason}")
                controller.cancel(job_id)
            case GiveUpPlaceholder(job_id, gpu_type, reason):
                self._postpone(gpu_type, reason)
                if job_id is not None:
                    controller.cancel(job_id)
            case EndClaim():
                self._end_claim(action)
            case ClaimRunningJob(job_id):
                self._claim_running(job_id)

    def _start_placeholder(self, gpu_type: str, holder: str) -> None:
        try:
            controller.start_placeholder(self._node, gpu_type, holder, self._settings)
        except SlurmFailed as error:
            self._postpone(gpu_type, str(error))
        else:
            self._started.add(gpu_type)
            if gpu_type not in self._failures:
                log_line("sync", f"{gpu_type} is blocked in Slurm: {holder}")

    def _postpone(self, gpu_type: str, reason: str) -> None:
        failure = self._failures.get(gpu_type)
        seconds = min(2 * failure.pause_s, MAX_RETRY_S) if failure else MIN_RETRY_S
        self._failures[gpu_type] = _Failure(reason, time.monotonic() + seconds, seconds)

    def _claim_running(self, job_id: int) -> None:
        """Claim the GPUs of a job that still runs without a claim, or send it back.

        It goes back if somebody else holds one of them, as from a prolog.
        """
        with self._client.locked(job_id, is_shared=True):
            facts = self.read_facts()  # a prolog may have claimed meanwhile
            job = next((job for job in facts.jobs if job.job_id == job_id), None)
            if job is None or job_id not in unclaimed_jobs(facts):
                return
            user = str(job.user_id)
            with suppress(KeyError):
                user = getpwuid(job.user_id).pw_name
            match decide_prolog(
                PrologFacts(job_id, self._node, user, job, facts.gres_map, facts.devices)
            ):
                case RefuseJob(reason):
                    self._send_back(job.name, reason)
                case ClaimDevices(agent, own, shared):
                    ids = {claim["claim_id"] for claim in facts.claims}
                    own = {} if self._client.claims_of(job_id) else own
                    shared = tuple(one for one in shared if one["claim_id"] not in ids)
                    requests = [request for request in (own, *shared) if request]
                    if holders := [h for one in requests for h in holders_of(one, facts.devices)]:
                        self._send_back(job.name, f"its GPUs are held by {', '.join(holders)}")
                        return
                    log_line("sync", f"job {job_id} runs without a claim: its GPUs are claimed")
                    if own:
                        self._client.create_claim(job_id, agent, {**own, "observed": True})
                    for request in shared:
                        self._client.create_shared_claim(agent, {**request, "observed": True})

    def _send_back(self, name: str, reason: str) -> None:
        log_line("sync", f"job {name} runs without a claim and is sent back: {reason}")
        controller.requeue_with_reason(name, reason)

    def _end_claim(self, action: EndClaim) -> None:
        """Release a claim if its job is still over, now that no prolog can claim again."""
        with self._client.locked(action.job_id or SHARED):
            facts = self.read_facts()
            for claim in facts.claims:
                if claim["claim_id"] == action.claim_id and action in claims_to_end(facts):
                    log_line("sync", f"claim {action.claim_id} is released: its job is over")
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
    synchronizer = Synchronizer(node)
    notifier.ready("starting")
    while not stopped.is_set():
        errors = synchronizer.run_once()
        notifier.status("; ".join(errors)[:200] or "in step")
        if once:
            return 1 if errors else 0
        stopped.wait(synchronizer.pause_s)
    try:
        synchronizer.stop()
    except ROUND_ERRORS as error:
        log_line("sync", f"while stopping: {error}")
    return 0
