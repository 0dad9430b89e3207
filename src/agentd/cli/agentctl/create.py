"""The commands `agentctl create` and `agentctl explain`."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    is_json,
    json_only_option,
    json_option,
    kernel_row,
    listed,
    mounts,
    pairs,
    ports,
    print_answer,
    tmpfs,
    ulimits,
)
from agentd.client import Client
from agentd.errors import AgentdError, InsufficientResource

_PLAIN = (
    "kernel_id", "image", "working_dir", "user", "platform", "network", "shm_size", "pids_limit",
)  # fmt: skip
_LOOK_EVERY_S = 0.25
_F = TypeVar("_F", bound=Callable[..., Any])


_KERNEL_OPTIONS: Sequence[Callable[[_F], _F]] = (
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
    click.option("--id", "kernel_id", help="Name of the kernel; default: a generated one."),
    click.option("--image", help="Image; the docker runtime needs one."),
    click.option(
        "--slot",
        "-s",
        "slot",
        multiple=True,
        metavar="NAME=AMOUNT",
        help="Amount of a slot: cuda.device=1.",
    ),
    click.option(
        "--device", multiple=True, metavar="NAME=ID", help="Choose only these: cuda=cuda0."
    ),
    click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Environment variable."),
    click.option("--label", multiple=True, metavar="NAME=VALUE", help="Label of the kernel."),
    click.option(
        "--mount",
        multiple=True,
        metavar="SOURCE:TARGET[:rw]",
        help="Host folder, read-only by default.",
    ),
    click.option(
        "--port", "-p", multiple=True, metavar="[HOST:]CONTAINER[/udp]", help="Port to publish."
    ),
    click.option("--workdir", "working_dir", metavar="PATH", help="Working directory."),
    click.option("--user", help="User inside the container."),
    click.option("--pull", type=click.Choice(["missing", "always", "never"]), help="When to pull."),
    click.option(
        "--platform", metavar="OS/ARCH", help="Platform of the image; default: the engine's."
    ),
    click.option("--network", help="Network that the node allows."),
    click.option("--tmpfs", multiple=True, metavar="TARGET[:SIZE]", help="A folder in memory."),
    click.option("--shm-size", metavar="SIZE", help="Size of /dev/shm."),
    click.option("--pids-limit", type=click.IntRange(min=1), help="Maximum number of processes."),
    click.option(
        "--ulimit", multiple=True, metavar="NAME=SOFT[:HARD]", help="Limit of setrlimit(2)."
    ),
    click.option("--async", "is_async", is_flag=True, help="Do not wait until it runs."),
    click.option("--dry-run", is_flag=True, help="Decide and explain, change nothing."),
)


def kernel_options(command: _F) -> _F:
    """Add the options that describe a kernel, and its COMMAND."""
    for option in reversed(_KERNEL_OPTIONS):
        command = option(command)
    return command


def kernel_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that these options make."""
    body = {
        "command": list(options["command"]),
        "slots": pairs(options["slot"]),
        "env": pairs(options["env"]),
        "labels": pairs(options["label"]),
        "mounts": mounts(options["mount"]),
        "ports": ports(options["port"]),
    }
    given = {
        "devices": listed(options["device"]),
        **{name: options[name] for name in _PLAIN},
        "pull_policy": options["pull"],
        "tmpfs": tmpfs(options["tmpfs"]),
        "ulimits": ulimits(options["ulimit"]),
    }
    return body | {name: value for name, value in given.items() if value}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent", shell_complete=completion.agents)
@kernel_options
@json_option
@click.pass_obj
def create(client: Client, /, agent: str, **options: Any) -> None:
    """Create a kernel on an agent.

    The kernel runs COMMAND, which stands after `--`.

    \b
    agentctl create agent-1 -s cuda.device=2 --image pytorch:2 -- python train.py
    agentctl create agent-1 --id train-1 -s cuda.shares=0.5 -s mem=16g -- ./train
    """
    body = kernel_body(options)
    content: Mapping[str, Any]
    waits = not (is_json() or options["dry_run"] or options["is_async"])
    try:
        if options["dry_run"]:
            content = client.explain(agent, body)
        elif waits and sys.stderr.isatty():
            body.setdefault("kernel_id", f"k-{uuid.uuid4().hex[:12]}")
            content = _created_with_bar(client, agent, body)
        else:
            content = client.create_kernel(agent, body, wait=not options["is_async"])
    except InsufficientResource as error:
        if not is_json():
            print_decision({"explain": {error.slot: error.explain}}, is_refused=True)
        raise
    if is_json():
        click.echo(json.dumps(content, indent=1))
    elif options["dry_run"] and "explain" in content:
        print_decision(content)
    else:
        print_answer(content, KERNEL_COLUMNS, kernel_row)


_EXPLAIN_COLUMNS = ["slot", "device", "free", "given", "reason"]


def print_decision(content: Mapping[str, Any], *, is_refused: bool = False) -> None:
    """Print how each device was looked at; of a refusal, to standard error."""
    from agentd.cli.tables import amount, print_rows

    rows = [
        {
            **row,
            "slot": slot,
            "free": amount(slot, row["free"]),
            "given": amount(slot, row["given"]),
        }
        for slot, rows in content["explain"].items()
        for row in rows
    ]
    print_rows(rows, _EXPLAIN_COLUMNS, is_error=is_refused)


@click.command()
@click.argument("agent", shell_complete=completion.agents)
@click.option(
    "--slot",
    "-s",
    "slot",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="Amount of a slot: cuda.device=1.",
)
@click.option("--device", multiple=True, metavar="NAME=ID", help="Choose only these: cuda=cuda0.")
@json_only_option
@click.pass_obj
def explain(
    client: Client,
    agent: str,
    slot: Sequence[str],
    device: Sequence[str],
) -> None:
    """Show which devices a kernel would get.

    Nothing is created. A refusal says for each device why it cannot be given.
    """
    choice = {"slots": pairs(slot), "devices": listed(device)}
    body = choice | {"command": ["any"], "image": "any"}
    try:
        content = client.explain(agent, body)
    except InsufficientResource as error:
        if not is_json():
            print_decision({"explain": {error.slot: error.explain}})
        raise
    if is_json():
        click.echo(json.dumps(content, indent=1))
    else:
        print_decision(content)


def _created_with_bar(client: Client, agent: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Create a kernel, and show the progress of the image download meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        creating: Future[Any] = pool.submit(client.create_kernel, agent, body)
        if not wait([creating], _LOOK_EVERY_S).done:
            _show_pull(client, str(body["kernel_id"]), creating)
        content: Mapping[str, Any] = creating.result()
    return content


def _show_pull(client: Client, kernel_id: str, creating: Future[Any]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("creating", total=None)
        while not wait([creating], _LOOK_EVERY_S).done:
            try:
                kernel = client.kernel(kernel_id)
            except AgentdError:
                continue
            pull = kernel["pull"] or {"current": 0, "total": None}
            progress.update(
                bar, description=kernel["state"], completed=pull["current"], total=pull["total"]
            )
