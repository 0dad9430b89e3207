"""The work of `agentd-slurm sync` does not grow with the queue."""

from __future__ import annotations

import shutil

from support.slurm_nodes import NodesOf, SlurmNodes

WRAPPER = """#!/bin/sh
file=$(mktemp {folder}/out.XXXXXX)
{program} "$@" >"$file"
status=$?
echo "{name} $(wc -c <"$file")" >>{folder}/log
cat "$file"
exit $status
"""


def run_sync_once(nodes: SlurmNodes) -> list[str]:
    """Take one look; return the commands that it ran, each with the bytes that it printed."""
    folder = nodes.folder / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("squeue", "scontrol", "sbatch", "scancel"):
        file = folder / name
        file.write_text(WRAPPER.format(folder=folder, program=shutil.which(name), name=name))
        file.chmod(0o755)
    (folder / "log").write_text("")
    nodes.settings_file(nodes.node).write_text(f'[slurm]\nbin = "{folder}"\n')
    nodes.sync_once()
    return (folder / "log").read_text().splitlines()


async def test_look_does_not_grow_with_the_queue(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    nodes.configure_slurm("MaxArraySize=20000\nMaxJobCount=30000")
    job = nodes.cluster.submit("--gres=gpu:cuda1:1")
    nodes.cluster.until(lambda: nodes.cluster.processes(job), "the job does not run")
    await nodes.until_claims({f"slurm-{job}": ["cuda1"]})
    before = run_sync_once(nodes)
    nodes.cluster.submit("--hold", "--array=0-9999", "--gres=gpu:1")
    for number in range(100):
        nodes.cluster.submit("--hold", f"--job-name=j{number}")
    assert run_sync_once(nodes) == before
    assert [row.split()[0] for row in before] == ["squeue", "squeue", "scontrol", "scontrol"]
    assert sum(int(row.split()[1]) for row in before) < 10_000
