"""The commands `agentctl …`: everything the RPC offers, for people and for scripts.

Errors are one line with the problem's detail; the exit status is then 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from agentd import __version__
from agentd.client import Client, RpcProblem, socket_of
from agentd.ctl_options import mounts, pairs, ports

_CHUNK = 64 * 1024


@click.group()
@click.version_option(__version__, prog_name="agentctl")
@click.option(
    "--socket", "socket_path", envvar="AGENTD_SOCKET", metavar="PATH", help="Unix socket."
)
@click.option("--config", metavar="FILE", help="agent.toml that names the socket.")
@click.option("--url", envvar="AGENTD_URL", help="http://127.0.0.1:6001, in place of the socket.")
@click.option("--token-file", metavar="FILE", type=click.Path(), help="Token for --url.")
@click.pass_context
def agentctl(
    context: click.Context,
    socket_path: str | None,
    config: str | None,
    url: str | None,
    token_file: str | None,
) -> None:
    """Look at a node, and run kernels on it."""
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip() if token_file else None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{token_file}: {error}") from None
    context.obj = Client(socket_path or socket_of(config), url, token)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _print(content: Any, columns: Sequence[str], *, as_json: bool) -> None:  # noqa: ANN401 - JSON, and click's flag
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    from agentd.tables import print_rows  # noqa: PLC0415 - rich is slow to load

    print_rows(content if isinstance(content, list) else [content], columns)


@agentctl.command()
@json_option
@click.pass_obj
def status(client: Client, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Show the node, its runtime and its plugins."""
    node = client.call("GET", "/v1/node")
    if as_json:
        click.echo(json.dumps(node, indent=1))
        return
    from agentd.tables import print_rows  # noqa: PLC0415

    click.echo(f"node {node['id']}, agentd {node['version']}, generation {node['generation']}")
    for runtime in (node["runtime"], *node["other_runtimes"]):
        reason = f": {runtime['reason']}" if runtime["reason"] else ""
        click.echo(f"runtime {runtime['name']}: {runtime['state']}{reason}")
    print_rows(node["plugins"], ["name", "plugin", "state", "slots", "reason"])
    for warning in node["warnings"]:
        click.echo(f"warning: {warning}")


