"""The command `agentd-slurm`, and `agentctl slurm`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from agentd.client import Client
from agentd.program.parameters import CommandGroup

FAILED = 1


@click.group(cls=CommandGroup)
@click.option("--socket", metavar="PATH", help="Unix socket of agentd.")
@click.option("--map", "map_file", metavar="FILE", help="Map of Slurm's GPUs to devices.")
def agentd_slurm(socket: str | None, map_file: str | None) -> None:
    """Give Slurm's jobs GPUs from agentd.

    Exit status: 0 done, 1 failed, 2 wrong usage.
    """
    from agentd import stderr
    from agentd_slurm.gres_map import MAP_VARIABLE
    from agentd_slurm.node_client import SOCKET_VARIABLE

    stderr.guard()  # a hook must not fail because slurmd has ended
    for name, value in ((SOCKET_VARIABLE, socket), (MAP_VARIABLE, map_file)):
        if value:
            os.environ[name] = value


@agentd_slurm.command()
def prolog() -> None:
    """Claim the GPUs of a job (Prolog=).

    Exit status: 0 the job may start, or was requeued or cancelled; 1 slurmd must drain the node.
    """
    from agentd_slurm.commands.prolog import run_prolog

    sys.exit(run_prolog(os.environ))


@agentd_slurm.command()
def epilog() -> None:
    """Release the GPUs of a job (Epilog=).

    Exit status: 0 released or left to sync, 1 not run by slurmd.
    """
    from agentd_slurm.commands.epilog import run_epilog

    sys.exit(run_epilog(os.environ))


@agentd_slurm.command("task-prolog")
def task_prolog() -> None:
    """Name the claim of a job (TaskProlog=).

    Exit status: 0 the task may start, 3 its job has no claim of its GPUs here.
    """
    from agentd_slurm.commands.task_prolog import run_task_prolog

    sys.exit(run_task_prolog(os.environ))


@agentd_slurm.command()
@click.option("--node", metavar="NAME", help="Name of this node in slurm.conf.")
@click.option("--once", is_flag=True, help="Run one pass and exit.")
def sync(node: str | None, *, once: bool) -> None:
    """Keep claims consistent with Slurm's jobs.

    Exit status: 0 stopped, 1 the pass of --once failed.
    """
    from agentd_slurm.commands.sync import run_sync

    sys.exit(run_sync(node, once=once))


@agentd_slurm.command()
@click.option("--node", metavar="NAME", help="Name of this node in slurm.conf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(node: str | None, *, as_json: bool) -> None:
    """Check the settings of Slurm and the map.

    Exit status: 0 all checks passed, 1 a check failed or could not run.
    """
    from agentd_slurm.commands.doctor import checks

    for name in {*os.environ} - {"SLURM_CONF", "SLURMD_NODENAME"}:
        if not name.startswith("AGENTD_"):
            del os.environ[name]  # hooks have no PATH either
    slurm_checks = list(checks(node))
    if as_json:
        rows = [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in slurm_checks]
        click.echo(json.dumps(rows, indent=1))
    else:
        for check in slurm_checks:
            click.echo(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}")
    sys.exit(0 if all(check.passed for check in slurm_checks) else FAILED)


@click.group("slurm", cls=CommandGroup)
def agentctl_slurm() -> None:
    """Print Slurm's settings for a node."""


@agentctl_slurm.command()
@click.option("--agent", metavar="NAME", help="Agent with the devices. Default: the only one.")
@click.option(
    "--types",
    type=click.Choice(["device", "model"]),
    help="One type for each. Default: model, device if agents share some.",
)
@click.option(
    "--type", "named", multiple=True, metavar="TYPE[=ID,...]", help="Name of a model's type."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the device map.")
@click.option("--files", metavar="FOLDER", help="Folder of stand-ins for device files.")
@click.option("--node", metavar="NAME", help="Node of the lines, in a gres.conf of all nodes.")
@click.pass_obj
def gres(
    client: Client,
    agent: str | None,
    types: str | None,
    named: Sequence[str],
    *,
    as_json: bool,
    files: str | None,
    node: str | None,
) -> None:
    """Print gres.conf, Gres= and the device map.

    \b
    agentctl slurm gres --agent slurm
    agentctl slurm gres --agent slurm --json > /etc/agentd/slurm-gres.json
    agentctl slurm gres --agent slurm --type a100-80=cuda0,cuda1

    Run it on the node. Slurm confines a job to the device files of its GPUs, which only
    administrators can list. With --files, a device without such a file gets a stand-in; the command
    prints how to create those that are missing.

    Exit status: 0 printed, 1 the agent does not exist or has no accelerators, or gres.conf cannot
    express a device.
    """
    from agentd_slurm import gres as lines
    from agentd_slurm.cores import read_cores
    from agentd_slurm.gres_map import DEFAULT_MAP

    try:
        chosen = lines.choose_agent(agent, [row["agent_id"] for row in client.agents()])
        devices = lines.gpus_of(chosen, client.devices())
        are_shared = any(len(row["agents"]) > 1 for row in devices)
        are_models = (types or ("device" if are_shared else "model")) == "model"
        if named and not are_models:
            raise lines.NoGres("--type names models: it needs --types model")
        types_by_id = lines.model_types(devices, named) if are_models else {}
        if not as_json and (role := client.whoami()["role"]) != "admin":
            raise lines.NoGres(f"role {role} cannot list device files (required: admin)")
        files_by_id = {} if as_json else lines.files_of(devices, files)
    except lines.NoGres as error:
        raise click.ClickException(str(error)) from None
    devices_by_index = lines.gres_map(chosen, devices, types_by_id)
    content = json.dumps(devices_by_index.as_json(), indent=1)
    if as_json:
        click.echo(content)
        return
    near = read_cores() if are_models else {}
    cores = {row["stable_id"]: near.get(row["numa_node"], "") for row in devices}
    click.echo("# gres.conf")
    for line in lines.gres_conf(devices_by_index, files_by_id, cores):
        click.echo(f"NodeName={node} {line}" if node else line)
    click.echo("\n# slurm.conf, in the NodeName= line of this node")
    click.echo(lines.node_gres(devices_by_index))
    click.echo(f"\n# {DEFAULT_MAP}\n{content}")
    without = {row["stable_id"] for row in devices if not row["files"]}
    for index, device in devices_by_index.devices.items():
        file = Path(files_by_id[device.stable_id][0])
        number = os.makedev(lines.STAND_IN_MAJOR, index)
        if device.stable_id in without and not (file.exists() and file.stat().st_rdev == number):
            text = f"agentctl: {file} is missing or another device; create it with: rm -f {file};"
            click.echo(f"{text} mknod -m 666 {file} c {lines.STAND_IN_MAJOR} {index}", err=True)
