"""Containers on the GPUs of a user's job, with a batch script of docs/how-to/slurm.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from engines.test_slurm_kernels import devices_of, until_kernels
from support.engine import Engine
from support.other_users import ADA, EVE, home_of
from support.slurm_cluster import make_device
from support.slurm_howto import USERS_MARK, here, the_block, type_as
from support.slurm_nodes import NodesOf, SlurmNodes

TRAIN = """#!/bin/sh
trap "exit 0" USR1
echo gpus=$GPUS files: $(find / -xdev -name "cuda*" | sort)
sleep 1000 &
wait
"""
"""The `./train` of the page's image: prints the GPUs that it sees, and ends of a USR1."""
GPU_COUNT = 8
NOBODY = 65534
CALL = """
import http.client, json, socket, sys
path, method, target, body = sys.argv[1:]
connection = http.client.HTTPConnection("agentd")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
connection.request(method, target, body, {"Content-Type": "application/json"})
answer = connection.getresponse()
print(answer.status, json.loads(answer.read() or "{}").get("code", ""))
"""


def page_config(nodes: SlurmNodes) -> str:
    """Return the page's configuration for nodes whose GPUs are device files."""
    for node in nodes.cluster.nodes:
        for number in range(GPU_COUNT):
            make_device(nodes.folder / node / "dev" / f"cuda{number}")
    table = (
        '[plugins.cuda]\nplugin = "generic"\nenv = { GPUS = "{ids}" }\n'
        f'devices = ["{nodes.cluster.own}/dev/cuda*"]\n'
    )
    return here(the_block("toml"), nodes) + table


def submit_page_script(nodes: SlurmNodes) -> tuple[str, Path]:
    """Save and submit the page's batch script as a user; return the job's id and its output."""
    home = home_of(nodes.cluster.folder / "users", ADA)
    (home / "train.sh").write_text(here(the_block("bash"), nodes))
    (command,) = re.findall(r"^\$ (.*)$", the_block(USERS_MARK), re.MULTILINE)
    done = type_as(ADA, nodes, *command.split())
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    return job, home / f"slurm-{job}.out"


@pytest.mark.long
@pytest.mark.docker
async def test_user_runs_containers_on_three_nodes(slurm: NodesOf, engine: Engine) -> None:
    engine.import_image("train:1", programs={"train": TRAIN})
    nodes = await slurm(nodes=3, text=page_config, engine=engine)
    cluster = nodes.cluster
    first, second, third = cluster.nodes
    printed = nodes.agentctl(first, "slurm", "gres", "--agent=slurm", "--types=device")
    assert f"Type=cuda0 File={nodes.folder}/{first}/dev/cuda0\n" in printed
    other = cluster.submit("--gres=gpu:1", f"--nodelist={second}")
    await nodes.until_claims({f"slurm-{other}": ["cuda0"]}, second)

    job, output = submit_page_script(nodes)
    await until_kernels(nodes, 3)
    assert cluster.job(job)["UserId"] == f"ada({ADA})"
    expected = []
    for node, numbers in {first: [0, 1], second: [1, 2], third: [0, 1]}.items():
        (kernel,) = await nodes.daemons[node].get("/v1/kernels")
        assert devices_of(kernel) == [f"cuda{number}" for number in numbers]
        assert kernel["claim_id"] == f"slurm-{job}"
        files = " ".join(f"{nodes.folder}/{node}/dev/cuda{number}" for number in numbers)
        expected.append(f"gpus={','.join(map(str, numbers))} files: {files}")
    cluster.until(lambda: output.read_text().count("files:") == 3, "no output")
    assert sorted(output.read_text().splitlines()) == sorted(expected)
    assert len(engine.containers()) == 3
    await refuses_other_users(nodes, job)

    for container in engine.containers():
        engine.call("POST", f"/containers/{container['Id']}/kill?signal=USR1", raw=True)
    cluster.until_state(job, "COMPLETED")
    await until_only(other, nodes, engine)

    job, _ = submit_page_script(nodes)
    await until_kernels(nodes, 3)
    assert type_as(ADA, nodes, "scancel", job).returncode == 0
    cluster.until_state(job, "CANCELLED")
    await until_only(other, nodes, engine)


async def refuses_other_users(nodes: SlurmNodes, job: str) -> None:
    """Check that the job's claim and kernels are its user's, and the socket its group's."""
    claim, own = f"slurm-{job}", nodes.cluster.own
    create = ("agentctl", "run", "slurm", "--claim", claim, "--image", "train:1", "--", "true")
    done = type_as(EVE, nodes, *create)
    assert done.returncode == 125
    assert f"UnknownClaim: unknown claim {claim}" in done.stderr
    body = json.dumps({"command": ["true"], "image": "train:1", "claim": claim})
    (kernel,) = await nodes.daemon.get("/v1/kernels")
    calls = {
        ("POST", "/v1/agents/slurm/kernels", body): "UnknownClaim",
        ("DELETE", f"/v1/claims/{claim}", ""): "UnknownClaim",
        ("DELETE", f"/v1/kernels/{kernel['kernel_id']}", ""): "UnknownKernel",
    }
    for call, code in calls.items():
        words = (sys.executable, "-c", CALL, f"{own}/slurm.sock", *call)
        assert type_as(EVE, nodes, *words).stdout == f"404 {code}\n"
    for user, socket in ((NOBODY, "slurm.sock"), (ADA, "agentd.sock")):
        done = type_as(user, nodes, "agentctl", "--socket", f"{own}/{socket}", "claims")
        assert done.returncode != 0
        assert "ermission denied" in done.stderr
    assert claim in await nodes.claims()


async def until_only(other: str, nodes: SlurmNodes, engine: Engine) -> None:
    """Wait until nothing is held but by the other job on the second node, and nothing is left."""
    for node in nodes.cluster.nodes:
        is_second = node == nodes.cluster.nodes[1]
        await nodes.until_claims({f"slurm-{other}": ["cuda0"]} if is_second else {}, node)
        assert await nodes.daemons[node].get("/v1/kernels") == []
        held = [row["id"] for row in await nodes.daemons[node].get("/v1/devices") if row["holders"]]
        assert held == (["cuda0"] if is_second else [])
    assert engine.containers() == []
