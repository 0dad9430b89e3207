"""The command `agentctl exec`: a command inside a kernel, on the caller's terminal."""

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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import pairs
from agentd.client import Client
from agentd.client.defaults import CHUNK
from agentd.core.kernel.exec_spec import STDERR

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient
    from agentd.client.exec import Execution

PASSED_ON = ("INT", "TERM", "QUIT", "USR1", "USR2")
FINAL = ("INT", "TERM", "QUIT")
INTERRUPTED = 130


@click.command("exec")
@click.argument("kernel", shell_complete=completion.kernels)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--interactive", "-i", is_flag=True, help="Pass on standard input.")
@click.option("--tty", "-t", "is_terminal", is_flag=True, help="Run it on a terminal.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment variable.")
@click.option("--workdir", help="The folder in which it begins.")
@click.pass_obj
def run_inside(
    client: Client,
    kernel: str,
    command: Sequence[str],
    interactive: bool,
    is_terminal: bool,
    env: Sequence[str],
    workdir: str | None,
    node: str | None = None,
) -> None:
    """Run a command inside a kernel.

    Exit status: the command's.

    \b
    agentctl exec train-1 -- nvidia-smi
    agentctl exec -it train-1 -- bash
    """
    given = {"tty": is_terminal, "env": pairs(env), "working_dir": workdir, "node": node}
    try:
        sys.exit(asyncio.run(_run(client.asynchronous(), kernel, command, interactive, given)))
    except asyncio.CancelledError:
        sys.exit(INTERRUPTED)


async def _run(
    client: AsyncClient,
    kernel: str,
    command: Sequence[str],
    is_interactive: bool,
    given: dict[str, Any],
) -> int:
    is_terminal = given["tty"]
    async with client, client.exec(kernel, command, **given) as running:
        is_raw = is_terminal and is_interactive and sys.stdin.isatty()
        with _raw() if is_raw else contextlib.nullcontext():
            whole = asyncio.current_task()
            assert whole is not None  # noqa: S101 - it is one
            tasks = [asyncio.create_task(_pass_on(running, whole, is_terminal=is_terminal))]
            if is_interactive:
                tasks.append(asyncio.create_task(_feed(running)))
            else:
                await running.close_input()
            try:
                async for stream, data in running:
                    output = sys.stderr.buffer if stream == STDERR else sys.stdout.buffer
                    await asyncio.to_thread(_put, output, data)
            finally:
                for task in tasks:
                    task.cancel()
    return running.exit_code or 0


def _put(output: BinaryIO, data: bytes) -> None:
    output.write(data)
    output.flush()


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Have the caller's terminal pass on every key as it is."""
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def _feed(running: Execution) -> None:
    """Pass on standard input."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        """Read in a thread of its own: a terminal, a pipe and a file are alike there."""
        while True:
            chunk = os.read(sys.stdin.fileno(), CHUNK)
            asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            if not chunk:
                return

    threading.Thread(target=read, daemon=True).start()  # nobody waits for a key that never comes
    while chunk := await chunks.get():
        await running.write(chunk)
    await running.close_input()


async def _pass_on(running: Execution, whole: asyncio.Task[int], *, is_terminal: bool) -> None:
    """Pass on the size of the terminal, and signals; ones that go nowhere end all of it."""
    loop, happened = asyncio.get_running_loop(), asyncio.Queue[str]()

    def arrived(name: str) -> None:
        if name in FINAL and not happened.empty():  # an earlier one could not be sent yet
            whole.cancel()
        happened.put_nowait(name)

    for name in ("WINCH", *PASSED_ON):
        loop.add_signal_handler(signal.Signals[f"SIG{name}"], arrived, name)
    happened.put_nowait("WINCH")
    while True:
        name = await happened.get()
        if name != "WINCH":
            await running.send_signal(name)
        elif is_terminal and sys.stdout.isatty():
            size = shutil.get_terminal_size()
            await running.resize(size.columns, size.lines)
