"""Settings and habits of sites, and what users' modules set: from public reports of GPU sites."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from support.other_users import ADA, home_of
from support.slurm_howto import PAGE
from support.slurm_nodes import NodesOf, SlurmNodes
from support.waiting import until

GPU = {"cuda.device": "1"}


def write_script(file: Path, *lines: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    file.chmod(0o755)


def until_it_runs(nodes: SlurmNodes, job: str) -> None:
    """Wait until a job's script sleeps, so that its task prolog is over."""
    nodes.cluster.until(lambda: "sleep" in names(nodes, job), f"job {job} does not run")


def names(nodes: SlurmNodes, job: str) -> list[str]:
    found = []
    for pid in nodes.cluster.processes(job):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


async def test_hooks_run_after_all_others_of_a_folder(slurm: NodesOf) -> None:
    """Slurm runs the scripts of a folder from z to a and from 9 to 0."""
    nodes = await slurm(gpu_count=2)
    order = nodes.folder / "order"
    for kind in ("prolog", "epilog"):
        folder = nodes.folder / f"{kind}.d"
        for name in ("00-health", "50-gpu", "zz-last"):
            write_script(folder / name, f"echo {kind} {name} >>{order}")
        (link,) = re.findall(rf"agentd-slurm-{kind} /etc/slurm/{kind}\.d/(\S+)", PAGE)
        write_script(folder / link, f"echo {kind} agentd >>{order}", f"exec {nodes.folder}/{kind}")
    nodes.configure_slurm(f"Prolog={nodes.folder}/prolog.d/*\nEpilog={nodes.folder}/epilog.d/*")
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    nodes.cluster.run("scancel", job)
    nodes.cluster.until_idle()
    assert await nodes.claims() == {}
    ran = [line.split() for line in order.read_text().splitlines()]
    for kind in ("prolog", "epilog"):
        assert [name for k, name in ran if k == kind][3:] == ["agentd"], ran


async def test_script_waits_for_the_prologs_of_all_nodes(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=2, gpu_count=1)
    second = nodes.cluster.nodes[1]
    prolog = (nodes.folder / "prolog").read_text().splitlines()[1:]
    slow = f"[ $SLURMD_NODENAME != {second} ] || /bin/sleep 2"
    write_script(nodes.folder / "prolog", slow, *prolog)
    (flags,) = re.findall(r"^PrologFlags=.*$", PAGE, re.MULTILINE)
    nodes.configure_slurm(flags)
    await nodes.daemons[second].running("notebooks", slots=GPU)
    ran = nodes.folder / "ran"
    job = nodes.cluster.submit("-N2", "--gres=gpu:1", script=f"touch {ran}; sleep 1000")
    nodes.cluster.until_requeued(job)
    assert not ran.exists()


async def test_output_of_a_job_has_no_lines_of_hooks(slurm: NodesOf) -> None:
    """Users may be unable to read the map, and parse what their programs print."""
    nodes = await slurm(gpu_count=2)
    nodes.map_file(nodes.node).chmod(0o600)
    output = home_of(nodes.cluster.folder / "users", ADA) / "printed"
    options = ("--gres=gpu:1", f"--output={output}", "--error=/dev/null")
    job = nodes.cluster.submit(*options, script="srun --overlap echo step", user=ADA)
    nodes.cluster.until_state(job, "COMPLETED")
    assert output.read_text() == "step\n"


