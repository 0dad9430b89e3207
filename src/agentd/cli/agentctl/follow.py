"""The commands `agentctl logs` and `agentctl wait`: what goes on in kernels, until it is over."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import OUT_OF_TIME, for_each
from agentd.cli.output import say
from agentd.client import Client
from agentd.errors import AgentdError, UnknownKernel

_LOOK_PAUSE_S = 0.2
_Lines: TypeAlias = "queue.SimpleQueue[bytes | AgentdError | None]"
ENDED = ("terminated", "failed", "lost")


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until the kernels end.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines.")
@click.option("--since", metavar="TIME", help="Only lines since 2026-11-21T12:00:00Z.")
@click.option(
    "--timestamps", "-t", is_flag=True, help="Start each line with the time it was printed."
)
@click.option("--stream", type=click.Choice(["both", "stdout", "stderr"]), help="Default: both.")
@click.pass_obj
def logs(client: Client, /, kernels: Sequence[str], **options: Any) -> None:
    """Print the output of kernels.

    Of several kernels, each line begins with the kernel's name.

    \b
    agentctl logs -f train-1
    agentctl logs --tail 20 train-1 train-2
    """
    wanted = {name: value for name, value in options.items() if value or value == 0}
    output = sys.stdout.buffer
    if len(kernels) == 1:
        for chunk in client.logs(kernels[0], **wanted):
            output.write(chunk)
            output.flush()
        return
    for line in _together(client, kernels, wanted):
        output.write(line)
        output.flush()


def _together(client: Client, kernels: Sequence[str], wanted: dict[str, Any]) -> Iterator[bytes]:
    """Yield the lines of several logs as they come, led by their kernels' completion.

    Raises:
        AgentdError: one cannot be read; the first that was met.
    """
    lines: _Lines = queue.SimpleQueue()
    widest = max(map(len, kernels))
    for kernel in kernels:
        lead = f"{kernel:{widest}} | ".encode()
        chunks = client.logs(kernel, **wanted)
        threading.Thread(target=_read, args=(chunks, lead, lines), daemon=True).start()
    failed: AgentdError | None = None
    left = len(kernels)
    while left:
        item = lines.get()
        if isinstance(item, bytes):
            yield item
        else:
            left -= 1
            failed = failed or item
    if failed is not None:
        raise failed


def _read(chunks: Iterator[bytes], lead: bytes, lines: _Lines) -> None:
    """Put the lines of one log, and at its end None, or why it cannot be read."""
    rest, outcome = b"", None
    try:
        for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put(lead + line + b"\n")
    except AgentdError as error:
        outcome = error
    finally:
        if rest:
            lines.put(lead + rest + b"\n")
        lines.put(outcome)


@click.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@click.option(
    "--for",
    "wanted",
    default="ended",
    show_default=True,
    type=click.Choice(["ended", "running", "removed", *ENDED]),
    help="What to wait for.",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds; then exit status 3.")
@click.pass_obj
def wait(client: Client, kernels: Sequence[str], wanted: str, timeout: float | None) -> None:
    """Wait for a state of kernels.

    Exit status: 0 all are there, 1 one can never be, 3 out of time.

    \b
    agentctl wait train-1
    agentctl wait --for running --timeout 60 train-1 train-2
    """
    end = None if timeout is None else time.monotonic() + timeout
    waiting, failed = list(dict.fromkeys(kernels)), False

    def look(kernel: str) -> None:
        if _is_there(client, kernel, wanted):
            waiting.remove(kernel)
            say(kernel)

    while waiting:
        for kernel in tuple(waiting):
            if for_each([kernel], look):
                waiting.remove(kernel)
                failed = True
        if waiting and end is not None and time.monotonic() > end:
            say(f"agentctl: not {wanted}: {', '.join(waiting)}", err=True)
            sys.exit(OUT_OF_TIME)
        if waiting:
            time.sleep(_LOOK_PAUSE_S)
    sys.exit(failed)


def _is_there(client: Client, kernel: str, wanted: str) -> bool:
    """Tell whether a kernel is where it is waited for.

    Raises:
        AgentdError: it is not there, or the daemon does not answer.
        ClickException: it cannot come there any more.
    """
    try:
        state = client.kernel(kernel)["state"]
    except UnknownKernel:
        if wanted == "removed":
            return True
        raise
    if state in ENDED and wanted not in ("removed", "ended", state):
        raise click.ClickException(f"{kernel} is {state}, and will not be {wanted} any more")
    return wanted == state or (wanted == "ended" and state in ENDED)
