"""The commands `agentctl logs`, `wait`, `stop` and `rm`: kernels until their end."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import KERNEL_COLUMNS, for_each, kernel_row, remove_each
from agentd.cli.option_types import moment, seconds_from
from agentd.cli.output import CommandError, client_command, print_answer, print_text
from agentd.client import Client
from agentd.errors import AgentdError, RuntimeUnavailable, UnknownKernel
from agentd.program.exit_status import ExitStatus
from agentd.views import KernelView

_POLL_S = 0.2
_Lines: TypeAlias = "queue.SimpleQueue[bytes | AgentdError | None]"
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
def logs(client: Client, /, kernels: Sequence[str], **options: Any) -> None:
    """Print the output of kernels.

    With several kernels, each line begins with the kernel's id.

    Exit status: 0 the logs are complete, 1 one was refused or cut off.

    \b
    agentctl logs -f train-1
    agentctl logs --tail 20 train-1 train-2
    """
    query = {name: value for name, value in options.items() if value or value == 0}
    is_one = len(kernels) == 1
    chunks = client.logs(kernels[0], **query) if is_one else _merge_logs(client, kernels, query)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _merge_logs(client: Client, kernels: Sequence[str], query: dict[str, Any]) -> Iterator[bytes]:
    """Yield the lines of several logs as they arrive, each after its kernel's id.

    Raises:
        AgentdError: a log cannot be read; the first such error, after all logs ended.
    """
    lines: _Lines = queue.SimpleQueue()
    width = max(map(len, kernels))
    for kernel in kernels:
        prefix = f"{kernel:{width}} | ".encode()
        chunks = client.logs(kernel, **query)
        threading.Thread(target=_queue_lines, args=(chunks, prefix, lines), daemon=True).start()
    first_error: AgentdError | None = None
    open_logs = len(kernels)
    while open_logs:
        item = lines.get()
        if isinstance(item, bytes):
            yield item
        else:
            open_logs -= 1
            first_error = first_error or item
    if first_error is not None:
        raise first_error


def _queue_lines(chunks: Iterator[bytes], prefix: bytes, lines: _Lines) -> None:
    """Queue the lines of one log, and at its end None or the error."""
    partial_line = b""
    outcome: AgentdError | None = RuntimeUnavailable("a log was not read to its end")
    try:
        for chunk in chunks:
            *complete_lines, partial_line = (partial_line + chunk).split(b"\n")
            for line in complete_lines:
                lines.put(prefix + line + b"\n")
        outcome = None
    except AgentdError as error:
        outcome = error
    finally:
        if partial_line:
            lines.put(prefix + partial_line + b"\n")
        lines.put(outcome)


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
def wait(client: Client, kernels: Sequence[str], target: str, timeout: float | None) -> None:
    """Wait until kernels reach a state.

    Prints each kernel that reached it.

    Exit status: 0 all reached it, 1 one never will, 3 timed out.

    \b
    agentctl wait train-1
    agentctl wait --for running --timeout 60 train-1 train-2
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    pending, failed = dict.fromkeys(kernels), False

    def check(kernel: str) -> None:
        if _has_reached(client, kernel, target):
            del pending[kernel]
            print_text(kernel)

    while pending:
        for kernel in tuple(pending):
            if for_each([kernel], check):
                del pending[kernel]
                failed = True
        if pending and time.monotonic() > deadline:
            print_text(f"agentctl: not {target}: {', '.join(pending)}", err=True)
            sys.exit(ExitStatus.TIMED_OUT)
        if pending:
            time.sleep(_POLL_S)
    sys.exit(failed)


def _has_reached(client: Client, kernel: str, target: str) -> bool:
    """Return whether a kernel has the wanted state.

    Raises:
        AgentdError: the kernel is unknown or the daemon is unreachable.
        CommandError: the kernel can no longer reach the state.
    """
    try:
        state = client.kernel(kernel)["state"]
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
