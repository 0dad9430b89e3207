"""Calls to agentd, repeated until a deadline while it does not answer."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from agentd.client import Client, calls
from agentd.client.calls import Call
from agentd.client.defaults import DEFAULT_SOCKET
from agentd.errors import ClaimConflict, Unavailable, UnknownClaim, UnknownKernel

T = TypeVar("T")
ANSWER_S = 10.0
"""Seconds that a prolog waits for agentd: longer, and Slurm would wait with it."""
STOP_S = 5.0
"""Seconds between TERM and KILL for kernels of a job that is over."""
PAUSE_S = 0.2
SOCKET_VARIABLE = "AGENTD_SOCKET"


def socket_path() -> str:
    """Return the path of agentd's socket."""
    return os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)


class NodeClient:
    """The engine's calls to agentd; `wait_s` bounds each call and its repeats."""

    def __init__(self, socket: str, wait_s: float = ANSWER_S) -> None:
        self._socket = socket
        self._wait_s = wait_s

    def _ask(self, call: Call[T], wait_s: float | None = None) -> T:
        """Carry out a call.

        Raises:
            AgentdError: agentd refused, or did not answer in time (`Unavailable`).
        """
        end = time.monotonic() + (wait_s or self._wait_s)
        while True:
            left = max(end - time.monotonic(), PAUSE_S)
            try:
                return Client(self._socket, timeout_s=left, retry_s=left).carry_out(call)
            except Unavailable:
                if time.monotonic() + PAUSE_S > end:
                    raise
                time.sleep(PAUSE_S)

    def devices(self) -> Sequence[Mapping[str, Any]]:
        """Return the devices of the node."""
        return self._ask(calls.devices())

    def agents(self) -> list[str]:
        """Return the ids of the node's agents."""
        return [row["agent_id"] for row in self._ask(calls.agents())]

    def claims(self) -> Sequence[Mapping[str, Any]]:
        """Return every claim."""
        return self._ask(calls.claims())

    def kernels(self, claim: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Return every kernel, or those of a claim."""
        return self._ask(calls.kernels(claim=claim))

    def claim(self, claim: str) -> Mapping[str, Any]:
        """Return a claim.

        Raises:
            UnknownClaim: there is none.
        """
        return self._ask(calls.claim(claim))

    def has_claim(self, claim: str) -> bool:
        """Return whether a claim exists."""
        try:
            self.claim(claim)
        except UnknownClaim:
            return False
        return True

    def create_claim(self, agent: str, request: Mapping[str, Any]) -> None:
        """Create a claim."""
        self._ask(calls.create_claim(agent, request))

    def delete_kernels(self, claim: str) -> None:
        """Stop and delete every kernel of a claim."""
        for kernel in self.kernels(claim):
            with suppress(UnknownKernel):
                call = calls.delete_kernel(kernel["kernel_id"], STOP_S)
                self._ask(call, wait_s=self._wait_s + 2 * STOP_S)

    def release(self, claim: str) -> None:
        """Delete the kernels of a claim and release it, again while a create is in flight."""
        end = time.monotonic() + self._wait_s
        while True:
            self.delete_kernels(claim)
            try:
                with suppress(UnknownClaim):
                    self._ask(calls.release_claim(claim))
            except ClaimConflict:
                if time.monotonic() > end:
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
        with _opened(path) as descriptor:
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, job_id)
            yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.close(descriptor)
