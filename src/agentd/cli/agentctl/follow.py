"""The commands `agentctl logs`, `wait`, `stop` and `rm`: kernels until their end."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    RpcProblem,
    for_each,
    kernel_row,
    print_outage,
    remove_each,
)
from agentd.cli.option_types import moment, seconds_from
from agentd.cli.output import CommandError, client_command, print_answer, print_text
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.defaults import TIMEOUT_S
from agentd.client.following import Outages
from agentd.client.paths import api_path
from agentd.errors import AgentdError, Unavailable, UnknownKernel, Unreachable
from agentd.program.command_line import ended_without_reader
from agentd.program.exit_status import ExitStatus
from agentd.program.standard_streams import write_output
from agentd.views import KernelView

_POLL_S = 0.2
MIN_TIMEOUT_S = 1.0
"""Seconds in which all kernels are asked once, however short `--timeout` is."""
MAX_LINE = 64 << 20
"""Bytes of a line that several logs are printed with; a longer one is cut."""
MAX_QUEUED = 16
"""Parts of logs that are read before the earlier ones are printed."""
_Output: TypeAlias = "queue.Queue[bytes | BaseException | None]"
STARTING_STATES = ("preparing", "pulling", "creating")
ENDED_STATES = ("terminated", "failed", "lost")


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until the kernels end.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines.")
@click.option(
    "--since",
    type=moment,
    metavar="TIME",
    help="Only lines since a time such as 2026-11-21T12:00:00Z, or of the last 10m.",
)
@click.option("--timestamps", "-t", is_flag=True, help="Start each line with its time.")
@click.option(
    "--stream",
    type=click.Choice(["both", "stdout", "stderr"]),
    help="Only one of the streams. Default: both.",
)
@click.pass_obj
@ended_without_reader()
def logs(client: Client, /, kernels: Sequence[str], **options: Any) -> None:
    """Print the output of kernels.

    With several kernels, each line begins with the kernel's id. With --follow, an agentd that
    restarts is waited for. Output that the node does not keep any more is named on standard error.

    Exit status: 0 the logs are complete, 1 one was refused, cut off or has lost output.

    \b
    agentctl logs -f train-1
    agentctl logs --tail 20 train-1 train-2
    """
    query = {name: value for name, value in options.items() if value or value == 0}
    readers = [PrintedLog(partial(client.logs, kernel, **query), kernel) for kernel in kernels]
    if len(readers) == 1:
        for chunk in readers[0].chunks():
            write_output(chunk)
    else:
        print_merged(readers)
    sys.exit(any(reader.is_incomplete for reader in readers))


class PrintedLog:
    """One log; what is missing of it is printed as an error."""

    def __init__(self, read: Callable[..., Iterator[bytes]], kernel: str) -> None:
        self.kernel = kernel
        self.is_incomplete = False
        self._read = read

    def chunks(self) -> Iterator[bytes]:
        """Yield the log as it arrives.

        Raises:
            AgentdError: it cannot be read.
        """
        return self._read(on_outage=print_outage, on_dropped=self._on_dropped)

    def _on_dropped(self, begin: int, end: int) -> None:
        self.is_incomplete = True
        text = f"lost {end - begin} bytes of the output of {self.kernel}, from byte {begin} on"
        print_text(f"agentctl: {text}", err=True)

    def queue_lines(self, prefix: bytes, output: _Output) -> None:
        """Queue the lines of the log, each after a prefix, and at the end None or an error.

        An error of this log alone is printed. A line above `MAX_LINE` is cut into several.
        """
        end: BaseException | None = None
        line: list[bytes] = []
        length = 0
        try:
            for chunk in self.chunks():
                head, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    text = b"".join([*line, head])
                    output.put(prefix + text.replace(b"\n", b"\n" + prefix) + b"\n")
                    line, length = [], 0
                line.append(rest)
                length += len(rest)
                if length > MAX_LINE:
                    output.put(prefix + b"".join(line) + b"\n")
                    line, length = [], 0
        except Unreachable as error:
            end = error
        except AgentdError as error:
            self.is_incomplete = True
            RpcProblem.of(error).show()
        except BaseException as error:  # noqa: BLE001 - the printing thread raises it
            end = error
        if length:
            output.put(prefix + b"".join(line) + b"\n")
        output.put(end)


def print_merged(readers: Sequence[PrintedLog]) -> None:
    """Print the lines of several logs as they arrive, each after its kernel's id."""
    output: _Output = queue.Queue(MAX_QUEUED)
    width = max(len(reader.kernel) for reader in readers)
    for reader in readers:
        arguments = f"{reader.kernel:{width}} | ".encode(), output
        threading.Thread(target=reader.queue_lines, args=arguments, daemon=True).start()
    open_logs = len(readers)
    while open_logs:
        item = output.get()
        if isinstance(item, bytes):
            write_output(item)
        elif item is None:
            open_logs -= 1
        else:
            raise item


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option(
    "--for",
    "target",
    default="ended",
    show_default=True,
    type=click.Choice(["ended", "running", "removed", *ENDED_STATES]),
    help="State to wait for.",
)
@click.option("--timeout", type=seconds_from(0), help="Seconds, or 10m; then exit status 3.")
@click.pass_obj
@ended_without_reader()
def wait(client: Client, kernels: Sequence[str], target: str, timeout: float | None) -> None:
    """Wait until kernels reach a state.

    Prints each kernel that reached it. An agentd that restarts is waited for.

    Exit status: 0 all reached it, 1 one never will, 3 timed out.

    \b
    agentctl wait train-1
    agentctl wait --for running --timeout 60 train-1 train-2
    """
    began = time.monotonic()
    deadline = math.inf if timeout is None else began + timeout
    last_call = max(deadline, began + MIN_TIMEOUT_S)
    pending, failed = dict.fromkeys(kernels), False
    outages = Outages(print_outage)
    while pending:
        pause_s = _POLL_S
        has_failed, outage = _check_each(client, pending, target, last_call)
        failed = failed or has_failed
        if outage is None:
            outages.on_answer()
        else:
            pause_s = outages.pause_s(outage)
        if pending and time.monotonic() > deadline:
            print_text(f"agentctl: not {target}: {', '.join(pending)}", err=True)
            sys.exit(ExitStatus.TIMED_OUT)
        if pending:
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
    sys.exit(failed)


