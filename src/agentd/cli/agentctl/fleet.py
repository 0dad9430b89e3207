"""The commands `agentctl fleet …`: many nodes as one, through a gateway."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from agentd.cli.agentctl.create import kernel_body, kernel_options, print_decision
from agentd.cli.agentctl.exec import run_inside
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    is_json,
    json_option,
    kernel_row,
    pairs,
    print_answer,
    remove_each,
)
from agentd.cli.agentctl.stats import print_usage, watch, watching
from agentd.cli.agentctl.ui import ui
from agentd.cli.output import say
from agentd.client import Client, fleet_calls
from agentd.client.calls import Call
from agentd.client.defaults import CHUNK, CREATE_TIMEOUT_S
from agentd.errors import AgentdError
from agentd.views import KernelUseView

GATEWAY = "unix:/run/agentd-fleet/gateway.sock"
_KERNEL_COLUMNS = ["kernel", "node", *KERNEL_COLUMNS[1:]]
_NODE_COLUMNS = ["node", "state", "agents", "free", "labels", "seen", "reason"]
_UNKNOWN = {"allocation": {}, "degraded": [], "reason": ""}
node_option = click.option("--node", help="The kernel's node, if the fleet did not place it.")


class FleetGroup(click.Group):
    """Commands of a fleet; those that a node has too are listed as `agentctl --fleet … NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [nodes.name or "", slots.name or ""]


@click.group("fleet", cls=FleetGroup)
def fleet_group() -> None:
    """Show the nodes and slots of a fleet.

    Every command of a node that a fleet has too is `agentctl --fleet ADDRESS COMMAND`; without
    ADDRESS (or $AGENTCTL_FLEET) the gateway of this host is asked.
    """


@fleet_group.group(invoke_without_command=True)
@json_option
@click.pass_context
def nodes(context: click.Context) -> None:
    """List the nodes and what is free."""
    if context.invoked_subcommand is not None:
        return
    rows = context.obj.carry_out(fleet_calls.nodes())
    print_answer(rows, _NODE_COLUMNS, _node_row, wide=["url", "generation", "conflicting"])


def _listed(client: Client, call: Call[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a list over nodes, and say which of them did not answer."""
    response = client.open(call)
    rows: list[dict[str, Any]] = json.loads(response.read())
    if missing := response.headers.get("Fleet-Missing"):
        say(f"agentctl: no answer from {missing.replace(',', ', ')}", err=True)
    return rows


def _node_row(row: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.cli.tables import age

    free = [f"{agent}: {_free(slots)}" for agent, slots in row["agents"].items() if _free(slots)]
    seen = None if row["seen_at"] is None else f"{age(row['seen_at'])} ago"
    return {**row, "node": row["id"], "agents": list(row["agents"]), "free": free, "seen": seen}


def _free(slots: Mapping[str, Mapping[str, str]]) -> str:
    from agentd.cli.tables import amount

    parts = [f"{name}={amount(name, use['free'])}" for name, use in slots.items()]
    return " ".join(part for part in parts if not part.endswith("=0"))


@nodes.command("forget")
@click.argument("node")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def forget_node(client: Client, node: str, yes: bool) -> None:
    """Forget a lost node and its routes."""
    if not yes:
        click.confirm(f"Forget {node} and the routes to its kernels?", abort=True)
    client.carry_out(fleet_calls.forget_node(node))


@fleet_group.group(invoke_without_command=True)
@json_option
@click.pass_context
def slots(context: click.Context) -> None:
    """List the slots of all nodes with their sums."""
    if context.invoked_subcommand is not None:
        return
    from agentd.cli.tables import amount

    def row(slot: Mapping[str, Any]) -> dict[str, Any]:
        return {key: amount(slot["name"], value) for key, value in slot.items()}

    sums = context.obj.carry_out(fleet_calls.stats())["slots"]
    rows = [{**slot, **sums.get(slot["name"], {})} for slot in context.obj.slot_types()]
    print_answer(rows, ["name", "kind", "quantum", "capacity", "allocated", "free"], row)


@slots.command("forget")
@click.argument("name")
@click.pass_obj
def forget_slot(client: Client, name: str) -> None:
    """Forget a slot that no node offers."""
    client.carry_out(fleet_calls.forget_slot_type(name))


@fleet_group.command()
@click.option("--node", multiple=True, help="Only of this node; may be repeated.")
@json_option
@click.pass_obj
def devices(client: Client, node: Sequence[str]) -> None:
    """List the devices of all nodes."""
    rows = _listed(client, fleet_calls.devices(tuple(node)))
    columns = ["device", "node", "state", "slot", "capacity", "free", "agents", "holders"]
    print_answer(rows, columns, _device_row)


def _device_row(row: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.cli.tables import held_amounts

    return {
        **row,
        "device": f"{row['device_name']}/{row['id']}",
        "node": row["node_id"],
        "holders": [f"{h['kernel_id']}={held_amounts(row['slot'], h)}" for h in row["holders"]],
    }


@fleet_group.command(context_settings={"ignore_unknown_options": True})
@kernel_options
@click.option("--node", multiple=True, help="Only these nodes.")
@click.option("--agent", multiple=True, help="Only these agents.")
@click.option("--on", multiple=True, metavar="LABEL=VALUE", help="Only nodes with this label.")
@click.option("--model", multiple=True, help="Only agents with this device model.")
@click.option(
    "--policy", type=click.Choice(["random", "pack"]), help="Order in which nodes are tried."
)
@json_option
@click.pass_obj
def create(client: Client, /, **options: Any) -> None:
    """Create a kernel on a node with room.

    The kernel runs COMMAND, which stands after `--`.

    \b
    agentctl --fleet https://gateway:7001 create -s cuda.device=2 -- python train.py
    agentctl --fleet https://gateway:7001 create --on zone=a --policy pack -s tpu.chip=4 -- ./train
    """
    wanted = {
        "nodes": list(options["node"]),
        "agents": list(options["agent"]),
        "labels": pairs(options["on"]),
        "models": list(options["model"]),
        "policy": options["policy"],
    }
    body = kernel_body(options) | {"placement": {k: v for k, v in wanted.items() if v}}
    is_dry = options["dry_run"]
    call = fleet_calls.create_kernel(body, wait=not options["is_async"], dry_run=is_dry)
    content = client.carry_out(call, timeout_s=CREATE_TIMEOUT_S)
    if is_json():
        click.echo(json.dumps(content, indent=1))
    elif is_dry:
        say(f"node {content['node_id']}, agent {content['agent_id']}")
        print_decision(content)
    else:
        print_answer(content, _KERNEL_COLUMNS, _row)


def _row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    return kernel_row({**_UNKNOWN, **kernel}) | {"node": kernel["node_id"]}


@fleet_group.command()
@click.option("--node", multiple=True, help="Only of this node; may be repeated.")
@click.option("--state", multiple=True, help="Only in this state; may be repeated.")
@click.option("--label", "-l", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@json_option
@click.pass_obj
def ls(
    client: Client,
    node: Sequence[str],
    state: Sequence[str],
    label: Sequence[str],
) -> None:
    """List the kernels of all nodes."""
    call = fleet_calls.kernels(tuple(node), state=tuple(state), label=tuple(label))
    print_answer(_listed(client, call), _KERNEL_COLUMNS, _row)


@fleet_group.command()
@click.argument("kernel")
@node_option
@click.option("--follow", "-f", is_flag=True, help="Follow until the kernel ends.")
@click.option("--tail", type=click.IntRange(min=0), help="The last lines.")
@click.pass_obj
def logs(client: Client, kernel: str, node: str | None, follow: bool, tail: int | None) -> None:
    """Print the output of a kernel."""
    call = fleet_calls.logs(kernel, node, follow=follow, tail=tail)
    response = client.open(call, CREATE_TIMEOUT_S if follow else None)
    while chunk := response.read1(CHUNK):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


@fleet_group.command()
@click.argument("kernels", nargs=-1, required=True)
@node_option
@click.option("--timeout", type=float, help="Seconds between TERM and KILL.")
@json_option
@click.pass_obj
def rm(client: Client, kernels: Sequence[str], node: str | None, timeout: float | None) -> None:
    """Stop and remove kernels."""

    def remove(kernel: str) -> None:
        call = fleet_calls.delete_kernel(kernel, node, timeout)
        client.carry_out(call, timeout_s=CREATE_TIMEOUT_S)

    remove_each(kernels, remove)


@fleet_group.command()
@click.argument("kernels", nargs=-1)
@json_option
@click.pass_obj
def stats(client: Client, kernels: Sequence[str]) -> None:
    """Show the usage of kernels on all nodes."""
    rows = [client.stats(kernel) for kernel in kernels] if kernels else _uses_of_all(client)
    print_usage(rows)


@fleet_group.command()
@watching
@click.pass_obj
def top(client: Client, agent: str | None, interval: float, count: int | None) -> None:
    """Show current usage of all nodes.

    Kernels are NODE/KERNEL, the busiest first.
    """
    watch(lambda: _uses_of_all(client), agent, interval, count)


def _uses_of_all(client: Client) -> list[KernelUseView]:
    """Return the usage of the kernels of every ready node, as NODE/KERNEL."""
    nodes = client.carry_out(fleet_calls.nodes())
    return [
        {**use, "kernel_id": f"{node['id']}/{use['kernel_id']}"}
        for node in nodes
        if node["state"] == "ready"
        for use in _uses(client, node["id"])
    ]


def _uses(client: Client, node: str) -> list[KernelUseView]:
    """Return what a node's kernels use; nothing if it does not answer just now."""
    with contextlib.suppress(AgentdError):
        return client.carry_out(fleet_calls.uses(node))
    return []


inside = [
    *run_inside.params,
    click.Option(["--node"], help="Where KERNEL is, if the fleet did not place it."),
]
fleet_group.add_command(
    click.Command("exec", params=inside, callback=run_inside.callback, help=run_inside.help)
)
fleet_group.add_command(ui)
