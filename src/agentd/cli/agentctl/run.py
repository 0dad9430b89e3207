"""The command `agentctl run`: one kernel as if it were a command of the caller's shell.

The main thread takes signals and waits for events, nothing else: calls and writes, which may not
return, have threads of their own. So a signal has its effect at any time, and the third one that
asks for an end ends the program whatever is in progress.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import select
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeAlias

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.create import (
    explaining_refusal,
    kernel_body,
    kernel_options,
    print_decision,
)
from agentd.cli.agentctl.follow import ENDED_STATES, STARTING_STATES
from agentd.cli.agentctl.options import (
    RUNS_NOTHING,
    CommandLine,
    RpcProblem,
    listed,
    member_option,
    pairs,
    stand_in_status,
    suggesting_agents,
)
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.creates import CreateAttempts, kernel_request
from agentd.client.defaults import CREATE_TIMEOUT_S
from agentd.client.following import Outages
from agentd.client.paths import api_path
from agentd.concurrency import start_call
from agentd.core.printable import printable
from agentd.errors import (
    AgentdError,
    AnswerLost,
    InvalidRequest,
    KernelConflict,
    NotReady,
    Unavailable,
    UnknownKernel,
    Unreachable,
)
from agentd.program.command_line import ENDING_SIGNALS, handled_signals
from agentd.program.exit_status import SIGNALLED, ExitStatus
from agentd.program.standard_streams import OutputFailed, has_left, is_pipe, is_ready, write_all
from agentd.views import KernelView

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
FORWARDED = (*ENDING_SIGNALS, *USER_SIGNALS)
"""Of those that ask for an end, the first is passed on, the second kills, the third leaves."""
STREAMS = {"stdout": 1, "stderr": 2}
PAUSE_S, WATCH_S = 0.2, 2.0
RECONNECT_TIMEOUT_S = 15.0
"""Seconds for which a daemon that does not answer is asked again."""
HANGUP_TIMEOUT_S = 1.0
"""Seconds between the loss of a terminal and the HUP that tells of it."""
RUN_LABEL = "agentctl.run"
"""Label with the attempt of a run: a kernel without it is another's, whatever its id is."""
_Event: TypeAlias = "signal.Signals | KernelView | BaseException"


@click.command(cls=CommandLine, stands_in=True)
@click.argument("agent", shell_complete=completion.agents)
@kernel_options
@member_option("--claim")
@click.option("--rm", "removes", is_flag=True, help="Delete the kernel when it ends.")
@click.pass_obj
def run(client: Client, /, agent: str, removes: bool, **options: Any) -> None:
    """Run a kernel and wait for its end.

    Options end at the first word of COMMAND. Prints the kernel's output as it appears. The kernel
    has no standard input: one that has data is refused. A restart of the daemon does not affect the
    kernel. Only the kernel of this run is stopped or deleted; its label "agentctl.run" identifies
    it. With --dry-run, prints the decision and runs nothing.

    INT, HUP, QUIT, USR1 and USR2 are passed on to the kernel's first process, TERM stops the
    kernel. A second signal, but for USR1 and USR2, kills it. A third one ends agentctl at once. A
    signal that was ignored at the start, as by nohup, stays ignored.

    Exit status: the kernel's; 125 it was not created or was lost, 126 the command cannot be
    executed, 127 the command does not exist, 74 the output cannot be written and the kernel runs
    on, 141 the reader of the output left and the kernel was stopped. With --dry-run: 0 it would be
    created, 1 it would not.

    \b
    agentctl run agent-1 -s cuda.device=1 --rm -- nvidia-smi
    agentctl run agent-1 --claim slurm-17 --rm -- ./train

    In a task of a Slurm job, --claim "$AGENTD_CLAIM" takes the GPUs that Slurm gave to the task.
    """
    if stdin_has_data():
        raise click.UsageError("a kernel has no standard input: add < /dev/null, or mount a file")
    attempt = os.urandom(8).hex()
    body = kernel_request({"attempt": attempt, "labels": {}, **kernel_body(options)})
    if RUN_LABEL in body["labels"]:
        raise click.UsageError(f"duplicate name {RUN_LABEL}")
    body["labels"][RUN_LABEL] = attempt
    if "claim" in body:
        body["keep_claim"] = True
        add_own_devices(body, os.environ)
    if removes:
        body["remove"] = True
    if options["dry_run"]:
        click.get_current_context().meta[RUNS_NOTHING] = True
        with explaining_refusal(), suggesting_agents(client, agent):
            print_decision(client.explain(agent, body))
        return
    sys.exit(Run(client, agent, body).until_end())


