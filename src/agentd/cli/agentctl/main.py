"""The commands of `agentctl`: everything that the RPC offers, for people and for scripts.

Standard output has the answer and nothing else; errors and progress go to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from agentd import __version__
from agentd.cli.agentctl import completion
from agentd.cli.agentctl.added import added_command, added_commands
from agentd.cli.agentctl.claim import claim, claims, release, renew
from agentd.cli.agentctl.create import create, explain
from agentd.cli.agentctl.doctor import (
    check_row,
    condition_rows,
    conditions_of,
    notes_of,
    print_checks,
    print_conditions,
    print_named_claims,
)
from agentd.cli.agentctl.exec import exec_in_kernel
from agentd.cli.agentctl.fleet import fleet_group
from agentd.cli.agentctl.follow import logs, rm, stop, wait
from agentd.cli.agentctl.options import (
    KERNEL_COLUMNS,
    WIDE_KERNEL_COLUMNS,
    RpcGroup,
    RpcProblem,
    alias_of,
    chosen_address,
    client_of,
    device_row,
    event_line,
    event_subject,
    for_each,
    kernel_row,
    pairs,
    print_outage,
    quiet_option,
    suggesting_agents,
    suggestion,
)
from agentd.cli.agentctl.run import run
from agentd.cli.agentctl.stats import stats, top
from agentd.cli.agentctl.token import token
from agentd.cli.agentctl.ui import ui
from agentd.cli.option_types import fleet_address, node_address
from agentd.cli.output import (
    client_command,
    encode,
    is_data,
    is_table,
    output_format,
    output_option,
    print_answer,
    print_data,
    print_text,
)
from agentd.client import Client
from agentd.core.hardware_names import normal_name, normal_names
from agentd.errors import AgentdError
from agentd.program.parameters import FilePath
from agentd.views import KernelView

PLUGIN_COLUMNS = ["name", "plugin", "state", "slots", "reason"]


AT_A_GATEWAY = ("fleet", "inspect", "signal", "stop", "token", "wait", "whoami")
"""Commands of a node that are the same at a gateway."""
SIGNALS = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "KILL")


class NodeOrFleet(RpcGroup):
    """The commands of a node; with `--fleet`, the commands of a fleet with the same names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        if not is_for_fleet(ctx):
            return sorted({*super().list_commands(ctx), *added_commands()})
        return sorted({*fleet_group.commands, *AT_A_GATEWAY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        of_node = super().get_command(ctx, cmd_name)
        if of_node is None:
            of_node = added_command(cmd_name)
        if not is_for_fleet(ctx) or cmd_name in AT_A_GATEWAY:
            return of_node
        of_fleet = fleet_group.get_command(ctx, cmd_name)
        if of_fleet is None and of_node is not None and not ctx.resilient_parsing:
            raise click.UsageError(
                f"{cmd_name} is a command for one node, not for a fleet:"
                " name the node with --socket or --url"
            )
        return of_fleet


def is_for_fleet(context: click.Context) -> bool:
    """Return whether a command line addresses a gateway."""
    return chosen_address(context) == "fleet_address"


@click.group(cls=NodeOrFleet)
@click.version_option(__version__, prog_name="agentctl")
@click.option(
    "--socket",
    "socket_path",
    is_eager=True,
    envvar="AGENTD_SOCKET",
    metavar="PATH",
    help="Unix socket of the node.",
)
@click.option("--config", metavar="FILE", help="agent.toml that names the socket.")
@click.option(
    "--url",
    is_eager=True,
    envvar="AGENTD_URL",
    type=node_address,
    metavar="ADDRESS",
    help="Address of the node, such as http://127.0.0.1:6001.",
)
@click.option(
    "--fleet",
    "fleet_address",
    is_eager=True,  # before --help, which lists the commands of a fleet
    envvar="AGENTCTL_FLEET",
    type=fleet_address,
    metavar="ADDRESS",
    help="Gateway of a fleet: unix:PATH or https://HOST:7001.",
)
@click.option(
    "--token-file",
    envvar="AGENTD_TOKEN_FILE",
    metavar="FILE",
    type=FilePath(),
    help="Token for --url, or --fleet over TCP.",
)
@click.pass_context
def agentctl(
    context: click.Context,
    socket_path: str | None,
    config: str | None,
    url: str | None,
    fleet_address: str | None,
    token_file: str | None,
) -> None:
    """Run kernels on a node or on a fleet.

    Exit status: 0 done, 1 refused or unreachable, 2 wrong usage.
    """
    del socket_path, config, url, fleet_address, token_file
    is_of_fleet = context.invoked_subcommand == fleet_group.name
    context.obj = client_of(context, is_of_fleet=is_of_fleet)


@agentctl.command()
@client_command
def status(client: Client) -> None:
    """Show the node, its runtimes and its plugins."""
    node = client.node()
    if print_data(node, [node["id"]]):
        return
    from agentd.cli.tables import print_rows

    print_text(f"node {node['id']}, agentd {node['version']}, generation {node['generation']}")
    for runtime in (node["runtime"], *node["other_runtimes"]):
        reason = f": {runtime['reason']}" if runtime["reason"] else ""
        print_text(f"runtime {runtime['name']}: {runtime['state']}{reason}")
    print_rows(node["plugins"], PLUGIN_COLUMNS)
    print_conditions(conditions_of(node))


@agentctl.command()
@client_command
def doctor(client: Client) -> None:
    """Check the node for inconsistencies.

    The check changes nothing. Devices, plugins and runtimes that do not work fail it, too; other
    conditions of the node are listed below the checks.

    Exit status: 0 all checks passed, 1 a check failed or could not run.
    """
    node = client.node()
    try:
        node = client.node(check=True)
        checks: Sequence[Mapping[str, Any]] = node["checks"]
    except AgentdError as error:
        checks = [check_row("books", "the ledger can be compared", str(error))]
    rows = [*condition_rows(node, client.devices()), *checks]
    if not print_data(rows, (row["check"] for row in rows)):
        print_checks(rows)
        print_conditions(notes_of(node, rows))
        print_named_claims(client.claims())
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


@agentctl.command()
@client_command
def devices(client: Client) -> None:
    """List the devices and their holders."""
    columns = ["device", "state", "slot", "capacity", "allocated", "free", "agents", "holders"]
    wide = ["slots", "stable_id", "model", "numa_node", "aliases"]
    print_answer(client.devices(), [*columns, "reason"], device_row, wide=wide)


@agentctl.command()
@client_command
def agents(client: Client) -> None:
    """List the agents and their partitions."""
    rows = client.agents()
    columns = ["agent", "devices", "free", "capacity", "scaling_factors"]
    columns += ["limits"] if any(row["limits"] for row in rows) else []
    print_answer(rows, columns, _agent_row)


def _agent_row(row: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.cli.tables import compact_ids, limit_text

    return {
        "agent": row["agent_id"],
        "devices": [f"{name} {compact_ids(ids)}" for name, ids in row["devices"].items()],
        "free": {name: use["free"] for name, use in row["slots"].items()},
        "capacity": {name: use["capacity"] for name, use in row["slots"].items()},
        "scaling_factors": row["scaling_factors"],
        "limits": [limit_text(name, limit) for name, limit in row["limits"].items()],
    }


@agentctl.command()
@client_command
def slots(client: Client) -> None:
    """List the slots that the node offers."""
    columns = ["name", "kind", "quantum", "exclusive_group", "unit", "primary"]
    print_answer(client.slot_types(), columns)


@agentctl.command()
@click.option("--agent", help="Only kernels of this agent.", shell_complete=completion.agents)
@click.option("--state", multiple=True, help="Only kernels in this state; may be repeated.")
@click.option(
    "--label", "-l", multiple=True, metavar="KEY=VALUE", help="Only kernels with this label."
)
@quiet_option
@client_command
def ls(
    client: Client,
    agent: str | None,
    state: Sequence[str],
    label: Sequence[str],
) -> None:
    """List kernels.

    \b
    agentctl ls --state running --label queue=night
    agentctl rm $(agentctl ls -q --state terminated)
    """
    with suggesting_agents(client, agent):
        rows = client.kernels(agent, state=state, labels=pairs(label))
    print_answer(rows, KERNEL_COLUMNS, kernel_row, wide=WIDE_KERNEL_COLUMNS)


@agentctl.command()
@click.argument("kernels", nargs=-1, required=True, shell_complete=completion.kernels)
@client_command
def inspect(client: Client, kernels: Sequence[str]) -> None:
    """Show all details of kernels."""
    inspected: list[KernelView] = []

    def show(kernel: str) -> None:
        from agentd.cli.tables import format_member, print_rows

        inspected.append(client.kernel(kernel))
        if is_table():
            rows = [{"member": k, "value": format_member(k, v)} for k, v in inspected[-1].items()]
            print_rows(rows, ["member", "value"])

    failed = for_each(kernels, show)
    if inspected:
        content = inspected if len(kernels) > 1 else inspected[0]
        print_data(content, (kernel["kernel_id"] for kernel in inspected))
    sys.exit(failed)


@agentctl.command("signal")
@click.argument("kernel", shell_complete=completion.kernels)
@click.argument("signal", default="TERM", type=click.Choice(SIGNALS, case_sensitive=False))
@click.pass_obj
def signal_kernel(client: Client, kernel: str, signal: str) -> None:
    """Send a signal to a kernel's first process.

    SIGNAL is INT, TERM, HUP, QUIT, USR1, USR2 or KILL; default: TERM. In a container without
    --init, it has an effect only if the command handles it, or if it is KILL. "agentctl stop" also
    kills what does not end.

    Exit status: 0 sent, 1 the kernel does not run, refused or unreachable.
    """
    client.signal_kernel(kernel, signal)


@agentctl.command()
@click.option("--after", metavar="ID", help="Begin after the event with this id.")
@client_command
def events(client: Client, after: str | None) -> None:
    """Print events of the node as they occur.

    Each line has the local time, the event, its agent, state, exit code and caller. "-o json"
    prints one object per line, and "-o yaml" one document per event: their "id" is the ID of
    "--after". An agentd that restarts is waited for. An event "reset" says that events were missed.

    Exit status: 1 refused or unreachable, 130 Ctrl-C.
    """
    for event in client.events(after=after, on_outage=print_outage):
        if is_data():
            head = {"id": event.id, "at": event.at or None, "event": event.kind}
            content, form = {**head, "data": event.data}, output_format()
            lead = "---\n" if form == "yaml" else ""
            click.echo(lead + encode(content, form, indent=None))
        elif output_format() == "name":
            print_text(event_subject(event.data))
        else:
            print_text(f"{_local_time(event.at)} {event_line(event.kind, event.data)}")


def _local_time(text: str) -> str:
    """Return an RFC 3339 time as one of the caller's day; the present without one."""
    from datetime import UTC, datetime

    at = datetime.fromisoformat(text) if text else datetime.now(UTC)
    return at.astimezone().strftime("%H:%M:%S")


@agentctl.command()
@click.argument("device", shell_complete=completion.devices)
@client_command
def drain(client: Client, device: str) -> None:
    """Stop allocating a device to new kernels.

    DEVICE is an id such as cuda3 or cuda/cuda3. Running kernels keep it. Undo with
    "agentctl undrain".

    Exit status: 0 done, 1 unknown device, refused or unreachable.
    """
    _print_device(client.drain(*_find_device(client, device)))


@agentctl.command()
@click.argument("device", shell_complete=completion.devices)
@client_command
def undrain(client: Client, device: str) -> None:
    """Allocate a drained device again."""
    _print_device(client.undrain(*_find_device(client, device)))


@agentctl.command()
@click.argument("device", shell_complete=completion.devices)
@client_command
def clear(client: Client, device: str) -> None:
    """Clear a trouble that waits for you.

    Some troubles end only when an operator says so, such as an Xid on a driver that does not
    report recoveries. The reason of the device in "agentctl devices" says whether it is one.

    Exit status: 0 cleared, 1 nothing to clear, unknown device or unreachable.
    """
    _print_device(client.clear_device(*_find_device(client, device)))


@agentctl.command()
@click.argument("device", shell_complete=completion.devices)
@click.pass_obj
def forget(client: Client, device: str) -> None:
    """Forget a missing device.

    Its id can be assigned to another device at the next start of agentd. A configuration that still
    names it is a warning.
    """
    before = client.node()["warnings"]
    client.forget_device(*_find_device(client, device))
    for warning in client.node()["warnings"]:
        if warning not in before:
            click.echo(f"warning: {warning}", err=True)


@agentctl.group(invoke_without_command=True)
@output_option
@click.pass_context
def runtimes(context: click.Context) -> None:
    """List the runtimes and their state."""
    if context.invoked_subcommand is None:
        print_answer(context.obj.runtimes(), ["name", "state", "reason"])


@runtimes.command("forget")
@click.argument("name")
@click.pass_obj
def forget_runtime(client: Client, name: str) -> None:
    """Forget the kernels of a lost runtime.

    Releases their devices permanently. The node refuses this while runtime NAME is available.
    """
    client.forget_runtime(name)


@agentctl.group(invoke_without_command=True)
@output_option
@click.pass_context
def plugins(context: click.Context) -> None:
    """List the plugins and their state."""
    if context.invoked_subcommand is None:
        print_answer(context.obj.plugins(), PLUGIN_COLUMNS)


@plugins.command("retry")
@click.argument("name")
@client_command
def retry_plugin(client: Client, name: str) -> None:
    """Retry a plugin that is not ready.

    Exit status: 0 the plugin is ready, 1 it is not.
    """
    row = client.retry_plugin(name)
    print_answer(row, PLUGIN_COLUMNS)
    sys.exit(0 if row["state"] == "ready" else 1)


@plugins.command("stop")
@click.argument("name")
@client_command
def stop_plugin(client: Client, name: str) -> None:
    """Release the devices of a plugin.

    Ends the plugin's process, for a reset of a GPU or an upgrade of its driver. The devices are
    withheld until "agentctl plugins start", also after a restart of agentd. Kernels keep theirs.

    Exit status: 0 it is stopped, 1 refused or unreachable.
    """
    print_answer(client.stop_plugin(name), PLUGIN_COLUMNS)


@plugins.command("start")
@click.argument("name")
@client_command
def start_plugin(client: Client, name: str) -> None:
    """Start a stopped plugin.

    Exit status: 0 the plugin is ready, 1 it is not.
    """
    row = client.start_plugin(name)
    print_answer(row, PLUGIN_COLUMNS)
    sys.exit(0 if row["state"] == "ready" else 1)


@agentctl.command()
@client_command
def whoami(client: Client) -> None:
    """Show your identity and role."""
    print_answer(client.whoami(), ["name", "role", "agents", "uid"])


for command in (
    *(fleet_group, create, explain, run, exec_in_kernel, logs, wait, stop, rm, alias_of(ls, "ps")),
    *(claim, claims, renew, release, stats, top, token, ui),
):
    agentctl.add_command(command)


def _print_device(device: Mapping[str, Any]) -> None:
    print_answer(device, ["device", "state", "agents", "reason"], device_row)


def _find_device(client: Client, device: str) -> tuple[str, str]:
    """Return the device name and the id of the one device that the operator named.

    Raises:
        RpcProblem: no device or several have this id.
    """
    name, separator, device_id = device.partition("/")
    if not separator:
        name, device_id = "", device
    rows = client.devices()
    names = [
        (row["device_name"], row["id"])
        for row in rows
        if normal_name(device_id) in normal_names(row["id"], row["stable_id"], *row["aliases"])
        and name in ("", row["device_name"])
    ]
    if len(names) == 1:
        return names[0]
    if names:
        choices = ", ".join(map("/".join, names))
        raise RpcProblem(
            {"code": "UnknownDevice", "detail": f"ambiguous device {device}"},
            [f"name one of: {choices}"],
        )
    known_ids = [row["id"] for row in rows] + [f"{row['device_name']}/{row['id']}" for row in rows]
    remedies = suggestion(device, known_ids) or ["list the devices: agentctl devices"]
    raise RpcProblem({"code": "UnknownDevice", "detail": f"unknown device {device}"}, remedies)
