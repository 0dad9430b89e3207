"""Calls to agentd, repeated until a deadline while it does not answer.

Each job starts hooks, so this speaks HTTP itself: the client library takes longer to import than a
hook takes for all of its calls. Paths, pages and errors are those of the library.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from agentd.client.calls import Call, label_parameters
from agentd.client.defaults import DEFAULT_SOCKET
from agentd.client.errors import error_from_response, parse_content, unreachable_error
from agentd.client.paths import api_path
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
"""Stands for a job in the lock: the shared devices of all jobs."""
FIRST_ERROR = 300
"""The lowest status of an answer that is not a success."""
SOCKET_VARIABLE = "AGENTD_SOCKET"


def socket_path() -> str:
    """Return the path of agentd's socket."""
    return os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET


class NodeClient:
    """The engine's calls to agentd; `wait_s` bounds each call and its repeats."""

    def __init__(self, socket: str, wait_s: float = ANSWER_S) -> None:
        self._socket = socket
        self._wait_s = wait_s

    def _call(self, call: Call[T], wait_s: float | None = None) -> T:
        """Make a call and return its answer, all pages of a list.

        Raises:
            AgentdError: agentd refused, or did not answer in time (`Unavailable`).
        """
        deadline = time.monotonic() + (wait_s or self._wait_s)
        while True:
            try:
                answer, page = self._exchange(call, deadline)
                while page is not None:
                    part, page = self._exchange(page, deadline)
                    answer += part
            except Unavailable:
                if time.monotonic() + PAUSE_S > deadline:
                    raise
                time.sleep(PAUSE_S)
            else:
                return cast("T", answer)

    def _exchange(self, call: Call[T], deadline: float) -> tuple[Any, Call[T] | None]:
        """Return the content of an answer, and the call for the next page if there is one."""
        body = b"" if call.body is None else json.dumps(call.body).encode()
        head = f"{call.method} {call.path} HTTP/1.1\r\nHost: agentd\r\nConnection: close\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(max(deadline - time.monotonic(), PAUSE_S))
                connection.connect(self._socket)
                connection.sendall(f"{head}\r\n".encode() + body)
                with connection.makefile("rb") as file:
                    answer = file.read()
            front, is_whole, content = answer.partition(b"\r\n\r\n")
            first, *lines = front.decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            if not is_whole or len(content) < int(headers.get("content-length", "0")):
                raise OSError(0, "the answer is cut off")
            status = int(first.split()[1])
        except (OSError, ValueError, IndexError) as error:
            raise unreachable_error(self._socket, error) from None
        if status >= FIRST_ERROR:
            raise error_from_response(status, content, headers.get("retry-after"))
        return parse_content(content), call.next_page(headers.get("link"))

    def devices(self) -> Sequence[Mapping[str, Any]]:
        """Return the devices of the node."""
        return self._call(Call("GET", api_path("devices"), is_paged=True))

    def claims(self) -> Sequence[Mapping[str, Any]]:
        """Return every claim."""
        return self._call(Call("GET", api_path("claims"), is_paged=True))

    def kernels(self) -> Sequence[Mapping[str, Any]]:
        """Return every kernel."""
        return self._call(Call("GET", api_path("kernels"), is_paged=True))

    def claims_of(self, job_id: int) -> list[Mapping[str, Any]]:
        """Return the claims that were made for a job."""
        path = api_path("claims", label=label_parameters(labels_of(job_id)))
        rows: Sequence[Mapping[str, Any]] = self._call(Call("GET", path, is_paged=True))
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
                self._create(agent, body)
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
            self._create(agent, request)
        except ClaimConflict:  # one that sync made, as observed
            call: Call[Mapping[str, Any]] = Call("GET", api_path("claims", request["claim_id"]))
            claim = self._call(call)
            if not is_shared_claim(claim) or claim["agent_id"] != agent:
                raise

    def _create(self, agent: str, request: Mapping[str, Any]) -> None:
        self._call(Call("POST", api_path("agents", agent, "claims"), request))

    def release_id(self, claim_id: str) -> None:
        """Release a claim that may have ended."""
        with suppress(UnknownClaim):
            self._call(Call("DELETE", api_path("claims", claim_id)))

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
        path = api_path("kernels", kernel_id, timeout=STOP_S)
        try:
            with suppress(UnknownKernel):
                self._call(Call("DELETE", path), wait_s=self._wait_s + 2 * STOP_S)
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
