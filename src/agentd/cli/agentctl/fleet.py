"""The commands of `agentctl` for a fleet: many nodes through one gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import click

from agentd.cli.agentctl.create import (
    async_option,
    given_devices,
    kernel_body,
    kernel_options,
    print_decision,
    with_progress,
)
from agentd.cli.agentctl.exec import exec_in_kernel
from agentd.cli.agentctl.follow import logs, rm
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    WIDE_KERNEL_COLUMNS,
    CommandLine,
    RpcGroup,
    alias_of,
    device_row,
    kernel_row,
    pairs,
    quiet_option,
)
from agentd.cli.agentctl.stats import print_live_usage, print_usage, watch_options
from agentd.cli.agentctl.ui import ui
from agentd.cli.output import client_command, output_option, print_answer, print_data, print_text
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.defaults import CREATE_TIMEOUT_S
from agentd.client.errors import parse_content
from agentd.client.paths import api_path
from agentd.errors import AgentdError
from agentd.views import KernelUseView

_KERNEL_COLUMNS = ["kernel", "node", *KERNEL_COLUMNS[1:]]
_NODE_COLUMNS = ["node", "state", "agents", "free", "labels", "age", "reason"]
_WIDE_NODE_COLUMNS = ["url", "generation", "conflicting", "seen_at", "cordon"]
_DEFAULTS = {"allocation": {}, "degraded": [], "reason": ""}


class FleetGroup(RpcGroup):
    """The commands of a fleet; help lists those that a node does not have."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [nodes.name or "", slots.name or ""]


@click.group("fleet", cls=FleetGroup)
def fleet_group() -> None:
    """Show the nodes and slots of a fleet.

    To run a command of a node on the whole fleet, use "agentctl --fleet ADDRESS COMMAND". Without
    ADDRESS and $AGENTCTL_FLEET, "agentctl fleet" asks the gateway on this host.
    """


@fleet_group.group(invoke_without_command=True)
@output_option
@click.pass_context
def nodes(context: click.Context) -> None:
    """List the nodes and their free slots.

    AGE is the time since the last report of the node.
    """
    if context.invoked_subcommand is not None:
        return
    print_answer(_list_nodes(context.obj), _NODE_COLUMNS, _node_row, wide=_WIDE_NODE_COLUMNS)


def _list_nodes(client: Client) -> list[dict[str, Any]]:
    return client.execute(Call("GET", api_path("nodes")))


