"""Calls to agentd, repeated until a deadline while it does not answer."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentd.client import Client
from agentd.client.defaults import DEFAULT_SOCKET
from agentd.errors import (
    AgentdError,
    ClaimConflict,
    Unavailable,
    UnknownClaim,
    UnknownKernel,
)
from agentd_slurm.claim_ids import (
    claim_ids,
    is_shared_claim,
    job_of_claim,
    jobs_kernels,
    labels_of,
)

T = TypeVar("T")
ANSWER_S = 10.0
"""Seconds that a prolog waits for agentd: longer, and Slurm would wait with it."""
STOP_S = 5.0
"""Seconds between TERM and KILL for kernels of a job that is over."""
PAUSE_S = 0.2
SHARED = 0
"""Stands for a job in the lock: shared devices, of which any job may be the last."""
SOCKET_VARIABLE = "AGENTD_SOCKET"


def socket_path() -> str:
    """Return the path of agentd's socket."""
    return os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET


class NodeClient:
    """The engine's calls to agentd; `wait_s` bounds each call and its repeats."""

    def __init__(self, socket: str, wait_s: float = ANSWER_S) -> None:
        self._socket = socket
        self._wait_s = wait_s

    def _call(self, call: Callable[[Client], T], wait_s: float | None = None) -> T:
        """Make a call of a client.

        Raises:
            AgentdError: agentd refused, or did not answer in time (`Unavailable`).
        """
        deadline = time.monotonic() + (wait_s or self._wait_s)
        while True:
            remaining_s = max(deadline - time.monotonic(), PAUSE_S)
            try:
                return call(Client(self._socket, timeout_s=remaining_s, retry_s=remaining_s))
            except Unavailable:
                if time.monotonic() + PAUSE_S > deadline:
                    raise
                time.sleep(PAUSE_S)

    def devices(self) -> Sequence[Mapping[str, Any]]:
        """Return the devices of the node."""
        return self._call(Client.devices)

    def claims(self) -> Sequence[Mapping[str, Any]]:
        """Return every claim."""
        return self._call(Client.claims)

    def kernels(self, claim: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Return every kernel, or those of a claim."""
        return self._call(lambda node: node.kernels(claim=claim))

    def claims_of(self, job_id: int) -> list[Mapping[str, Any]]:
        """Return the claims that were made for a job."""
        rows = self._call(lambda node: node.claims(labels=labels_of(job_id)))
        return [row for row in rows if job_of_claim(row) == job_id]

    def create_claim(self, job_id: int, agent: str, request: Mapping[str, Any]) -> None:
        """Create the claim of a job, by another id where one is taken; end its earlier claims.

        A claim that appears meanwhile is one that a killed prolog had asked for.

        Raises:
            ClaimConflict: all ids are taken.
        """
        for claim_id in claim_ids(job_id):
            for claim in self.claims_of(job_id):
                self.release(claim)
            try:
                body = {**request, "claim_id": claim_id}
                self._call(partial(Client.create_claim, agent_id=agent, request=body))
            except ClaimConflict as error:
                conflict = error
            else:
                return
        raise conflict

    def create_shared_claim(self, agent: str, request: Mapping[str, Any]) -> None:
        """Create the claim of a device that jobs share, unless it is there already.

        Raises:
            AgentdError: the device is another holder's, or the id is.
        """
        try:
            self._call(partial(Client.create_claim, agent_id=agent, request=request))
        except ClaimConflict:  # one that sync made, as observed
            claim = self._call(lambda node: node.claim(request["claim_id"]))
            if not is_shared_claim(claim) or claim["agent_id"] != agent:
                raise

    def release_id(self, claim_id: str) -> None:
        """Release a claim that may have ended."""
        with suppress(UnknownClaim):
            self._call(lambda node: node.release_claim(claim_id))

    def delete_kernels(self, job_id: int, agents: Iterable[str]) -> None:
        """Stop and delete every kernel that was made from the claims of a job, all together.

        Raises:
            AgentdError: one could not be deleted.
        """
        errors: list[AgentdError] = []
        threads = [
            threading.Thread(target=self._delete_kernel, args=(kernel_id, errors))
            for kernel_id in jobs_kernels(self.kernels(), job_id, agents)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _delete_kernel(self, kernel_id: str, errors: list[AgentdError]) -> None:
        delete = partial(Client.delete_kernel, kernel_id=kernel_id, timeout=STOP_S)
        try:
            with suppress(UnknownKernel):
                self._call(delete, wait_s=self._wait_s + 2 * STOP_S)
        except AgentdError as error:
            errors.append(error)

    def release(self, claim: Mapping[str, Any]) -> None:
        """Delete the kernels of a job's claim and release it, again while a create is in flight."""
        deadline = time.monotonic() + self._wait_s
        while True:
            if (job_id := job_of_claim(claim)) is not None:
                self.delete_kernels(job_id, [claim["agent_id"]])
            try:
                self.release_id(claim["claim_id"])
            except ClaimConflict:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)
            else:
                return

    @contextmanager
    def locked(self, job_id: int, *, is_shared: bool = False) -> Iterator[None]:
        """Exclude other prologs, epilogs and syncs of the same job on this node.

        With `is_shared`, those of all jobs that share a device too.

        The lock is a byte of a file beside agentd's socket, which ends with the process.
        """
        path = Path(self._socket).with_name("slurm.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for start in (SHARED, job_id) if is_shared else (job_id,):
                fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, start)
            yield
        finally:
            with suppress(OSError):
                os.close(descriptor)
