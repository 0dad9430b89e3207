"""The command `agentctl run`: one kernel as if it were a command of the caller's shell."""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, TypeAlias

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.create import (
    RECONNECT_TIMEOUT_S,
    create_repeatedly,
    explaining_refusal,
    kernel_body,
    kernel_options,
    print_decision,
)
from agentd.cli.agentctl.follow import ENDED_STATES, STARTING_STATES
from agentd.cli.agentctl.options import CommandLine, RpcProblem, member_option, suggesting_agents
from agentd.cli.output import os_error_text, print_text
from agentd.client import Client
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    KernelConflict,
    Unavailable,
    UnknownKernel,
    Unreachable,
)
from agentd.program.exit_status import SIGNALLED, ExitStatus
from agentd.views import KernelView

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSE_S = 0.2
RUN_LABEL = "agentctl.run"
"""Label with a random number for each run, so that no other run's create is the same request."""
_Event: TypeAlias = "signal.Signals | KernelView | AgentdError"


@click.command(cls=CommandLine)
@click.argument("agent", shell_complete=completion.agents)
@kernel_options
@member_option("--claim")
@click.option("--rm", "removes", is_flag=True, help="Delete the kernel when it ends.")
@click.pass_obj
def run(client: Client, /, agent: str, removes: bool, **options: Any) -> None:
    """Run a kernel and wait for its end.

    Options end at the first word of COMMAND. Prints the kernel's output as it appears. INT, TERM
    and HUP stop the kernel; a second signal kills it. A restart of the daemon affects neither. Only
    the kernel of this run is stopped or deleted; its label "agentctl.run" identifies it. With
    --dry-run, prints the decision and runs nothing.

    Exit status: the kernel's; 125 it was not created or was lost, 126 the command cannot be
    executed, 127 the command does not exist. With --dry-run: 0 it would be created, 1 it would not.

    \b
    agentctl run agent-1 -s cuda.device=1 --rm -- nvidia-smi
    agentctl run agent-1 --claim slurm-17 --rm -- ./train
    """
    body = {"kernel_id": f"k-{uuid.uuid4().hex[:12]}", "labels": {}, **kernel_body(options)}
    if RUN_LABEL in body["labels"]:
        raise click.UsageError(f"duplicate name {RUN_LABEL}")
    body["labels"][RUN_LABEL] = os.urandom(8).hex()
    if "claim" in body:
        body["keep_claim"] = True
    if options["dry_run"]:
        with explaining_refusal(), suggesting_agents(client, agent):
            print_decision(client.explain(agent, body))
        return
    sys.exit(Run(client, agent, body).until_end(removes=removes))


