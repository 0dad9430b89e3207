"""The commands `agentctl create` and `agentctl explain`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    WIDE_KERNEL_COLUMNS,
    CommandLine,
    device_option,
    given_members,
    kernel_row,
    member_option,
    mounts,
    pairs,
    ports,
    slot_option,
    suggesting_agents,
    tmpfs,
    ulimits,
)
from agentd.cli.output import client_command, is_table, print_answer, print_data, print_text
from agentd.client import Client
from agentd.client.creates import kernel_request
from agentd.concurrency import start_call
from agentd.errors import AgentdError, InsufficientResource
from agentd.program.command_line import Signalled

_POLL_S = 0.25
_F = TypeVar("_F", bound=Callable[..., Any])

_KERNEL_OPTIONS: Sequence[Callable[[_F], _F]] = (
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
    member_option("--id", "kernel_id"),
    member_option("--image"),
    slot_option,
    device_option,
    member_option("--env", "-e", multiple=True, metavar="NAME=VALUE", read=pairs),
    member_option("--label", "labels", multiple=True, metavar="NAME=VALUE", read=pairs),
    member_option("--mount", "mounts", multiple=True, metavar="SOURCE:TARGET[:rw]", read=mounts),
    member_option(
        "--port", "-p", "ports", multiple=True, metavar="[HOST:]CONTAINER[/udp]", read=ports
    ),
    member_option("--workdir", "working_dir", metavar="PATH"),
    member_option("--user"),
    member_option("--pull", "pull_policy", type=click.Choice(["missing", "always", "never"])),
    member_option("--platform", metavar="OS/ARCH"),
    member_option("--network"),
    member_option("--tmpfs", multiple=True, metavar="TARGET[:SIZE]", read=tmpfs),
    member_option("--shm-size", metavar="SIZE"),
    member_option("--pids-limit", type=click.IntRange(min=1)),
    member_option("--ulimit", "ulimits", multiple=True, metavar="NAME=SOFT[:HARD]", read=ulimits),
    member_option("--init", is_flag=True),
    member_option("--group", "groups", multiple=True, metavar="NAME|NUMBER", read=list),
    member_option(
        "--entrypoint",
        metavar="PROGRAM",
        type=click.UNPROCESSED,
        read=lambda word: [word] if word else [],
    ),
    click.option("--dry-run", is_flag=True, help="Show the decision; create nothing."),
)


async_option = click.option(
    "--async", "is_async", is_flag=True, help="Return before the kernel runs."
)


def kernel_options(command: _F) -> _F:
    """Add the options that describe a kernel, and its COMMAND."""
    for option in reversed(_KERNEL_OPTIONS):
        command = option(command)
    return command


def kernel_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request body for these options."""
    return {"command": list(options["command"]), **given_members(options)}


@click.command(cls=CommandLine)
@click.argument("agent", shell_complete=completion.agents)
@kernel_options
@async_option
@client_command
def create(client: Client, /, agent: str, **options: Any) -> None:
    """Create a kernel on an agent.

    The kernel runs COMMAND; options end at its first word. Waits until the kernel runs.

    \b
    agentctl create agent-1 -s cuda.device=2 --image pytorch:2 -- python train.py
    agentctl create agent-1 --id train-1 -s cuda.shares=0.5 -s mem=16g -- ./train
    """
    body = kernel_body(options)
    content: Mapping[str, Any]
    with explaining_refusal(), suggesting_agents(client, agent):
        if options["dry_run"]:
            content = client.explain(agent, body)
        else:
            create_kernel = partial(client.create_kernel, agent, wait=not options["is_async"])
            content = with_progress(client, body, create_kernel)
    if "explain" not in content:
        print_answer(content, KERNEL_COLUMNS, kernel_row, wide=WIDE_KERNEL_COLUMNS)
    elif not print_data(content, given_devices(content)):
        print_decision(content)


@contextlib.contextmanager
def explaining_refusal(*, is_answer: bool = False) -> Iterator[None]:
    """Print the reason for each device before a refusal for want of devices is raised.

    It goes to standard error, unless it is the answer that was asked for.
    """
    try:
        yield
    except InsufficientResource as error:
        if is_table() and error.explain:
            print_decision({"explain": {error.slot: error.explain}}, is_refused=not is_answer)
        raise


_EXPLAIN_COLUMNS = ["slot", "device", "free", "given", "reason"]


def given_devices(decision: Mapping[str, Any]) -> list[str]:
    """Return the devices that a decision would give to the kernel."""
    ids = (
        device_id
        for slots in decision["allocation"].values()
        for amounts in slots.values()
        for device_id in amounts
    )
    return list(dict.fromkeys(ids))


def print_decision(content: Mapping[str, Any], *, is_refused: bool = False) -> None:
    """Print a row for each device; the rows of a refusal go to standard error."""
    from agentd.cli.tables import human_amount, print_rows

    rows = [
        {
            **row,
            "slot": slot,
            "free": human_amount(slot, row["free"]),
            "given": human_amount(slot, row["given"]),
        }
        for slot, rows in content["explain"].items()
        for row in rows
    ]
    print_rows(rows, _EXPLAIN_COLUMNS, is_error=is_refused)


@click.command()
@click.argument("agent", shell_complete=completion.agents)
@slot_option
@device_option
@client_command
def explain(client: Client, /, agent: str, **options: Any) -> None:
    """Show which devices a kernel would get.

    Nothing is created. A refusal has the reason for each device.
    """
    body = {**given_members(options), "command": ["any"], "image": "any"}
    with explaining_refusal(is_answer=True), suggesting_agents(client, agent):
        content = client.explain(agent, body)
    if not print_data(content, given_devices(content)):
        print_decision(content)


def with_progress(
    client: Client,
    body: Mapping[str, Any],
    create: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Create a kernel; show its state and its pull on a terminal meanwhile.

    A signal ends the wait at once and names the kernel: its create goes on.
    """
    named = kernel_request(body)
    try:
        creating = start_call("the create", partial(create, named))
        if sys.stderr.isatty() and not wait([creating], _POLL_S).done:
            _show_pull(client, named["kernel_id"], creating)
        return creating.result()
    except Signalled:
        name = named["kernel_id"]
        text = f"kernel {name} may be created all the same: agentctl rm {name}"
        print_text(f"agentctl: interrupted; {text}", err=True)
        raise


def _show_pull(client: Client, kernel_id: str, creating: Future[Any]) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from agentd.cli.tables import console

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    screen = console(is_error=True)
    try:
        with Progress(*columns, console=screen, transient=True) as progress:
            bar = progress.add_task("creating", total=None)
            while not wait([creating], _POLL_S).done:
                try:
                    kernel = client.kernel(kernel_id)
                except AgentdError:
                    continue
                pull = kernel["pull"] or {"current": 0, "total": None}
                current, total = pull["current"], pull["total"]
                progress.update(bar, description=kernel["state"], completed=current, total=total)
    finally:
        screen.show_cursor()  # a signal may come before the bar would show it again