async def test_task_of_an_inner_job_has_no_claim_of_an_outer_one(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    home = home_of(nodes.cluster.folder / "users", ADA)
    submit = f"sbatch --output={home}/inner-%j --wrap 'env; echo end'"
    script = f"srun --overlap env >{home}/step; {submit}; {submit} --gres=gpu:1; sleep 1000"
    outer = nodes.cluster.submit("--gres=gpu:1", script=script, user=ADA)
    assert outer == "1"
    own = {"1": ["AGENTD_AGENT=slurm", "AGENTD_CLAIM=slurm-1"], "2": []}
    own["3"] = ["AGENTD_AGENT=slurm", "AGENTD_CLAIM=slurm-3"]
    for job in ("2", "3"):
        nodes.cluster.until_state(job, "COMPLETED")
    files = {"1": home / "step", "2": home / "inner-2", "3": home / "inner-3"}
    for job, file in files.items():
        named = re.findall(r"^AGENTD_(?:AGENT|CLAIM)=.*$", file.read_text(), re.MULTILINE)
        assert sorted(named) == own[job], job


async def test_modules_of_a_user_do_not_lead_the_task_prolog(slurm: NodesOf) -> None:
    """They set SLURM_CLUSTERS, and bring a scontrol of another cluster or version."""
    nodes = await slurm(gpu_count=2)
    home = home_of(nodes.cluster.folder / "users", ADA)
    write_script(nodes.folder / "module/scontrol", "exit 1")
    path = f"PATH={nodes.folder}/module:$PATH"
    for own, exported in ((path, "ALL"), ("", "ALL,SLURM_CLUSTERS=other")):
        goes = home / "goes"
        goes.unlink(missing_ok=True)
        step = f"{own} srun --overlap --export={exported} touch {home}/ran"
        script = f"while ! [ -e {goes} ]; do sleep 0.1; done; {step}; sleep 1000"
        job = nodes.cluster.submit("--gres=gpu:cuda0:1", script=script, user=ADA)
        until_it_runs(nodes, job)
        assert (await nodes.daemon.call("DELETE", f"/v1/claims/slurm-{job}")).status == 204
        goes.touch()
        nodes.cluster.until_requeued(job)
        assert not (home / "ran").exists(), step
        nodes.cluster.run("scancel", job)
        nodes.cluster.until_idle()


async def test_gpu_that_an_ended_job_holds_is_blocked(slurm: NodesOf) -> None:
    """Slurm has the GPU free, so each next job would be sent back."""
    nodes = await slurm(gpu_count=2)
    cluster = nodes.cluster
    job = cluster.submit("--gres=gpu:cuda0:1", script="sleep 1000 & sleep 1000")
    cluster.until(lambda: names(nodes, job).count("sleep") == 2, "the job does not run")
    for pid in cluster.processes(job):
        if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd"):
            os.kill(pid, signal.SIGKILL)
    cluster.run("scancel", job)
    cluster.until_idle()
    orphans = cluster.processes(job)
    assert orphans, "Slurm ended the orphans"
    nodes.start_sync(nodes.node)
    words = ("squeue", "-h", "--name=agentd", "--states=RUNNING", "-o", "%b %k")
    blocked = f"gres:gpu:cuda0:1 agentd:slurm-{job}\n"
    cluster.until(lambda: cluster.run(*words) == blocked, "the GPU is not blocked")
    (told,) = await until(lambda: conditions(nodes))
    assert told.startswith(f"slurm-{job} is kept by processes in the cgroup job_{job}")
    next_job = cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"], f"slurm-{next_job}": ["cuda1"]})
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    cluster.until(lambda: cluster.run(*words) == "", "the GPU stays blocked")
    await nodes.until_claims({f"slurm-{next_job}": ["cuda1"]})
    await until(lambda: conditions(nodes), [])


async def test_placeholder_that_the_site_changes_is_told(slurm: NodesOf) -> None:
    """By job_submit.lua, for one: it is not made again at each look."""
    nodes = await slurm(gpu_count=2)
    lua = nodes.cluster.folder / "etc/job_submit.lua"
    changes = "job.tres_per_node = 'gres:gpu:1'; return slurm.SUCCESS"
    lua.write_text(
        f"function slurm_job_submit(job, parts, uid) {changes} end\n"
        "function slurm_job_modify(job, row, parts, uid) return slurm.SUCCESS end\n"
        "return slurm.SUCCESS\n"
    )
    nodes.configure_slurm("JobSubmitPlugins=lua")
    await nodes.daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda1"]})
    first = int(nodes.cluster.submit("--hold", script="true"))
    nodes.start_sync(nodes.node)
    await until(lambda: conditions(nodes), lambda rows: "JobSubmitPlugins" in "".join(rows))
    assert int(nodes.cluster.submit("--hold", script="true")) - first < 4


async def conditions(nodes: SlurmNodes) -> list[str]:
    """Return the conditions that the engine reports."""
    rows = (await nodes.daemon.get("/v1/node"))["conditions"]
    return [row["reason"] for row in rows if row["about"] == "engine/slurm"]


def restart_slurm(nodes: SlurmNodes) -> None:
    """Restart Slurm, whose files were changed meanwhile."""
    for name in (*nodes.cluster.nodes, "slurmctld"):
        nodes.cluster.kill(name, signal.SIGTERM)
    nodes.cluster.start_controller()
    for node in nodes.cluster.nodes:
        nodes.cluster.start_node(node)
    nodes.cluster.until_idle()


async def test_name_of_a_node_is_learned_from_its_slurmd(slurm: NodesOf) -> None:
    """As where slurmd is started with -N, and slurm.conf does not have the name of the host."""
    nodes = await slurm(gpu_count=1)
    file = nodes.cluster.folder / "etc/slurm.conf"
    file.write_text(re.sub("NodeHostname=[^ ]*", "NodeHostname=elsewhere", file.read_text()))
    restart_slurm(nodes)
    sync = nodes.start_sync("")
    told = await until(lambda: conditions(nodes))
    assert "Invalid node name" in told[0]
    assert re.search(r"FAIL Gres: .*not found", nodes.engine(nodes.node, "doctor").stdout)
    nodes.cluster.until_state(nodes.cluster.submit(script="true"), "COMPLETED")
    await until(lambda: conditions(nodes), [])
    assert sync.poll() is None
    assert nodes.engine(nodes.node, "doctor").returncode == 0


async def test_map_of_another_machine_is_a_condition(slurm: NodesOf) -> None:
    """As in an image of a node, or after a GPU was replaced: each job is sent back."""
    nodes = await slurm(gpu_count=1)
    text = nodes.map_file(nodes.node).read_text()
    nodes.map_file(nodes.node).write_text(text.replace("SIM-", "OTHER-"))
    nodes.sync_once()
    (told,) = await conditions(nodes)
    assert "device cuda0 (OTHER-" in told
    nodes.map_file(nodes.node).write_text(text)
    nodes.sync_once()
    assert await conditions(nodes) == []


async def test_lines_of_one_node_harm_no_other(slurm: NodesOf) -> None:
    """Where all nodes have one gres.conf, and slurmd does not start without its device files."""
    nodes = await slurm(nodes=2, gpu_count=1)
    first, second = nodes.cluster.nodes
    dev = nodes.cluster.own / "dev"
    words = ("--agent=slurm", f"--files={dev}", f"--node={first}")
    printed = nodes.agentctl(first, "slurm", "gres", *words)
    (nodes.folder / second / "dev/cuda0").unlink()
    del nodes.cluster.gres[second]
    nodes.cluster.configure()
    lines = re.findall(r"^.*Name=gpu .*$", printed, re.MULTILINE)
    (nodes.cluster.folder / "etc/gres.conf").write_text("\n".join(lines) + "\n")
    restart_slurm(nodes)
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]}, first)
