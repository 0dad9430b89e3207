"""The lines and the map that `agentctl slurm gres` prints, as a real Slurm understands them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
from pathlib import Path

from support.slurm_cluster import make_device
from support.slurm_nodes import BIN, NodesOf, SlurmNodes

OPENS = """
import os, sys
for file in sys.argv[1:]:
    try:
        os.open(file, os.O_RDONLY)
    except OSError as error:
        print(os.path.basename(file), error.strerror)
"""
"""A stand-in without a driver cannot be opened, but the error says whether it may be."""
MODELS = ["--type=a100=cuda0,cuda3,cuda10", "--type=v100=cuda1,cuda2"]


def own_devices(nodes: SlurmNodes) -> str:
    """Return a configuration of one agent with five devices, which have no files of their own."""
    agents = nodes.text.partition('[[agents]]\nid = "notebooks"')
    sockets = agents[2][agents[2].index("[[rpc") : agents[2].index("[plugins")]
    ids = ", ".join(f'{{id = "cuda{number}"}}' for number in (0, 1, 2, 3, 10))
    return f'{agents[0]}{sockets}[plugins.cuda]\nplugin = "sim"\ndevices = [{ids}]\n'


def printed(nodes: SlurmNodes, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the first node."""
    command = [BIN / "agentctl", "slurm", "gres", *words]
    environment = nodes.environment(nodes.node)
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def switch_on(nodes: SlurmNodes, text: str, *words: str) -> list[str]:
    """Use the printed lines, `Gres=` and map; return the lines and `Gres=`."""
    lines = re.findall(r"^Name=gpu .*$", text, re.MULTILINE)
    (gres,) = re.findall(r"^Gres=.*$", text, re.MULTILINE)
    nodes.cluster.gres[nodes.node] = ("\n".join(lines), gres)
    nodes.map_file(nodes.node).write_text(printed(nodes, "--json", *words).stdout)
    hooks = f"Prolog={nodes.folder}/prolog\nEpilog={nodes.folder}/epilog"
    nodes.configure_slurm(f"TaskPlugin=task/cgroup\n{hooks}")
    return [*lines, gres]


def opened_by(nodes: SlurmNodes, output: Path) -> list[str]:
    """Return the devices whose stand-ins a job may open."""
    nodes.cluster.until(lambda: output.exists() and output.read_text().count("\n") == 5, "-")
    answers = [line.split(maxsplit=1) for line in output.read_text().splitlines()]
    return sorted(device for device, text in answers if text == os.strerror(errno.ENXIO))


async def test_job_of_a_model_claims_the_device_it_may_open(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=0, text=own_devices, is_switched_on=False)
    cluster = nodes.cluster
    cluster.constrains_devices = "yes"
    stand_ins = cluster.folder / "stand-ins"
    stand_ins.mkdir()
    first = printed(nodes, f"--files={stand_ins}", *MODELS)
    for command in re.findall(r"create it with: (.*)", first.stderr):
        subprocess.run(command, shell=True, check=True)  # noqa: S602 - an operator pastes it
    again = printed(nodes, f"--files={stand_ins}", *MODELS)
    assert (again.stdout, again.stderr) == (first.stdout, "")
    *lines, gres = switch_on(nodes, first.stdout, *MODELS)
    assert (len(lines), gres) == (2, "Gres=gpu:a100:3,gpu:v100:2"), "one line for each model"
    probe = nodes.folder / "probe.py"
    probe.write_text(OPENS)
    opened: dict[str, list[str]] = {}
    for gpus in ("a100:1", "v100:1", "a100:2", "v100:1"):
        script = f"/usr/bin/python3 {probe} {stand_ins}/*; sleep 1000"
        job = cluster.submit(f"--gres=gpu:{gpus}", "-n1", script=script)
        opened[f"slurm-{job}"] = opened_by(nodes, cluster.folder / f"out-{job}")
    await nodes.until_claims(opened)
    assert [len(devices) for devices in opened.values()] == [1, 1, 2, 1]
    of_a100 = [device for devices in [*opened.values()][::2] for device in devices]
    assert sorted(of_a100) == ["cuda0", "cuda10", "cuda3"]
    checks = await asyncio.to_thread(nodes.engine, nodes.node, "doctor", "--node", nodes.node)
    assert "ok   Gres:" in checks.stdout, checks.stdout


async def test_jobs_claim_different_instances_of_one_type(slurm: NodesOf) -> None:
    """As of MIG instances: a file that they share, and one of each one's own."""

    def with_files(nodes: SlurmNodes) -> str:
        dev = nodes.cluster.own / "dev"
        return f'{own_devices(nodes)}files = ["{dev}/gpu", "{dev}/{{id}}"]\n'

    nodes = await slurm(gpu_count=0, text=with_files, is_switched_on=False)
    for name in ("gpu", "cuda0", "cuda1", "cuda2", "cuda3", "cuda10"):
        make_device(nodes.folder / nodes.node / "dev" / name)
    words = ["--type=a100_1g.10gb"]
    *lines, gres = switch_on(nodes, printed(nodes, *words).stdout, *words)
    assert (len(lines), gres) == (5, "Gres=gpu:a100_1g.10gb:5")
    claims = {}
    for device in ("cuda0", "cuda1", "cuda2"):
        job = nodes.cluster.submit("--gres=gpu:a100_1g.10gb:1", "-n1")
        claims[f"slurm-{job}"] = [device]
        await nodes.until_claims(claims)