@agentctl.command()
@json_option
@click.pass_obj
def devices(client: Client, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """List the devices and who holds them."""
    rows = client.call("GET", "/v1/devices")
    if not as_json:
        rows = [
            {**row, "device": f"{row['device_name']}/{row['id']}"} | _holders(row) for row in rows
        ]
    columns = [
        "device",
        "state",
        "slot",
        "capacity",
        "allocated",
        "free",
        "agents",
        "holders",
        "reason",
    ]
    _print(rows, columns, as_json=as_json)


def _holders(row: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.tables import amount  # noqa: PLC0415

    sizes = {key: amount(row["slot"], row[key]) for key in ("capacity", "allocated", "free")}
    holders = [f"{h['kernel_id']}={amount(row['slot'], h['amount'])}" for h in row["holders"]]
    return {**sizes, "holders": holders}


@agentctl.command()
@json_option
@click.pass_obj
def agents(client: Client, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """List the agents and their partitions."""
    rows = client.call("GET", "/v1/agents")
    if not as_json:
        from agentd.tables import compact  # noqa: PLC0415

        rows = [
            {
                "agent": row["agent_id"],
                "devices": [f"{name} {compact(ids)}" for name, ids in row["devices"].items()],
                "free": {name: use["free"] for name, use in row["slots"].items()},
                "capacity": {name: use["capacity"] for name, use in row["slots"].items()},
                "scaling_factors": row["scaling_factors"],
            }
            for row in rows
        ]
    _print(rows, ["agent", "devices", "free", "capacity", "scaling_factors"], as_json=as_json)


@agentctl.command()
@json_option
@click.pass_obj
def slots(client: Client, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """List the slots that the node knows."""
    rows = client.call("GET", "/v1/slot-types")
    _print(rows, ["name", "kind", "quantum", "exclusive_group", "unit"], as_json=as_json)


@agentctl.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--id", "kernel_id", help="Name of the kernel; default: one is made up.")
@click.option("--image", help="Image; the docker runtime needs one.")
@click.option("--slot", "-s", "slot", multiple=True, metavar="NAME=AMOUNT", help="cuda.device=1")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE")
@click.option("--label", multiple=True, metavar="NAME=VALUE")
@click.option("--mount", multiple=True, metavar="SOURCE:TARGET[:rw]")
@click.option("--port", "-p", multiple=True, metavar="[HOST:]CONTAINER[/udp]")
@click.option("--workdir", "working_dir")
@click.option("--user")
@click.option("--async", "is_async", is_flag=True, help="Do not wait until it runs.")
@click.option("--dry-run", is_flag=True, help="Decide and explain, change nothing.")
@json_option
@click.pass_obj
def create(client: Client, /, agent: str, as_json: bool, **options: Any) -> None:  # noqa: ANN401, FBT001 - click passes them
    """Create a kernel on AGENT that runs COMMAND (after `--`)."""
    body = {
        "command": list(options["command"]),
        "slots": pairs(options["slot"]),
        "env": pairs(options["env"]),
        "labels": pairs(options["label"]),
        "mounts": mounts(options["mount"]),
        "ports": ports(options["port"]),
    }
    for name in ("kernel_id", "image", "working_dir", "user"):
        if options[name] is not None:
            body[name] = options[name]
    query = "?dry_run=true" if options["dry_run"] else ""
    headers = {"Prefer": "respond-async"} if options["is_async"] else {}
    path = f"/v1/agents/{quote(agent, safe='')}/kernels{query}"
    content = json.loads(client.open("POST", path, body, headers).read())
    if as_json:
        click.echo(json.dumps(content, indent=1))
    elif options["dry_run"] and "explain" in content:
        _print_decision(content)
    else:
        _print(_kernel_row(content), _KERNEL_COLUMNS, as_json=False)


_EXPLAIN_COLUMNS = ["slot", "device", "free", "given", "reason"]


def _print_decision(content: Mapping[str, Any]) -> None:
    from agentd.tables import amount, print_rows  # noqa: PLC0415

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
    print_rows(rows, _EXPLAIN_COLUMNS)


@agentctl.command()
@click.argument("agent")
@click.option("--slot", "-s", "slot", multiple=True, metavar="NAME=AMOUNT", help="cuda.device=1")
@json_option
@click.pass_obj
def explain(client: Client, agent: str, slot: Sequence[str], as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Show which devices a kernel on AGENT would get, or why it would get none."""
    path = f"/v1/agents/{quote(agent, safe='')}/kernels?dry_run=true"
    body = {"slots": pairs(slot), "command": ["any"], "image": "any"}
    try:
        content = json.loads(client.open("POST", path, body).read())
    except RpcProblem as problem:
        rows = problem.content.get("explain", ())
        if rows and not as_json:
            _print_decision({"explain": {problem.content["slot"]: rows}})
        raise
    if as_json:
        click.echo(json.dumps(content, indent=1))
    else:
        _print_decision(content)


_KERNEL_COLUMNS = [
    "kernel",
    "agent",
    "state",
    "slots",
    "devices",
    "exit_code",
    "created_at",
    "reason",
]


def _kernel_row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    from agentd.tables import compact  # noqa: PLC0415

    devices = [
        f"{name} {compact(list(ids))}"
        for name, by_slot in kernel["allocation"].items()
        for ids in by_slot.values()
        if name != "mem"
    ]
    return {
        **kernel,
        "kernel": kernel["kernel_id"],
        "agent": kernel["agent_id"],
        "devices": devices,
        "reason": "; ".join(filter(None, [kernel["reason"], *kernel["degraded"]])) or None,
    }


@agentctl.command()
@click.option("--agent", help="Of this agent only.")
@json_option
@click.pass_obj
def ls(client: Client, agent: str | None, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """List kernels."""
    path = f"/v1/agents/{quote(agent, safe='')}/kernels" if agent else "/v1/kernels"
    rows = client.call("GET", path)
    _print(
        rows if as_json else [_kernel_row(row) for row in rows], _KERNEL_COLUMNS, as_json=as_json
    )


@agentctl.command()
@click.argument("kernel")
@json_option
@click.pass_obj
def inspect(client: Client, kernel: str, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Show everything about one kernel."""
    content = client.call("GET", _kernel_path(kernel))
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    from agentd.tables import print_rows, shown  # noqa: PLC0415

    print_rows(
        [{"member": name, "value": shown(value)} for name, value in content.items()],
        ["member", "value"],
    )


@agentctl.command()
@click.argument("kernel")
@click.option("--follow", "-f", is_flag=True, help="Go on until the kernel ends.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines.")
@click.pass_obj
def logs(client: Client, kernel: str, follow: bool, tail: int | None) -> None:  # noqa: FBT001 - click passes it
    """Print what a kernel printed."""
    query = urlencode({"follow": str(follow).lower(), "tail": "all" if tail is None else tail})
    response = client.open("GET", f"{_kernel_path(kernel)}/logs?{query}")
    output = sys.stdout.buffer
    while chunk := response.read1(_CHUNK):
        output.write(chunk)
        output.flush()


@agentctl.command()
@click.argument("kernel")
@click.option("--timeout", type=float, help="Seconds between TERM and KILL.")
@json_option
@click.pass_obj
def stop(client: Client, kernel: str, timeout: float | None, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """End a kernel, and keep it listed."""
    body = {} if timeout is None else {"timeout": timeout}
    content = client.call("POST", f"{_kernel_path(kernel)}/stop", body)
    _print(content if as_json else _kernel_row(content), _KERNEL_COLUMNS, as_json=as_json)


@agentctl.command()
@click.argument("kernels", nargs=-1, required=True)
@click.option("--timeout", type=float, help="Seconds between TERM and KILL.")
@json_option
@click.pass_obj
def rm(client: Client, kernels: Sequence[str], timeout: float | None, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Stop kernels if need be, and remove them."""
    query = "" if timeout is None else f"?timeout={timeout:g}"
    for kernel in kernels:
        client.call("DELETE", f"{_kernel_path(kernel)}{query}")
    click.echo(json.dumps({"removed": list(kernels)}) if as_json else "\n".join(kernels))


@agentctl.command()
@click.argument("device")
@json_option
@click.pass_obj
def drain(client: Client, device: str, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Give nothing new from DEVICE (cuda3, or cuda/cuda3)."""
    _print_device(client.call("POST", f"{_device_path(client, device)}/drain"), as_json=as_json)


@agentctl.command()
@click.argument("device")
@json_option
@click.pass_obj
def undrain(client: Client, device: str, as_json: bool) -> None:  # noqa: FBT001 - click passes it
    """Give from DEVICE again."""
    _print_device(client.call("POST", f"{_device_path(client, device)}/undrain"), as_json=as_json)


@agentctl.command()
@click.argument("device")
@click.pass_obj
def forget(client: Client, device: str) -> None:
    """Forget DEVICE, which is gone, and its seat at the next start."""
    client.call("DELETE", _device_path(client, device))


def _print_device(row: Mapping[str, Any], *, as_json: bool) -> None:
    shown = row if as_json else {**row, "device": f"{row['device_name']}/{row['id']}"}
    _print(shown, ["device", "state", "agents", "reason"], as_json=as_json)


def _kernel_path(kernel: str) -> str:
    return f"/v1/kernels/{quote(kernel, safe='')}"


def _device_path(client: Client, device: str) -> str:
    name, found, device_id = device.partition("/")
    if not found:
        name, device_id = "", device
    names = [
        (row["device_name"], row["id"])
        for row in client.call("GET", "/v1/devices")
        if device_id in (row["id"], row["stable_id"], *row["aliases"])
        and name in ("", row["device_name"])
    ]
    if len(names) != 1:
        why = "no such device" if not names else f"more than one: {', '.join(n for n, _ in names)}"
        raise RpcProblem({"code": "UnknownDevice", "detail": f"{device}: {why}"})
    return f"/v1/devices/{quote(names[0][0])}/{quote(names[0][1], safe='')}"
