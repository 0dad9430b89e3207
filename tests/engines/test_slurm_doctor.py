"""`agentd-slurm doctor` on a real cluster: it runs what the hooks run, as they run it."""

from __future__ import annotations

import json
import signal

from engines.test_slurm_sync import ON_CUDA3, conditions, set_partitions, until_blocked
from support.slurm_nodes import NodesOf, SlurmNodes


def doctor(nodes: SlurmNodes) -> dict[str, str]:
    """Return the details of the checks that fail."""
    done = nodes.engine(nodes.node, "doctor", "--node", nodes.node, "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == any(not row["passed"] for row in rows), done.stderr
    return {row["name"]: row["detail"] for row in rows if not row["passed"]}


async def test_doctor_fails_where_the_hooks_would(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    assert doctor(nodes) == {}
    settings = nodes.settings_file(nodes.node)
    settings.write_text('[slurm]\nbin = "/opt/absent/bin"\n')
    assert "not found in /opt/absent/bin" in doctor(nodes)["slurmctld"]
    settings.write_text("[slurm]\nbins = 1\n")
    assert "unknown key slurm.bins" in doctor(nodes)["slurmctld"]
    settings.write_text('[placeholder]\naccount = "ops"\ntime = "10:00"\n')
    set_partitions(nodes, "PartitionName=main Nodes=ALL MaxTime=5", limits="ALL")
    assert list(doctor(nodes)) == ["placeholder"]
    settings.unlink()
    assert doctor(nodes) == {}


async def test_doctor_sees_an_old_map_in_a_running_job(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    begun = nodes.folder / "begun"
    nodes.cluster.submit("--gres=gpu:cuda1:1", script=f"touch {begun}; sleep 1000")
    nodes.cluster.until(begun.exists, "the job does not run")
    content = json.loads(nodes.map_file(nodes.node).read_text())
    first, second = content["devices"].values()
    content["devices"] = {"0": second, "1": first}
    nodes.map_file(nodes.node).write_text(json.dumps(content))
    assert [*doctor(nodes)] == ["Gres", "jobs"]


async def test_doctor_names_the_setting_that_harms(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    nodes.cluster.extra |= {"SuspendProgram": "/bin/true", "SuspendTime": "86400"}
    nodes.cluster.extra |= {"ResumeProgram": "/bin/true"}
    del nodes.cluster.extra["TaskProlog"]
    nodes.cluster.configure()
    nodes.cluster.kill("slurmctld", signal.SIGTERM)
    nodes.cluster.start_controller()
    nodes.cluster.until_idle()
    assert [*doctor(nodes)] == ["TaskProlog", "SuspendProgram"]


async def test_required_time_limit_is_a_setting(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    nodes.configure_slurm("JobSubmitPlugins=require_timelimit\nPriorityType=priority/multifactor")
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    assert "ime limit" in doctor(nodes)["placeholder"]
    nodes.engine(nodes.node, "sync", "--once", "--node", nodes.node)
    (told,) = await conditions(nodes)
    assert told.startswith("GPU cuda3 is not blocked in Slurm: sbatch: ")
    nodes.settings_file(nodes.node).write_text('[placeholder]\ntime = "1-00:00:00"\n')
    assert doctor(nodes) == {}
    nodes.sync_once()
    until_blocked(nodes, kernel)
