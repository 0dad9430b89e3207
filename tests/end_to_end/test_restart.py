"""Kernels survive stops, kills and upgrades of agentd, on both runtimes."""

import contextlib
import signal
from pathlib import Path

import pytest

from agentd.core.kernel.plan import kernel_name
from support.daemon import AGENTS, BASE, Daemon, gpus, signal_and_wait


def identity(kernel: dict) -> tuple:
    return kernel["container_id"], kernel["pid"], kernel["started_at"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_kernels_run_on_and_are_adopted(daemon: Daemon, number: int) -> None:
    await daemon.start()
    before = [
        await daemon.running(kernel_id="k1", slots={"cuda.device": 1}),
        await daemon.running("agent-2", kernel_id="k2", slots={"mem": "1g"}),
    ]
    pids = [daemon.main_pid(kernel, daemon.test_engine) for kernel in before]
    assert await daemon.stop(number) == (0 if number == signal.SIGTERM else -number)
    await daemon.start()
    after = await daemon.get("/v1/kernels")
    assert after == before
    assert [daemon.main_pid(kernel, daemon.test_engine) for kernel in after] == pids
    assert (await daemon.device("cuda0"))["holders"] == [
        {"kernel_id": "k1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]
    again = await daemon.create(kernel_id="k1", slots={"cuda.device": 1})
    assert (again.status, again.json) == (200, before[0])


async def test_an_end_while_agentd_was_down_is_known_afterwards(daemon: Daemon) -> None:
    await daemon.start()
    kernel = await daemon.trapping("trap 'exit 9' TERM", kernel_id="k1", slots={"cuda.device": 2})
    pid = daemon.main_pid(kernel, daemon.test_engine)
    await daemon.stop(signal.SIGKILL)
    signal_and_wait(pid, signal.SIGTERM)
    await daemon.start()
    ended = await daemon.until("k1", "terminated")
    assert ended["exit_code"] == 9
    assert await daemon.free("cuda.device") == "2"


async def test_a_changed_mode_holds_the_device_until_its_kernel_ends(daemon: Daemon) -> None:
    await daemon.start(AGENTS + gpus(2, "shares"))
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.shares": "0.5"})
    pid = daemon.main_pid(kernel, daemon.test_engine)
    await daemon.restart(AGENTS + gpus(2, "device"))
    after = await daemon.get("/v1/kernels/k1")
    assert identity(after) == identity(kernel)
    assert daemon.main_pid(after, daemon.test_engine) == pid
    assert after["unknown_slots"] == {"cuda.shares": "0.5"}
    device = await daemon.device("cuda0")
    assert device["state"] == "held"
    assert "k1" in device["reason"]
    assert device["holders"] == [
        {"kernel_id": "k1", "amount": "0.5", "amounts": {"cuda.shares": "0.5"}}
    ]
    assert (device["slot"], device["free"]) == ("cuda.device", "0")
    assert await daemon.free("cuda.device") == "1"
    other = await daemon.running(slots={"cuda.device": 1})
    assert list(other["allocation"]["cuda"]["cuda.device"]) == ["cuda1"]
    refused = await daemon.create(slots={"cuda.device": 1})
    assert refused.status == 409
    assert any("cuda.shares" in row["reason"] for row in refused.json["explain"])
    await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert (await daemon.device("cuda0"))["state"] == "ok"
    assert await daemon.free("cuda.device") == "1"


async def test_a_plugin_that_is_gone_leaves_its_kernels_alone(daemon: Daemon) -> None:
    await daemon.start()
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await daemon.restart(AGENTS)
    after = await daemon.get("/v1/kernels/k1")
    assert identity(after) == identity(kernel)
    assert after["state"] == "running"
    assert after["unknown_slots"] == {"cuda.device": "1"}
    assert after["degraded"]
    device = await daemon.device("cuda0")
    assert (device["state"], device["free"]) == ("gone", "0")
    assert device["holders"] == [
        {"kernel_id": "k1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]
    refused = await daemon.create(slots={"cuda.device": 1})
    assert refused.json["code"] == "UnsupportedResource"
    await daemon.restart(AGENTS + gpus(2))
    assert (await daemon.device("cuda0"))["state"] == "ok"
    assert (await daemon.get("/v1/kernels/k1"))["unknown_slots"] == {}


async def test_a_moved_partition_does_not_free_what_runs(daemon: Daemon) -> None:
    agents = '[[agents]]\nid = "agent-{}"\n[agents.resource]\ncpu = 4\nmem = "4g"\n'
    part = 'devices = {{ cuda = ["cuda{}"] }}\n'
    head = '[resource]\nallocation-mode = "manual"\n'
    one, two = agents.format(1), agents.format(2)
    await daemon.start(head + one + part.format(0) + two + part.format(1) + gpus(2))
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await daemon.restart(head + one + part.format(1) + two + part.format(0) + gpus(2))
    after = await daemon.get("/v1/kernels/k1")
    assert identity(after) == identity(kernel)
    assert (await daemon.device("cuda0"))["agents"] == ["agent-2"]
    refused = await daemon.create("agent-2", slots={"cuda.device": 1})
    assert refused.status == 409
    assert any("k1" in row["reason"] for row in refused.json["explain"])
    await daemon.restart(head + two + part.format(0) + gpus(2))
    assert (await daemon.get("/v1/kernels/k1"))["agent_id"] == "agent-1"
    assert (await daemon.create("agent-2", slots={"cuda.device": 1})).status == 409


async def test_memory_below_the_held_amount_is_overcommitted(daemon: Daemon) -> None:
    await daemon.start()
    await daemon.running(kernel_id="k1", slots={"mem": "4g"})
    daemon.configure(AGENTS + gpus(), BASE.replace('mem = "8g"', 'mem = "2g"'))
    await daemon.restart()
    memory = await daemon.device("root")
    assert (memory["state"], memory["free"]) == ("overcommitted", "0")
    assert (await daemon.create(slots={"mem": "64m"})).status == 409
    await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert (await daemon.device("root"))["state"] == "ok"


def devices(*ids: str) -> str:
    listed = ", ".join(
        f'{{ id = "cuda{n}", stable-id = "GPU-{name}" }}' for n, name in enumerate(ids)
    )
    return f'[plugins.cuda]\nplugin = "sim"\ndevices = [{listed}]\n'


async def test_ids_follow_devices_over_a_changed_driver_order(plain: Daemon) -> None:
    await plain.start(AGENTS + devices("a", "b", "c"))
    await plain.running(kernel_id="k1", slots={"cuda.device": 1})
    await plain.restart(AGENTS + devices("c", "b", "a"))
    stable = {d["id"]: d["stable_id"] for d in await plain.get("/v1/devices")}
    assert stable["cuda0"] == "GPU-a"
    assert stable["cuda2"] == "GPU-c"
    assert (await plain.device("cuda0"))["holders"][0]["kernel_id"] == "k1"


async def test_missing_device_keeps_its_index_until_forgotten(plain: Daemon) -> None:
    split = '[resource]\nallocation-mode = "auto-split"\n' + AGENTS
    await plain.start(split + devices("a", "b", "c", "d"))
    await plain.restart(split + devices("b", "c", "d"))
    parts = {a["agent_id"]: a["devices"]["cuda"] for a in await plain.get("/v1/agents")}
    assert parts == {"agent-1": ["cuda0", "cuda1"], "agent-2": ["cuda2", "cuda3"]}
    assert (await plain.device("cuda0"))["state"] == "gone"
    assert await plain.free("cuda.device") == "1"
    assert any("cuda0 is gone" in w for w in (await plain.get("/v1/node"))["warnings"])
    conflict = await plain.call("DELETE", "/v1/devices/cuda/cuda1")
    assert (conflict.status, conflict.json["code"]) == (409, "Conflict")
    assert (await plain.call("DELETE", "/v1/devices/cuda/cuda0")).status == 204
    await plain.restart(split + devices("b", "c", "d"))
    parts = {a["agent_id"]: a["devices"]["cuda"] for a in await plain.get("/v1/agents")}
    assert parts == {"agent-1": ["cuda1", "cuda2"], "agent-2": ["cuda3"]}


@pytest.mark.docker
async def test_an_unreadable_container_keeps_back_all_it_might_hold(dockered: Daemon) -> None:
    daemon = dockered
    await daemon.start()
    labels = {
        "io.agentd.schema": "99",
        "io.agentd.node": daemon.node,
        "io.agentd.agent": "agent-1",
        "io.agentd.kernel": "k1",
        "io.agentd.record": '{"schema": 99}',
        "io.agentd.devices": "what?",
    }
    config = {
        "Image": "agentd-test:1",
        "Cmd": ["sleep", "1000"],
        "Labels": labels,
        "HostConfig": {"NetworkMode": "none", "CpusetCpus": "1", "Memory": 64 * 2**20},
    }
    engine = daemon.test_engine
    await daemon.stop()  # one that is there would remove what never ran before it is started
    made = engine.call("POST", f"/containers/create?name={kernel_name(daemon.node, 'k1')}", config)
    engine.call("POST", f"/containers/{made['Id']}/start")
    await daemon.start()
    kernel = await daemon.get("/v1/kernels/k1")
    assert kernel["state"] == "unreadable"
    assert "newer" in kernel["reason"]
    assert await daemon.free("cuda.device") == "0"
    assert await daemon.free("cpu") == "7"
    assert (await daemon.device("cuda0"))["state"] == "held"
    foreign = engine.call("POST", "/containers/create?name=somebody-else", config)
    engine.call("POST", f"/containers/{foreign['Id']}/start")
    await daemon.restart()
    assert [k["kernel_id"] for k in await daemon.get("/v1/kernels")] == ["k1"]
    assert (await daemon.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert [c["Id"] for c in engine.containers()] == [foreign["Id"]]
    assert await daemon.free("cuda.device") == "2"
    engine.call("DELETE", f"/containers/{foreign['Id']}?force=1")


@pytest.mark.docker
async def test_container_removed_meanwhile_is_lost(dockered: Daemon) -> None:
    daemon = dockered
    await daemon.start()
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await daemon.stop()
    daemon.test_engine.call("DELETE", f"/containers/{kernel['container_id']}?force=1")
    for _ in range(2):
        await daemon.restart()
        assert (await daemon.get("/v1/kernels/k1"))["state"] == "lost"
        assert await daemon.free("cuda.device") == "2"
    assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
    await daemon.restart()
    assert await daemon.get("/v1/kernels") == []


@pytest.mark.docker
async def test_unavailable_runtime_delays_no_other(dockered: Daemon) -> None:
    """An engine that was uninstalled keeps what it was last known to hold, and nothing more."""
    daemon, engine_socket = dockered, dockered.engine
    await daemon.start()
    first = await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
    await daemon.stop()
    daemon.runtime, daemon.engine = "process", daemon.folder / "nowhere.sock"
    daemon.configure()
    for _ in range(2):
        await daemon.restart()
        kernel = await daemon.get("/v1/kernels/k1")
        assert (kernel["state"], kernel["allocation"]["cuda"]) == (
            "running",
            {"cuda.device": {"cuda0": "1"}},
        )
        second = await daemon.running(kernel_id="k2", slots={"cuda.device": 1})
        assert list(second["allocation"]["cuda"]["cuda.device"]) == ["cuda1"]
        assert (await daemon.call("DELETE", "/v1/kernels/k2?timeout=0")).status == 204
    refused = await daemon.call("DELETE", "/v1/kernels/k1")
    assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
    answers = await daemon.call("DELETE", "/v1/runtimes/process")
    assert (answers.status, answers.json["code"]) == (409, "Conflict")
    assert (await daemon.call("DELETE", "/v1/runtimes/docker")).status == 204
    assert await daemon.get("/v1/kernels") == []
    assert [item["name"] for item in await daemon.get("/v1/runtimes")] == ["process"]
    await daemon.restart()
    assert await daemon.free("cuda.device") == "2"
    unknown = await daemon.call("DELETE", "/v1/runtimes/docker")
    assert (unknown.status, unknown.json["code"]) == (404, "UnknownRuntime")
    daemon.engine = engine_socket
    daemon.test_engine.call("DELETE", f"/containers/{first['container_id']}?force=1")


@pytest.mark.docker
async def test_a_runtime_switch_leaves_the_other_s_kernels_running(dockered: Daemon) -> None:
    await dockered.start()
    first = await dockered.running(kernel_id="k1", slots={"cuda.device": 1})
    await dockered.stop()
    dockered.runtime = "process"
    dockered.configure()
    await dockered.start()
    assert (await dockered.get("/v1/kernels/k1"))["container_id"] == first["container_id"]
    second = await dockered.running(kernel_id="k2", slots={"cuda.device": 1})
    assert list(second["allocation"]["cuda"]["cuda.device"]) == ["cuda1"]
    assert (await dockered.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert dockered.test_engine.containers() == []


@pytest.mark.needs("root")
async def test_a_reload_does_not_change_half_of_an_agent(plain: Daemon) -> None:
    """Agents wait for a restart, and so does the user that they run as."""
    await plain.start(AGENTS)
    user = '[[agents]]\nid = "agent-1"\nuser = "daemon"\n[[agents]]\nid = "agent-2"\n'
    plain.configure(user)
    plain.reload()
    await plain.until_logged("daemon.reloaded")
    assert "agents" in plain.log.partition("needs_restart")[2].partition("\n")[0]
    with contextlib.suppress(BlockingIOError):
        while plain.notes.recv(4096):  # the reload was told of as well
            pass
    for wanted in ("nobody", "daemon"):
        made = await plain.running(command=["sleep", "1000"])
        assert Path(f"/proc/{made['pid']}").owner() == wanted
        await plain.restart(user)