def add_own_devices(body: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Name the devices of this task of a Slurm job: others of its claim are other tasks'.

    The task prolog sets the variables. A request that names devices, or amounts of them, stays.
    """
    if body["claim"] != environ.get("AGENTD_CLAIM") or "devices" in body:
        return
    slots = pairs(environ.get("AGENTD_SLOTS", "").split())
    if slots and not slots.keys() & body.get("slots", {}).keys():
        body["slots"] = {**slots, **body.get("slots", {})}
        body["devices"] = listed(environ.get("AGENTD_DEVICES", "").split())


def stdin_has_data() -> bool:
    """Return whether a file, pipe or socket on standard input has bytes; a terminal never has."""
    try:
        descriptor = sys.stdin.fileno()
        status = os.fstat(descriptor)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            return False
        if stat.S_ISREG(status.st_mode):
            return os.lseek(descriptor, 0, os.SEEK_CUR) < status.st_size
        is_stream = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        return is_stream and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except (OSError, ValueError):  # closed
        return False


class Run:
    """One kernel, from its create to its end.

    A kernel is stopped or deleted only after an answer with this run's label: its id may be
    another's. Its end is read after its output: a node deletes a kernel of `--rm` after that.
    """

    def __init__(self, client: Client, agent: str, body: Mapping[str, Any]) -> None:
        self._client = client
        self._agent = agent
        self._body = body
        self._kernel_id = str(body["kernel_id"])
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._is_created: bool | None = None
        """None until the outcome of the create is known."""
        self._outages = Outages(lambda error: self._tell(f"waiting for the node: {error}"))
        self._outages.on_answer()  # the create waits in a way of its own
        self._signalled, self._hung_up = threading.Event(), threading.Event()
        self._unsent: set[tuple[signal.Signals, bool]] = set()

    def until_end(self) -> int:
        """Run the kernel, and return the exit status."""
        signals: list[signal.Signals] = []
        with handled_signals(FORWARDED, self._on_signal, self._on_leave):
            self._start("the kernel", self._run_to_end)
            if is_pipe():
                self._start("the reader", self._watch_reader)
            while isinstance(event := self._events.get(), signal.Signals):
                if event == signal.SIGPIPE and event in signals:  # of both streams
                    continue
                if event not in USER_SIGNALS:
                    signals.append(event)
                    self._signalled.set()
                if event == signal.SIGHUP:
                    self._hung_up.set()
                self._forward(event, kills=len(signals) > 1)
            return self._status(event, signals)

    def _status(self, event: KernelView | BaseException, signals: list[signal.Signals]) -> int:
        """Return the exit status for the end of this run."""
        if isinstance(event, OSError):
            self._tell(f"{event}; {self._hint}")
            is_output = isinstance(event, OutputFailed)
            return ExitStatus.OUTPUT_FAILED if is_output else ExitStatus.CLIENT_FAILED
        if isinstance(event, AgentdError):
            is_gone = isinstance(event, UnknownKernel) or not self._is_created
            if not (signals and is_gone):
                problem = RpcProblem.of(event, [] if is_gone else [self._hint])
                problem.show()
                return stand_in_status(problem)
            if isinstance(event, Unavailable):  # a signal cancelled its create
                self._tell(f"kernel {self._kernel_id} may exist: {event}")
            return SIGNALLED + signals[0]
        if isinstance(event, BaseException):
            raise event
        if signal.SIGPIPE in signals:
            return SIGNALLED + signal.SIGPIPE
        if event["exit_code"] is None:
            self._tell(f"kernel {self._kernel_id} is {event['state']}")
            return ExitStatus.CLIENT_FAILED
        return event["exit_code"]

    @property
    def _hint(self) -> str:
        """Return how to get on; `wait` reads the end, after which the node deletes one of --rm."""
        name, commands = self._kernel_id, ["logs", "wait", "stop"]
        if self._body.get("remove"):
            commands.remove("wait")
        words = ", ".join(f"agentctl {command} {name}" for command in commands)
        return f"kernel {name} may run: {words}"

    def _on_signal(self, number: int) -> None:
        self._events.put(signal.Signals(number))

    def _on_leave(self) -> None:
        """Name the kernel; the line is lost if its reader takes nothing."""
        with contextlib.suppress(OSError, ValueError):
            if is_ready(sys.stderr.fileno(), select.POLLOUT, 0):
                self._tell(self._hint)

    def _tell(self, text: str) -> None:
        """Print a line to standard error, from any thread."""
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"agentctl: {printable(text)}\n".encode())

    def _start(self, subject: str, function: Callable[[], None]) -> Future[None]:
        """Start a thread, whose exception ends the run.

        Threads get no signals: one that does not reach the main thread would not wake it.
        """

        def call() -> None:
            try:
                function()
            except BaseException as error:
                self._events.put(error)
                raise

        former = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            return start_call(subject, call)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _run_to_end(self) -> None:
        """Create the kernel, print its output, read its end, and remove it.

        A kernel whose output cannot be read or printed is left: its log is the only copy.
        """
        event: _Event
        try:
            self._create_repeatedly()
        except AgentdError as error:
            self._is_created = False
            event = error
        else:
            self._is_created = True
            self._print_output()
            event = self._read_end()
        if self._body.get("remove"):
            self._remove()
        self._events.put(event)

    def _create_repeatedly(self) -> None:
        retry_s = lost_s = RECONNECT_TIMEOUT_S
        attempts = CreateAttempts(
            self._kernel_id, timeout_s=CREATE_TIMEOUT_S, retry_s=retry_s, lost_s=lost_s
        )
        with attempts.named_errors():
            while True:
                attempts.next_timeout_s()
                try:
                    return self._create()
                except Unavailable as error:
                    pause_s = attempts.pause_s(error)
                self._pause(pause_s)

    def _create(self) -> None:
        """Create the kernel; after a signal, only wait for one whose answer was lost.

        Raises:
            AgentdError: it was refused, or was not answered.
        """
        if not self._signalled.is_set():
            path = api_path("agents", self._agent, "kernels")
            call: Call[KernelView] = Call("POST", path, self._body, is_repeatable=False)
            self._client.execute(call, timeout_s=CREATE_TIMEOUT_S)
            return
        while (kernel := self._own_kernel()) and kernel["state"] in STARTING_STATES:
            time.sleep(PAUSE_S)
        if kernel is None:
            raise UnknownKernel(f"kernel {self._kernel_id} was not created")

    def _pause(self, seconds: float) -> None:
        """Wait; a signal that asks for an end cuts it short."""
        if self._signalled.wait(seconds):
            time.sleep(PAUSE_S)

    def _own_kernel(self) -> KernelView | None:
        """Return the kernel that this run created, from a list: that does not read its end."""
        label = {RUN_LABEL: self._body["labels"][RUN_LABEL]}
        return next(iter(self._client.kernels(labels=label)), None)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for a node that is away, and tell of it once."""
        try:
            yield
        except Unavailable as error:
            time.sleep(self._outages.pause_s(error))
        else:
            self._outages.on_answer()

    def _read_end(self) -> KernelView:
        """Wait for the end of the kernel, also while the daemon is away.

        Raises:
            UnknownKernel: it was removed, or replaced by another one.
        """
        while True:
            with self._waiting():
                kernel = self._client.kernel(self._kernel_id)
                if kernel["labels"].get(RUN_LABEL) != self._body["labels"][RUN_LABEL]:
                    raise UnknownKernel(f"another request created kernel {self._kernel_id}")
                if kernel["state"] in ENDED_STATES:
                    return kernel
            time.sleep(PAUSE_S)

    def _print_output(self) -> None:
        """Print the kernel's output to the end of all streams.

        It is checked that the kernel is there: its log is followed by its id.

        Raises:
            AgentdError: a stream cannot be read, or the kernel is gone.
            OutputFailed: the output cannot be printed.
        """
        follows = {
            self._start("the output", partial(self._follow, *item)) for item in STREAMS.items()
        }
        while follows:
            done, follows = wait(follows, WATCH_S, FIRST_COMPLETED)
            for follow in done:
                follow.result()
            with self._waiting():
                if follows and self._own_kernel() is None:
                    raise UnknownKernel(f"kernel {self._kernel_id} was removed")

    def _follow(self, stream: str, descriptor: int) -> None:
        """Print one stream to its end, or until its reader leaves, which stops the kernel."""
        try:
            for chunk in self._chunks(stream):
                write_all(descriptor, chunk)
        except BrokenPipeError:
            self._events.put(signal.SIGPIPE)
        except OSError as error:  # a terminal may be gone: then its HUP is passed on
            if error.errno != errno.EIO or not self._hung_up.wait(HANGUP_TIMEOUT_S):
                raise OutputFailed(error) from None

    def _chunks(self, stream: str) -> Iterator[bytes]:
        """Yield a stream; standard output has both where the runtime joins them."""
        is_begun = False
        while True:
            chunks = self._client.logs(
                self._kernel_id,
                follow=True,
                stream=stream,
                on_dropped=partial(self._on_dropped, stream),
            )
            try:
                for chunk in chunks:
                    is_begun = True
                    yield chunk
            except Unavailable:
                if is_begun:
                    raise
                time.sleep(PAUSE_S)
            except InvalidRequest:
                if stream == "both":
                    raise
                if stream == "stderr":
                    return
                stream = "both"
            else:
                return

    def _on_dropped(self, stream: str, begin: int, end: int) -> None:
        self._tell(f"bytes {begin} to {end} of {stream} of kernel {self._kernel_id} were dropped")

    def _watch_reader(self) -> None:
        """Notice that the reader of the output left, also while nothing is printed."""
        has_left(None)
        self._events.put(signal.SIGPIPE)

    def _forward(self, number: signal.Signals, *, kills: bool) -> None:
        """Pass a signal on, unless the same one is not sent yet."""
        kind = number, kills
        if kind not in self._unsent:
            self._unsent.add(kind)
            self._start(number.name, partial(self._pass_on, *kind))

    def _pass_on(self, number: signal.Signals, kills: bool) -> None:
        """Pass a signal on to the kernel; one that asks for an end cancels its create.

        A kernel that is not there yet is waited for, and so is a daemon.

        Raises:
            Unreachable: the outcome of the create stays unknown.
        """
        ends, timeout_s = number not in USER_SIGNALS, 0.0 if kills else None
        deadline = time.monotonic() + RECONNECT_TIMEOUT_S
        while True:
            is_created = self._is_created
            if ends and is_created is None and time.monotonic() > deadline:
                raise Unreachable("its create was not answered")
            with contextlib.suppress(UnknownKernel, Unavailable):
                kernel = self._own_kernel()
                if kernel is None:
                    if is_created is not None:
                        return
                elif kernel["state"] not in STARTING_STATES:
                    self._unsent.discard((number, kills))
                    self._send(number, timeout_s, kills=kills)
                    return
                elif ends:  # its create may be repeated: wait for the outcome
                    with contextlib.suppress(KernelConflict):  # it started meanwhile
                        self._client.delete_kernel(self._kernel_id, timeout_s)
            time.sleep(PAUSE_S)

    def _send(self, number: signal.Signals, timeout_s: float | None, *, kills: bool) -> None:
        """Stop the kernel, or signal it; a signal that may have arrived is not sent again."""
        is_stop = kills or number in (signal.SIGTERM, signal.SIGPIPE)
        try:
            if is_stop:
                self._client.stop_kernel(self._kernel_id, timeout_s)
            else:
                self._client.signal_kernel(self._kernel_id, number.name.removeprefix("SIG"))
        except (KernelConflict, UnknownKernel):  # it ended meanwhile
            return
        except AgentdError as error:
            is_unsent = isinstance(error, Unreachable) and not isinstance(error, AnswerLost)
            if (
                is_unsent
                or isinstance(error, NotReady)
                or (is_stop and isinstance(error, Unavailable))
            ):
                raise
            name = f"{number.name} was not passed on to kernel {self._kernel_id}, as far as known"
            self._tell(f"{name}: {error.code}: {error}")

    def _remove(self) -> None:
        deadline = time.monotonic() + RECONNECT_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(AgentdError):  # of an unresolved create, or a daemon away
                if self._own_kernel() is not None:
                    self._client.delete_kernel(self._kernel_id, 0.0)
                return
            time.sleep(PAUSE_S)
        self._tell(f"kernel {self._kernel_id} was not removed")
