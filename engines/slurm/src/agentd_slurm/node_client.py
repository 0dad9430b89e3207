"""Calls to agentd, repeated until a deadline while it does not answer."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentd.client import Client
from agentd.client.defaults import DEFAULT_SOCKET
from agentd.errors import ClaimConflict, Unavailable, UnknownClaim, UnknownKernel
from agentd_slurm.claim_ids import claim_ids, job_of_claim, labels_of

T = TypeVar("T")
ANSWER_S = 10.0
"""Seconds that a prolog waits for agentd: longer, and Slurm would wait with it."""
STOP_S = 5.0
"""Seconds between TERM and KILL for kernels of a job that is over."""
PAUSE_S = 0.2
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

    def delete_kernels(self, claim: Mapping[str, Any]) -> None:
        """Stop and delete every kernel of a claim."""
        for kernel in self.kernels(claim["claim_id"]):
            if kernel["agent_id"] != claim["agent_id"]:
                continue  # it ended with an earlier claim of this id
            with suppress(UnknownKernel):
                delete = partial(
                    Client.delete_kernel, kernel_id=kernel["kernel_id"], timeout=STOP_S
                )
                self._call(delete, wait_s=self._wait_s + 2 * STOP_S)

    def release(self, claim: Mapping[str, Any]) -> None:
        """Delete the kernels of a claim and release it, again while a create is in flight."""
        deadline = time.monotonic() + self._wait_s
        while True:
            self.delete_kernels(claim)
            try:
                with suppress(UnknownClaim):
                    self._call(lambda node: node.release_claim(claim["claim_id"]))
            except ClaimConflict:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)
            else:
                return

    @contextmanager
    def locked(self, job_id: int) -> Iterator[None]:
        """Exclude other prologs, epilogs and syncs of the same job on this node.

        The lock is a byte of a file beside agentd's socket, which ends with the process.
        """
        path = Path(self._socket).with_name("slurm.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, job_id)
            yield
        finally:
            with suppress(OSError):
                os.close(descriptor)