def _check_each(
    client: Client, pending: dict[str, None], target: str, last_call: float
) -> tuple[bool, Unavailable | None]:
    """Drop the kernels that need not be waited for; return whether one failed, and an outage."""
    failed, outage = False, None

    def check(kernel: str) -> None:
        nonlocal outage
        try:
            if not _has_reached(client, kernel, target, last_call):
                return
        except Unavailable as error:
            outage = error
            return
        del pending[kernel]
        print_text(kernel)

    for kernel in tuple(pending):
        if isinstance(outage, Unreachable) or time.monotonic() > last_call:
            break
        if for_each([kernel], check):
            del pending[kernel]
            failed = True
    return failed, outage


def _has_reached(client: Client, kernel: str, target: str, last_call: float) -> bool:
    """Return whether a kernel has the wanted state.

    Raises:
        AgentdError: the kernel is unknown or the daemon is unreachable.
        CommandError: the kernel can no longer reach the state.
    """
    call: Call[KernelView] = Call("GET", api_path("kernels", kernel))
    timeout_s = max(0.001, min(TIMEOUT_S, last_call - time.monotonic()))
    try:
        state = client.execute(call, timeout_s=timeout_s)["state"]
    except UnknownKernel:
        if target == "removed":
            return True
        raise
    if state in ENDED_STATES and target not in ("removed", "ended", state):
        raise CommandError(f"{kernel} is {state}, and will not be {target} any more")
    return target == state or (target == "ended" and state in ENDED_STATES)


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option("--timeout", type=seconds_from(0), help="Seconds between TERM and KILL.")
@client_command
def stop(client: Client, kernels: Sequence[str], timeout: float | None) -> None:
    """Stop kernels; they stay listed."""
    ended: list[KernelView] = []
    failed = for_each(kernels, lambda kernel: ended.append(client.stop_kernel(kernel, timeout)))
    if ended:
        print_answer(ended if len(kernels) > 1 else ended[0], KERNEL_COLUMNS, kernel_row)
    sys.exit(failed)


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option("--timeout", type=seconds_from(0), help="Seconds between TERM and KILL.")
@client_command
def rm(
    client: Client, kernels: Sequence[str], timeout: float | None, node: str | None = None
) -> None:
    """Stop and remove kernels."""
    remove_each(kernels, lambda kernel: client.delete_kernel(kernel, timeout, node))
