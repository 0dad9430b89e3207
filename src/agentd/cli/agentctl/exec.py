"""The command `agentctl exec`: a command in a kernel, on the caller's terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import CommandLine, pairs
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.defaults import CHUNK
from agentd.client.paths import api_path
from agentd.concurrency import start_call
from agentd.core.kernel.exec_spec import STDERR
from agentd.errors import AgentdError, Unreachable
from agentd.program.exit_status import ExitStatus

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient
    from agentd.client.exec import Execution

FORWARDED_SIGNALS = ("INT", "TERM", "QUIT", "USR1", "USR2")
ENDING_SIGNALS = ("INT", "TERM", "QUIT")
RESPONSE_TIMEOUT_S = 5.0
"""Seconds without a sign of life of the daemon, after one of these, that end the exec."""


@click.command("exec", cls=CommandLine)
@click.argument("kernel", shell_complete=completion.kernels)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--interactive", "-i", is_flag=True, help="Forward standard input.")
@click.option("--tty", "-t", "is_terminal", is_flag=True, help="Allocate a terminal.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment variable.")
@click.option("--workdir", help="Working directory.")
@click.pass_obj
def exec_in_kernel(
    client: Client,
    kernel: str,
    command: Sequence[str],
    interactive: bool,
    is_terminal: bool,
    env: Sequence[str],
    workdir: str | None,
    node: str | None = None,
) -> None:
    """Run a command in a kernel.

    The command has the namespaces, limits and devices of the kernel. Options end at its first word.

    Exit status: the command's; 130 if agentctl was interrupted.

    \b
    agentctl exec train-1 -- nvidia-smi
    agentctl exec -it train-1 -- bash
    """
    options = {"tty": is_terminal, "env": pairs(env), "working_dir": workdir, "node": node}
    try:
        running = _run_exec(client.asynchronous(), kernel, command, interactive, options)
        sys.exit(asyncio.run(running))
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit(ExitStatus.INTERRUPTED)


async def _run_exec(
    client: AsyncClient,
    kernel: str,
    command: Sequence[str],
    is_interactive: bool,
    options: dict[str, Any],
) -> int:
    is_terminal = options["tty"]
    async with client, client.exec(kernel, command, **options) as running:
        is_raw = is_terminal and is_interactive and sys.stdin.isatty()
        with _raw_mode() if is_raw else contextlib.nullcontext():
            exec_task = asyncio.current_task()
            assert exec_task is not None  # noqa: S101 - it is one
            is_served = partial(_is_served, client, kernel, running)
            signals = _forward_signals(running, exec_task, is_served, is_terminal=is_terminal)
            tasks = [asyncio.create_task(signals)]
            if is_interactive:
                tasks.append(asyncio.create_task(_forward_input(running)))
            else:
                await running.close_input()
            try:
                async for stream, data in running:
                    output = sys.stderr if stream == STDERR else sys.stdout
                    write = start_call("the output", partial(_write_all, output.fileno(), data))
                    await asyncio.wrap_future(write)
            finally:
                for task in tasks:
                    task.cancel()
    return running.exit_code or 0


def _write_all(descriptor: int, data: bytes) -> None:
    """Write output in a thread that no end waits for: its reader may never come."""
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Switch the caller's terminal to raw mode."""
    attributes = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin, termios.TCSADRAIN)  # keeps input typed ahead
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)


async def _forward_input(running: Execution) -> None:
    """Forward standard input."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        """Read in a thread, which works for a terminal, a pipe and a file alike."""
        while True:
            chunk = os.read(sys.stdin.fileno(), CHUNK)
            asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            if not chunk:
                return

    threading.Thread(target=read, daemon=True).start()  # not joined: a key may never come
    while chunk := await chunks.get():
        await running.write(chunk)
    await running.close_input()


async def _forward_signals(
    running: Execution,
    exec_task: asyncio.Task[int],
    is_served: Callable[[], Awaitable[bool]],
    *,
    is_terminal: bool,
) -> None:
    """Forward the terminal's size and signals.

    A second one that cannot be sent, or a daemon that does not answer one, ends the exec.
    """
    loop, names = asyncio.get_running_loop(), asyncio.Queue[str]()

    def on_signal(name: str) -> None:
        if name in ENDING_SIGNALS and not names.empty():  # an earlier signal is not sent yet
            exec_task.cancel()
        names.put_nowait(name)

    for name in ("WINCH", *FORWARDED_SIGNALS):
        loop.add_signal_handler(signal.Signals[f"SIG{name}"], on_signal, name)
    names.put_nowait("WINCH")
    async with asyncio.TaskGroup() as checks:
        while True:
            name = await names.get()
            if name != "WINCH":
                await running.send_signal(name)
                if name in ENDING_SIGNALS:
                    checks.create_task(_cancel_unless(is_served, exec_task))
            elif is_terminal and sys.stdout.isatty():
                size = shutil.get_terminal_size()
                await running.resize(size.columns, size.lines)


async def _cancel_unless(
    is_served: Callable[[], Awaitable[bool]], exec_task: asyncio.Task[int]
) -> None:
    if not await is_served():
        exec_task.cancel()


async def _is_served(client: AsyncClient, kernel: str, running: Execution) -> bool:
    """Return whether the daemon gives a sign of life.

    No frame is read while the caller does not take the output; then the daemon is asked.
    """
    if await running.has_frame(RESPONSE_TIMEOUT_S):
        return True
    if running.is_reading:
        return False
    try:
        await client.execute(Call("GET", api_path("kernels", kernel)), timeout_s=RESPONSE_TIMEOUT_S)
    except AgentdError as refusal:
        return not isinstance(refusal, Unreachable)
    return True