def _list_over_nodes(client: Client, call: Call[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a list over nodes, and name the nodes without an answer on standard error."""
    rows: list[dict[str, Any]] = []
    missing = dict[str, None]()
    page: Call[list[dict[str, Any]]] | None = call
    while page is not None:
        content, headers = client.fetch(page)
        rows += parse_content(content)
        missing |= dict.fromkeys(headers.get("Fleet-Missing", "").split(","))
        page = page.next_page(headers.get("Link"))
    if names := [name for name in missing if name]:
        _print_missing(names)
    return rows


def _print_missing(nodes: Sequence[str]) -> None:
    print_text(f"agentctl: no answer from {', '.join(nodes)}", err=True)


def _node_row(row: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.cli.tables import format_age

    free = {agent: _free_text(slots) for agent, slots in row["agents"].items()}
    cordon = row.get("cordon") or {}
    reasons = (row["reason"], cordon.get("reason"))
    return {
        **row,
        "node": row["id"],
        "state": f"{row['state']},cordoned" if cordon else row["state"],
        "reason": "; ".join(reason for reason in reasons if reason),
        "cordon": cordon and f"by {cordon['by']}, {format_age(cordon['since'])} ago",
        "agents": list(row["agents"]),
        "free": [f"{agent}: {text}" for agent, text in free.items() if text],
        "age": format_age(row["seen_at"]),
    }


def _free_text(slots: Mapping[str, Mapping[str, str]]) -> str:
    from agentd.cli.tables import human_amount

    parts = [f"{name}={human_amount(name, use['free'])}" for name, use in slots.items()]
    return " ".join(part for part in parts if not part.endswith("=0"))


@nodes.command("cordon")
@click.argument("node")
@click.option("--reason", default="", help="Reason, shown with the node.")
@client_command
def cordon_node(client: Client, node: str, reason: str) -> None:
    """Keep new kernels off a node.

    Its kernels run on. Undo with "agentctl fleet nodes uncordon".
    """
    _print_node(client.execute(Call("POST", api_path("nodes", node, "cordon"), {"reason": reason})))


@nodes.command("uncordon")
@click.argument("node")
@client_command
def uncordon_node(client: Client, node: str) -> None:
    """Place kernels on a cordoned node again."""
    _print_node(client.execute(Call("POST", api_path("nodes", node, "uncordon"))))


def _print_node(node: Mapping[str, Any]) -> None:
    print_answer(node, _NODE_COLUMNS, _node_row, wide=_WIDE_NODE_COLUMNS)


@nodes.command("forget")
@click.argument("node")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def forget_node(client: Client, node: str, yes: bool) -> None:
    """Forget a lost node and its routes.

    Its kernels can no longer be reached through the fleet.
    """
    if not yes:
        click.confirm(f"Forget {node} and the routes to its kernels?", abort=True, err=True)
    client.execute(Call("DELETE", api_path("nodes", node)))


@fleet_group.group(invoke_without_command=True)
@output_option
@click.pass_context
def slots(context: click.Context) -> None:
    """List the slots of all nodes with their sums."""
    if context.invoked_subcommand is not None:
        return
    from agentd.cli.tables import human_amount

    def row(slot: Mapping[str, Any]) -> dict[str, Any]:
        return {key: human_amount(slot["name"], value) for key, value in slot.items()}

    sums = context.obj.execute(Call("GET", api_path("stats")))["slots"]
    rows = [{**slot, **sums.get(slot["name"], {})} for slot in context.obj.slot_types()]
    print_answer(rows, ["name", "kind", "quantum", "capacity", "allocated", "free"], row)


@slots.command("forget")
@click.argument("name")
@click.pass_obj
def forget_slot(client: Client, name: str) -> None:
    """Forget a slot that no node offers."""
    client.execute(Call("DELETE", api_path("slot-types", name)))


@fleet_group.command()
@click.option("--node", multiple=True, help="Only on this node; may be repeated.")
@client_command
def devices(client: Client, node: Sequence[str]) -> None:
    """List the devices of all nodes."""
    rows = _list_over_nodes(client, Call("GET", api_path("devices", node=node)))
    columns = ["device", "node", "state", "slot", "capacity", "free", "agents", "holders"]
    print_answer(rows, columns, device_row)


@fleet_group.command(cls=CommandLine)
@kernel_options
@async_option
@click.option("--node", multiple=True, help="Only on this node; may be repeated.")
@click.option("--agent", multiple=True, help="Only on this agent; may be repeated.")
@click.option("--on", multiple=True, metavar="LABEL=VALUE", help="Only on nodes with this label.")
@click.option("--model", multiple=True, help="Only where devices are of this model.")
@click.option(
    "--policy", type=click.Choice(["random", "pack"]), help="Order in which nodes are tried."
)
@client_command
def create(client: Client, /, **options: Any) -> None:
    """Create a kernel on a node with room.

    The kernel runs COMMAND; options end at its first word.

    \b
    agentctl --fleet https://gateway:7001 create -s cuda.device=2 -- python train.py
    agentctl --fleet https://gateway:7001 create --on zone=a --policy pack -s tpu.chip=4 -- ./train
    """
    placement = {
        "nodes": list(options["node"]),
        "agents": list(options["agent"]),
        "labels": pairs(options["on"]),
        "models": list(options["model"]),
        "policy": options["policy"],
    }
    body = kernel_body(options) | {"placement": {k: v for k, v in placement.items() if v}}
    is_dry, headers = options["dry_run"], {"Prefer": "respond-async"}
    path = api_path("kernels", dry_run=is_dry)

    def create_placed(body: Mapping[str, Any]) -> dict[str, Any]:
        call: Call[dict[str, Any]] = Call(
            "POST", path, body, headers if options["is_async"] else {}, is_repeatable=False
        )
        return client.execute_create(call)

    if not is_dry:
        kernel = with_progress(client, body, create_placed)
        print_answer(kernel, _KERNEL_COLUMNS, _fleet_kernel_row, wide=WIDE_KERNEL_COLUMNS)
        return
    content = client.execute(Call[dict[str, Any]]("POST", path, body), timeout_s=CREATE_TIMEOUT_S)
    if not print_data(content, given_devices(content)):
        print_text(f"node {content['node_id']}, agent {content['agent_id']}")
        print_decision(content)


def _fleet_kernel_row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    return kernel_row({**_DEFAULTS, **kernel}) | {"node": kernel["node_id"]}


@fleet_group.command()
@click.option("--node", multiple=True, help="Only on this node; may be repeated.")
@click.option("--state", multiple=True, help="Only kernels in this state; may be repeated.")
@click.option(
    "--label", "-l", multiple=True, metavar="KEY=VALUE", help="Only kernels with this label."
)
@quiet_option
@client_command
def ls(
    client: Client,
    node: Sequence[str],
    state: Sequence[str],
    label: Sequence[str],
) -> None:
    """List the kernels of all nodes."""
    path = api_path("kernels", node=node, state=state, label=label)
    rows = _list_over_nodes(client, Call("GET", path, is_paged=True))
    print_answer(rows, _KERNEL_COLUMNS, _fleet_kernel_row, wide=WIDE_KERNEL_COLUMNS)


fleet_group.add_command(alias_of(ls, "ps"))


@fleet_group.command()
@click.argument("kernels", nargs=-1)
@client_command
def stats(client: Client, kernels: Sequence[str]) -> None:
    """Show the usage of kernels on all nodes.

    Kernels are listed as NODE/KERNEL. CPU is measured over one second; 100% is one core.
    """
    read_all = _FleetUsage(client).read

    def read_usage() -> list[KernelUseView]:
        return [client.stats(kernel) for kernel in kernels] if kernels else read_all()

    print_usage(read_usage)


@fleet_group.command()
@watch_options
@click.pass_obj
def top(client: Client, agent: str | None, interval: float, count: int | None) -> None:
    """Show current usage of all nodes.

    Kernels are listed as NODE/KERNEL, the busiest first.
    """
    print_live_usage(_FleetUsage(client).read, agent, interval, count)


class _FleetUsage:
    """The usage of the kernels of every ready node; nodes without an answer are named once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._missing: list[str] = []

    def read(self) -> list[KernelUseView]:
        """Return the usage of kernels as NODE/KERNEL."""
        rows: list[KernelUseView] = []
        missing: list[str] = []
        for node in (row["id"] for row in _list_nodes(self._client) if row["state"] == "ready"):
            try:
                usage: list[KernelUseView] = self._client.execute(
                    Call("GET", api_path("nodes", node, "stats"))
                )
            except AgentdError:
                missing.append(node)
            else:
                rows += [{**use, "kernel_id": f"{node}/{use['kernel_id']}"} for use in usage]
        if missing and missing != self._missing:
            _print_missing(missing)
        self._missing = missing
        return rows


def _with_node(command: click.Command) -> click.Command:
    """Return a command for one kernel with an option for the kernel's node."""
    node = click.Option(["--node"], help="Node of a kernel that the fleet did not place.")
    copied_command = copy(command)
    copied_command.params = [*command.params, node]
    return copied_command


for of_kernel in (exec_in_kernel, logs, rm):
    fleet_group.add_command(_with_node(of_kernel))
fleet_group.add_command(ui)
