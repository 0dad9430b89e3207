"""Parts that fail in the middle: agentd, slurmd, slurmctld, the map of devices."""

from __future__ import annotations

import json
import signal

from support.slurm_nodes import NodesOf


async def test_prolog_waits_for_an_agentd_that_restarts(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    await nodes.daemon.stop(signal.SIGKILL)
    job = nodes.cluster.submit("--gres=gpu:1")
    nodes.cluster.until_state(job, "RUNNING", "CONFIGURING")
    await nodes.daemon.start()
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    nodes.cluster.until_state(job, "RUNNING")


async def test_sync_ends_a_claim_that_the_epilog_left(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    await nodes.daemon.stop(signal.SIGKILL)
    nodes.cluster.run("scancel", job)
    nodes.cluster.until_idle()
    await nodes.daemon.start()
    assert await nodes.claims() == {f"slurm-{job}": ["cuda0"]}
    nodes.start_sync(nodes.node)
    await nodes.until_claims({}, within_s=30)


async def test_cancel_without_slurmd_releases_in_the_end(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    nodes.cluster.kill(nodes.node)
    nodes.cluster.run("scancel", job)
    assert await nodes.claims() == {f"slurm-{job}": ["cuda0"]}
    nodes.cluster.start_node(nodes.node)
    await nodes.until_claims({}, within_s=120)


async def test_job_that_slurmctld_forgot_keeps_its_claim(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    cluster = nodes.cluster
    job = cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    cluster.until(lambda: cluster.processes(job), "the job has no processes")
    cluster.kill(nodes.node)  # one that runs would end the job at once
    cluster.kill("slurmctld")
    for file in (cluster.folder / "state").glob("job_state*"):
        file.unlink()
    cluster.start_controller()
    assert cluster.state(job) == ""
    nodes.sync_once()
    assert await nodes.claims() == {f"slurm-{job}": ["cuda0"]}
    cluster.start_node(nodes.node)
    nodes.start_sync(nodes.node)
    await nodes.until_claims({}, within_s=120)
    assert cluster.processes(job) == []


async def test_gpu_that_is_not_in_the_map_sends_the_job_back(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    content = json.loads(nodes.map_file(nodes.node).read_text())
    del content["devices"]["1"]
    nodes.map_file(nodes.node).write_text(json.dumps(content))
    job = nodes.cluster.submit("--gres=gpu:cuda1:1")
    nodes.cluster.until_requeued(job)
    text = nodes.cluster.run("scontrol", "show", "job", job)
    assert "AdminComment=agentd: GPU 1 of Slurm is missing from the map" in text
    assert not nodes.cluster.node_state(nodes.node).startswith("drain")


async def test_epilog_after_a_failed_prolog_releases_nothing_of_others(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    body = {"claim_id": "other", "slots": {"cuda.device": "1"}, "holder": {"name": "other"}}
    body["devices"] = {"cuda": ["cuda1"]}
    assert (await nodes.daemon.call("POST", "/v1/agents/notebooks/claims", body)).status == 201
    job = nodes.cluster.submit("--gres=gpu:2", "--no-requeue")
    nodes.cluster.until_state(job, "CANCELLED")
    nodes.cluster.until_idle()
    assert await nodes.claims() == {"other": ["cuda1"]}