class Run:
    """One kernel, from its create to its end.

    Threads create it, follow it and stop it, so that a signal is taken at any time. A kernel is
    stopped or deleted only after an answer with this run's label: its id may be another's.
    """

    def __init__(self, client: Client, agent: str, body: Mapping[str, Any]) -> None:
        self._client = client
        self._agent = agent
        self._body = body
        self._kernel_id = str(body["kernel_id"])
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._is_created: bool | None = None
        """None until the outcome of the create is known."""
        self._signalled = threading.Event()

    def until_end(self, *, removes: bool) -> int:
        """Run the kernel, and return the exit status."""
        for number in FORWARDED:
            signal.signal(number, lambda number, _: self._events.put(signal.Signals(number)))
        self._start(self._create_and_follow)
        try:
            return self._status()
        finally:
            if removes and self._is_created is not None:
                self._remove()

    def _status(self) -> int:
        signals: list[signal.Signals] = []
        deadline = math.inf
        while True:
            is_bounded = signals and self._is_created is None
            remaining_s = max(0.0, deadline - time.monotonic()) if is_bounded else None
            try:
                event = self._events.get(timeout=remaining_s)
            except queue.Empty:
                if self._is_created is not None:
                    continue
                event = Unreachable("its create was not answered")
            match event:
                case signal.Signals() as number:
                    self._signalled.set()
                    deadline = min(deadline, time.monotonic() + RECONNECT_TIMEOUT_S)
                    signals.append(number)
                    self._start(self._forward, 0.0 if len(signals) > 1 else None)
                case AgentdError() as error:
                    is_gone = isinstance(error, UnknownKernel) or not self._is_created
                    if signals and is_gone:  # the signal cancelled its create
                        if isinstance(error, Unavailable):
                            print_text(
                                f"agentctl: kernel {self._kernel_id} may exist: {error}", err=True
                            )
                        return SIGNALLED + signals[0]
                    RpcProblem.of(error).show()
                    return _status_of(error)
                case kernel:
                    if kernel["exit_code"] is None:
                        print_text(
                            f"agentctl: kernel {self._kernel_id} is {kernel['state']}", err=True
                        )
                        return ExitStatus.CLIENT_FAILED
                    return kernel["exit_code"]

    def _start(self, act: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        thread.start()
        return thread

    def _create_and_follow(self) -> None:
        event: _Event
        try:
            create_repeatedly(self._create, self._signalled.wait)
            self._is_created = True
            streams = [self._start(self._follow, *item) for item in self._outputs().items()]
            event = self._ended()
            for stream in streams:
                stream.join()
        except AgentdError as error:
            self._is_created = bool(self._is_created)
            event = error
        self._events.put(event)

    def _outputs(self) -> Mapping[str, BinaryIO]:
        """Return where each stream is printed; a runtime that joins the two has one."""
        apart = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        while True:
            try:
                for _ in self._client.logs(self._kernel_id, tail=0, stream="stdout"):
                    pass
            except InvalidRequest:
                return {"both": sys.stdout.buffer}
            except Unavailable:
                time.sleep(PAUSE_S)
            else:
                return apart

    def _create(self) -> None:
        """Create the kernel; after a signal, only look for one whose answer was lost.

        Raises:
            AgentdError: it was refused, or was not answered.
        """
        if not self._signalled.is_set():
            self._client.create_kernel(self._agent, self._body)
            return
        while self._own_kernel()["state"] in STARTING_STATES:
            time.sleep(PAUSE_S)

    def _own_kernel(self) -> KernelView:
        """Return the kernel that this run created.

        Raises:
            UnknownKernel: it does not exist, or another request created the kernel of this id.
        """
        kernel = self._client.kernel(self._kernel_id)
        if kernel["labels"].get(RUN_LABEL) != self._body["labels"][RUN_LABEL]:
            raise UnknownKernel(f"another request created kernel {self._kernel_id}")
        return kernel

    def _ended(self) -> KernelView:
        """Wait for the end of the kernel, also while the daemon is away.

        Raises:
            UnknownKernel: it was removed, or replaced by another one.
        """
        while True:
            with suppress(Unavailable):
                kernel = self._own_kernel()
                if kernel["state"] in ENDED_STATES:
                    return kernel
            time.sleep(PAUSE_S)

    def _follow(self, stream: str, output: BinaryIO) -> None:
        """Print one stream to its end; after a lost connection, what was not printed yet."""
        printed = 0
        while True:
            skipped = 0
            try:
                for chunk in self._client.logs(self._kernel_id, follow=True, stream=stream):
                    rest = chunk[max(0, printed - skipped) :]
                    skipped += len(chunk)
                    printed += len(rest)
                    output.write(rest)
                    output.flush()
                if self._own_kernel()["state"] in ENDED_STATES:
                    return
            except Unavailable:
                pass
            except AgentdError:
                return
            except OSError as error:
                print_text(f"agentctl: {os_error_text(error)}", err=True)
                return
            time.sleep(PAUSE_S)

    def _forward(self, timeout: float | None) -> None:
        """Stop the kernel, or cancel its create; one that is not there yet is waited for."""
        while True:
            try:
                if self._own_kernel()["state"] in STARTING_STATES:
                    self._client.delete_kernel(self._kernel_id, timeout)
                else:
                    self._client.stop_kernel(self._kernel_id, timeout)
            except UnknownKernel:
                if self._is_created is not None:
                    return
            except (KernelConflict, Unavailable):  # it started meanwhile, or the daemon is away
                pass
            except AgentdError:
                return
            else:
                return
            time.sleep(PAUSE_S)

    def _remove(self) -> None:
        end = time.monotonic() + RECONNECT_TIMEOUT_S
        while time.monotonic() < end:
            try:
                self._own_kernel()
                self._client.delete_kernel(self._kernel_id, 0.0)
            except (KernelConflict, Unavailable):  # of an unresolved create, or a daemon away
                time.sleep(PAUSE_S)
            except AgentdError:
                return
            else:
                return
        print_text(f"agentctl: kernel {self._kernel_id} was not removed", err=True)


def _status_of(error: AgentdError) -> int:
    if not isinstance(error, CommandNotFound):
        return ExitStatus.CLIENT_FAILED
    return (
        ExitStatus.NOT_EXECUTABLE
        if "permission denied" in str(error).lower()
        else ExitStatus.NOT_FOUND
    )
