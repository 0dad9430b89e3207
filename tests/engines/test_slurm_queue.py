"""The cost of prolog and epilog does not grow with the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.slurm_nodes import NodesOf, SlurmNodes

HELD = 10_000
COMMANDS = ("scontrol", "squeue", "scancel", "sinfo", "sacct")
TEN = 10


def count_answers(nodes: SlurmNodes) -> Path:
    """Give the engine commands that write down each call and the bytes of its answer."""
    folder, log = nodes.folder / "counting", nodes.folder / "answers"
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(
            f'#!/bin/sh\n/usr/bin/{name} "$@" >{folder}/$$\nstatus=$?\n'
            f'echo {name} $(/usr/bin/wc -c <{folder}/$$) "$@" >>{log}\n'
            f"/bin/cat {folder}/$$\nexit $status\n"
        )
        (folder / name).chmod(0o755)
    (nodes.folder / nodes.node / "slurm.toml").write_text(f'[slurm]\nbin = "{folder}"\n')
    return log


@pytest.mark.long
async def test_prolog_and_epilog_read_one_job_of_ten_thousand(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=1)
    nodes.configure_slurm(f"MaxArraySize={HELD + 1}\nMaxJobCount={2 * HELD}")
    log = count_answers(nodes)
    sizes = []
    for held in (0, HELD):
        if held:
            for options in ((f"--array=0-{held - 1}",), *[()] * TEN):
                nodes.cluster.submit("--hold", "--gres=gpu:1", *options)
        job = nodes.cluster.submit("--gres=gpu:1", script="srun true")
        nodes.cluster.until_state(job, "COMPLETED")
        nodes.cluster.until_idle()
        assert await nodes.claims() == {}
        calls = [line.split() for line in log.read_text().splitlines()]
        log.unlink()
        assert [call[:1] + call[2:] for call in calls] == [
            ["scontrol", "--all", "-o", "-d", "show", "job", job]
        ]
        sizes.append(int(calls[0][1]))
    assert abs(sizes[1] - sizes[0]) < 100, sizes
    count = nodes.cluster.run("squeue", "-h", "-r", "-t", "PD").count("\n")
    assert count == HELD + TEN
