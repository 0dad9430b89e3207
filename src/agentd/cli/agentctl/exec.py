"""The command `agentctl exec`: a command in a kernel, on the caller's terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import CommandLine, pairs
from agentd.cli.output import CommandError
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.defaults import CHUNK
from agentd.concurrency import start_call
from agentd.core.kernel.exec_spec import STDERR
from agentd.errors import AgentdError, Unreachable
from agentd.program.command_line import ENDING_SIGNALS, Signalled, handled_signals
from agentd.program.standard_streams import is_ready, write_output

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient
    from agentd.client.exec import Execution

_T = TypeVar("_T")
FORWARDED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
RESPONSE_TIMEOUT_S = 5.0
"""Seconds without an answer of the daemon, after one that asks for an end, that end the exec."""
FINAL_SIGNALS, FINAL_TIMEOUT_S = (signal.SIGHUP, signal.SIGTERM), 5.0
"""Signals that end an exec on a raw terminal, at the latest after so many seconds: shells on one
ignore TERM."""
STDIN, STDOUT, STDERR_OF_CALLER = 0, 1, 2


@click.command("exec", cls=CommandLine, stands_in=True)
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
    HUP, INT, TERM, QUIT, USR1 and USR2 are sent on to it, unless the caller ignores them. The third
    of the first four ends agentctl at once; with -it, HUP and TERM do so five seconds later. The
    command ends with agentctl.

    Exit status: the command's; 125 agentctl itself failed, 126 the command cannot be executed, 127
    it does not exist; 128 plus the number of a signal that ended agentctl.

    \b
    agentctl exec train-1 nvidia-smi -L
    agentctl exec -it train-1 bash
    """
    options = {"tty": is_terminal, "env": pairs(env), "working_dir": workdir, "node": node}
    sys.exit(asyncio.run(_run_exec(client.asynchronous(), kernel, command, interactive, options)))


async def _run_exec(
    client: AsyncClient,
    kernel: str,
    command: Sequence[str],
    is_interactive: bool,
    options: dict[str, Any],
) -> int:
    is_terminal = options["tty"]
    async with client, client.exec(kernel, command, **options) as running:
        terminal, numbers = CallerTerminal(), asyncio.Queue[int]()
        handled = (*FORWARDED_SIGNALS, signal.SIGWINCH) if is_terminal else FORWARDED_SIGNALS
        loop = asyncio.get_running_loop()
        with (
            terminal,
            handled_signals(
                handled,
                lambda number: loop.call_soon_threadsafe(numbers.put_nowait, number),
                terminal.restore,
            ),
        ):
            is_raw = is_terminal and is_interactive and os.isatty(STDIN)
            if is_raw:
                terminal.make_raw()
            if is_terminal:
                numbers.put_nowait(signal.SIGWINCH)
            signals = _forward_signals(client, running, numbers, is_raw=is_raw)
            await _print_output_beside(running, signals, _forward_input(running, is_interactive))
    return running.exit_code or 0


async def _print_output_beside(running: Execution, *works: Coroutine[Any, Any, None]) -> None:
    """Print the output to its end, beside other work, whose errors end it.

    Raises:
        BaseException: the first error of all of them.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            async for stream, data in running:
                await _call("the output", partial(write_output, data, err=stream == STDERR))
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class CallerTerminal:
    """The terminal of the caller, which has its own mode again at the end."""

    def __init__(self) -> None:
        self._attributes: list[Any] | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def make_raw(self) -> None:
        """Switch to raw mode; input that was typed ahead stays."""
        try:
            self._attributes = termios.tcgetattr(STDIN)
            tty.setraw(STDIN, termios.TCSANOW)
        except termios.error as error:
            raise CommandError(f"the terminal cannot be used: {error.args[-1]}") from None

    def restore(self) -> None:
        """Restore the mode, without waiting for a terminal that takes no output."""
        if self._attributes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(STDIN, termios.TCSANOW, self._attributes)


def _call(subject: str, function: Callable[[], _T]) -> asyncio.Future[_T]:
    """Call a function in a thread that no end waits for: a key or a reader may never come."""
    return asyncio.wrap_future(start_call(subject, function))


async def _forward_input(running: Execution, is_interactive: bool) -> None:
    """Forward standard input to its end."""
    with contextlib.suppress(ConnectionError):  # the output tells the end of the command
        while is_interactive and (chunk := await _call("the input", _read_input)):
            await running.write(chunk)
        await running.close_input()


def _read_input() -> bytes:
    """Read some bytes, also if another program made the shared pipe or terminal non-blocking."""
    while True:
        try:
            return os.read(STDIN, CHUNK)
        except BlockingIOError:
            is_ready(STDIN, select.POLLIN)
        except OSError as error:
            raise CommandError(f"the input cannot be read: {error.strerror}") from None


async def _forward_signals(
    client: AsyncClient, running: Execution, numbers: asyncio.Queue[int], *, is_raw: bool
) -> None:
    """Forward signals, and the size of the terminal.

    Raises:
        Signalled: the daemon does not answer, or the command stays on a raw terminal.
    """
    async with asyncio.TaskGroup() as checks:
        while True:
            number = await numbers.get()
            if number in ENDING_SIGNALS:
                is_final = is_raw and number in FINAL_SIGNALS
                checks.create_task(_end_in_time(client, number, is_final=is_final))
            with contextlib.suppress(ConnectionError):
                if number != signal.SIGWINCH:
                    await running.send_signal(signal.Signals(number).name.removeprefix("SIG"))
                elif (size := _terminal_size()) is not None:
                    await running.resize(*size)


async def _end_in_time(client: AsyncClient, number: int, *, is_final: bool) -> None:
    if is_final:
        await asyncio.sleep(FINAL_TIMEOUT_S)
        raise Signalled(number)
    try:
        await client.execute(Call("GET", "/v1/whoami"), timeout_s=RESPONSE_TIMEOUT_S)
    except Unreachable:
        raise Signalled(number) from None
    except AgentdError:  # an answer, too
        return


def _terminal_size() -> tuple[int, int] | None:
    """Return the columns and rows of the caller's terminal, if it has a size."""
    for descriptor in (STDOUT, STDIN, STDERR_OF_CALLER):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            return (size.columns, size.lines) if all(size) else None
    return None
