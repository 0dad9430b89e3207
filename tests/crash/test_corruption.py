"""Damaged records, a state folder that fails, and a machine that runs out or is set wrong.

The daemon starts, says what is wrong in one line each, touches nothing that it is not sure
of, and serves everything else.
"""

import json
import shutil
from pathlib import Path

import pytest

from agentd.core.kernel.record import SCHEMA
from support.checked_node import NODE, ONE, CheckedNode, start_time
from support.daemon import Daemon
from support.damage import flipped, resealed
from support.engine import Engine
from support.waiting import until

pytestmark = pytest.mark.started


def flip(path: Path, bit: int = 100) -> None:
    path.write_bytes(flipped(path.read_bytes(), bit))


def changed(path: Path, **members: object) -> None:
    text = path.read_text()
    write = resealed if "sum" in json.loads(text) else changed_text
    path.write_text(write(text, **members))


def changed_text(text: str, **members: object) -> str:
    return json.dumps(json.loads(text) | members)


def flip_schema(path: Path) -> None:
    """Make a record's schema 3 by one bit."""
    text = path.read_bytes()
    path.write_bytes(flipped(text, 8 * (text.index(b'"schema":2') + len(b'"schema":'))))


INIT = {"pid": 1, "start_time": start_time(1)}
KEPT_BY_INIT = {"shim_pid": 1, "shim_start_time": start_time(1)}
MALFORMED = {
    "record-truncated": lambda f: (f / "record.json").write_text("{"),
    "record-empty": lambda f: (f / "record.json").write_text(""),
    "record-gone": lambda f: (f / "record.json").unlink(),
    "record-flipped": lambda f: flip(f / "record.json"),
    "record-schema-flipped": lambda f: flip_schema(f / "record.json"),
    "record-newer": lambda f: changed(f / "record.json", schema=SCHEMA + 1),
    "record-unknown-members": lambda f: changed(f / "record.json", colour="red"),
    "identity-truncated": lambda f: (f / "identity.json").write_text("{"),
    "identity-gone": lambda f: (f / "identity.json").unlink(),
    "identity-flipped": lambda f: flip(f / "identity.json", 17),
    "identity-unknown-members": lambda f: changed(f / "identity.json", colour="red"),
    "identity-endless": lambda f: changed(f / "identity.json", pid=float("inf")),
    "identity-deep": lambda f: (f / "identity.json").write_text("[" * 100_000),
    "identity-other-boot": lambda f: changed(f / "identity.json", boot_id="another"),
    "identity-other-start": lambda f: changed(f / "identity.json", start_time=1),
    "identity-of-init": lambda f: changed(f / "identity.json", **INIT, **KEPT_BY_INIT),
    "identity-of-init-kept": lambda f: changed(f / "identity.json", **INIT),
    "record-of-another": lambda f: changed(f / "record.json", kernel_id="another"),
    "record-of-another-node": lambda f: changed(f / "record.json", node_id="another"),
    "record-deep": lambda f: (f / "record.json").write_text("[" * 100_000),
    "exit-is-a-folder": lambda f: (f / "exit.json").mkdir(),
    "exit-is-a-loop": lambda f: (f / "exit.json").symlink_to("exit.json"),
    "exit-truncated": lambda f: (f / "exit.json").write_text("{"),
    "folder-empty": lambda f: [path.unlink() for path in f.iterdir()],
    "folder-gone": shutil.rmtree,
}
REASONS = {
    "record-gone": "its record is missing; recovered",
    "folder-empty": "its record is missing; recovered",
    "folder-gone": "its record is missing; recovered",
    "record-empty": "unreadable record (its file is empty or cannot be read)",
    "record-of-another": "unreadable record (it is the record of kernel another of node",
    "record-of-another-node": "of kernel record-of-another-node of node another)",
    "record-flipped": "unreadable record (",
    "record-schema-flipped": "unreadable record (it is damaged",
}
AS_BEFORE = ("record-unknown-members", "exit-is-a-folder", "exit-is-a-loop", "exit-truncated")


@pytest.mark.needs("cgroups")
async def test_a_damaged_kernel_harms_only_itself_and_is_charged(process_node: CheckedNode) -> None:
    node, daemon = process_node, process_node.daemon
    before = {name: await daemon.running(kernel_id=name, slots=ONE) for name in MALFORMED}
    census, lives = await node.check(), node.live_commands()
    await node.kill()
    for name, damage in MALFORMED.items():
        damage(daemon.folder / "state" / "kernels" / name)
    await node.start()
    assert node.live_commands() == lives
    after = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    for name, kernel in before.items():
        now = after[name]
        expected = "unreadable" if name == "record-newer" else "running"
        assert (now["state"], now["pid"]) == (expected, kernel["pid"]), name
        assert now["allocation"] == kernel["allocation"], name
        assert (now["reason"] == "") == (name in AS_BEFORE or "identity" in name), now
        assert REASONS.get(name, "") in now["reason"]
        assert now["created_at"] > "2000", name
    looked = await node.snapshot()
    assert looked.holdings == census.holdings
    assert (await daemon.create(slots={"cuda.device": 32 - len(MALFORMED) + 1})).status == 409
    assert (await daemon.create(slots={"cuda.device": 32 - len(MALFORMED)})).status == 201
    for name in MALFORMED:
        assert (await node.remove(name)).status == 204, (name, daemon.log[-3000:])
    assert not [name for name in node.live_commands() if name in MALFORMED]
    await node.check()


@pytest.mark.needs("cgroups")
async def test_identity_of_another_kernel_ends_no_other(process_node: CheckedNode) -> None:
    node, bundles = process_node, process_node.daemon.folder / "state" / "kernels"
    for name in ("k1", "k2"):
        await node.daemon.running(kernel_id=name, slots=ONE)
    lives = node.live_commands()
    await node.kill()
    other = (bundles / "k2" / "identity.json").read_bytes()
    (bundles / "k1" / "identity.json").write_bytes(other)
    await node.start()
    assert (await node.remove("k1")).status == 204
    assert node.live_commands() == {"k2": lives["k2"]}
    await node.check()


def edited(path: Path, **members: str) -> None:
    """Change the GPU in a record."""
    record = json.loads(path.read_text())
    for share in record["allocation"]:
        if share["slot"] == "cuda.device":
            share.update(members)
    changed(path, allocation=record["allocation"])


def repeated(path: Path) -> None:
    """Name each device of a record twice."""
    record = json.loads(path.read_text())
    changed(path, allocation=record["allocation"] * 2)


FREED = {
    "amount-zero": (lambda f: edited(f, amount="0"), "got 0"),
    "nothing": (lambda f: changed(f, allocation=[]), "says nothing else"),
    "another-device": (
        lambda f: edited(f, id="cuda31", stable_id="SIM-cuda-cuda31"),
        "cuda/cuda31/",
    ),
    "another-stable-id": (lambda f: edited(f, stable_id="X-1"), "@X-1"),
    "unlisted-device": (lambda f: edited(f, id="evil0", stable_id="X-2"), "cuda/evil0/"),
    "another-slot": (lambda f: edited(f, slot="cuda.shares"), "/cuda.shares=1@"),
    "more": (lambda f: edited(f, amount="7"), "/cuda.device=7@"),
    "twice": (repeated, "duplicate device"),
}


@pytest.mark.needs("cgroups")
async def test_an_edited_record_frees_no_device(process_node: CheckedNode) -> None:
    node, daemon = process_node, process_node.daemon
    before = {name: await daemon.running(kernel_id=name, slots=ONE) for name in FREED}
    await node.kill()
    for name, (edit, _) in FREED.items():
        edit(daemon.folder / "state" / "kernels" / name / "record.json")
    await node.start()
    devices = {d["id"]: d for d in await daemon.get("/v1/devices")}
    warnings = await daemon.warnings()
    for name, (_, said) in FREED.items():
        kernel = await daemon.get(f"/v1/kernels/{name}")
        assert (kernel["state"], kernel["pid"]) == ("running", before[name]["pid"])
        (gpu,) = before[name]["allocation"]["cuda"]["cuda.device"]
        assert name in [h["kernel_id"] for h in devices[gpu]["holders"]]
        assert gpu in kernel["allocation"]["cuda"]["cuda.device"]
        allocated = [devices[gpu][member] for member in ("state", "allocated", "free")]
        assert allocated == ["ok", "1", "0"], name
        assert said in kernel["reason"]
        assert "device label" in kernel["reason"]
        assert f"kernel {name}: {kernel['reason']}" in warnings
    assert "evil0" not in devices
    assert {devices[name]["state"] for name in ("X-1", "X-2")} == {"gone"}
    assert await daemon.free("cuda.device") == str(32 - len(FREED) - 1)
    (remembered,) = (daemon.folder / "state").glob("*/another-device.json")
    held = {share["id"] for share in json.loads(remembered.read_text())["allocation"]}
    assert held >= {"cuda31", *before["another-device"]["allocation"]["cuda"]["cuda.device"]}


FORGERY = """
exec env AGENTD_NODE={node} AGENTD_KERNEL=k1 AGENTD_SHIM=1 AGENTD_AGENT=agent-2 \\
  AGENTD_DEVICES=cuda/cuda9/cuda.device=1@SIM-cuda-cuda9 sh -c 'sleep 1000 & wait' shim.py
"""


async def test_claims_of_a_kernel_prove_nothing(node: CheckedNode) -> None:
    """A kernel calls itself another one, and a shim, and starts a shim.py."""
    daemon = node.daemon
    await daemon.running("agent-2", kernel_id="k1", slots=ONE)
    script = FORGERY.format(node=node.node_id)
    await daemon.running(kernel_id="forger", command=["sh", "-c", script], slots=ONE)
    before = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    await node.kill()
    (daemon.folder / "state" / "intents" / "k9.json").write_text("{")
    await node.start()
    after = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    assert after["k1"] == before["k1"]
    assert {m: after["forger"][m] for m in ("allocation", "agent_id", "state")} == {
        m: before["forger"][m] for m in ("allocation", "agent_id", "state")
    }
    assert after.keys() == {"k1", "forger", "k9"}
    assert (await node.remove("forger")).status == 204
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"


FILES = {
    "devices.json": ("truncated", '{"devices": ['),
    "node.json": ("of another shape", '["node"]'),
    "intents/gone.json": ("an intent of nothing", "{"),
}


async def test_damaged_state_files_are_warnings(node: CheckedNode) -> None:
    daemon = node.daemon
    await daemon.running(kernel_id="k1", slots=ONE)
    await daemon.call("POST", "/v1/devices/cuda/cuda7/drain")
    before, lives = await node.check(), node.live_commands()
    await node.kill()
    state = daemon.folder / "state"
    for name, (_, text) in FILES.items():
        (state / name).write_text(text)
    await node.start()
    warnings = await daemon.warnings()
    for name in ("devices.json", "node.json"):
        assert len([w for w in warnings if name in w and "set aside" in w]) == 1, warnings
        assert (state / f"{name}.unreadable").read_text() == FILES[name][1]
    gone = await daemon.get("/v1/kernels/gone")
    assert "its record cannot be read" in gone["reason"]
    assert node.live_commands() == lives
    refused = await daemon.create(slots=ONE)
    assert refused.status == 409  # the devices of 'gone' are quarantined
    await node.check(before)
    await until(daemon.kernel_ids, {"k1"})
    assert (await daemon.create(slots=ONE)).status == 201


async def test_newer_state_files_are_read_as_far_as_known(process_node: CheckedNode) -> None:
    node, daemon = process_node, process_node.daemon
    await daemon.call("POST", "/v1/devices/cuda/cuda7/drain")
    await node.kill()
    devices = daemon.folder / "state" / "devices.json"
    changed(devices, schema=99, colour="red")
    text = devices.read_text()
    await node.start()
    assert (await daemon.device("cuda7"))["state"] == "drained"
    assert any("by a newer agentd" in w for w in await daemon.warnings())
    assert (daemon.folder / "state" / "devices.json.schema-99").read_text() == text


EDITS = {
    "record-truncated": {"io.agentd.record": "{"},
    "devices-wrong": {"io.agentd.devices": "cuda/cuda9/cuda.device=1@SIM-cuda-cuda9"},
    "agent-wrong": {"io.agentd.agent": "agent-9"},
    "schema-wrong": {"io.agentd.schema": "what?"},
    "kernel-wrong": {"io.agentd.kernel": "somebody"},
    "all-wrong": {"io.agentd.record": "?", "io.agentd.devices": "?"},
}


@pytest.mark.docker
async def test_edited_labels_release_no_device(folder: Path, own_engine: Engine) -> None:
    node = CheckedNode(Daemon(folder, "docker", own_engine))
    daemon = node.daemon
    await node.start(text=NODE)
    before = {name: await daemon.running(kernel_id=name, slots=ONE) for name in EDITS}
    lives = set(node.live_commands().values())
    await node.kill()
    own_engine.stop()
    for name, labels in EDITS.items():
        path = own_engine.folder / "data/containers" / before[name]["container_id"]
        content = json.loads((path / "config.v2.json").read_text())
        content["Config"]["Labels"] |= labels
        (path / "config.v2.json").write_text(json.dumps(content))
    own_engine.start()
    await node.start()
    after = {k["container_id"]: k for k in await daemon.get("/v1/kernels")}
    states = {name: after[kernel["container_id"]]["state"] for name, kernel in before.items()}
    assert states == dict.fromkeys(EDITS, "running") | {"all-wrong": "unreadable"}
    for name in states.keys() - {"all-wrong"}:
        held = after[before[name]["container_id"]]["allocation"]["cuda"]["cuda.device"]
        assert set(held) >= set(before[name]["allocation"]["cuda"]["cuda.device"])
    assert {(pid, start_time(pid)) for pid, _ in lives} == lives
    assert await daemon.free("cuda.device") == "0"
    assert (await node.remove("all-wrong")).status == 204
    assert await daemon.free("cuda.device") == str(32 - len(EDITS))
    for kernel in after.values():
        await node.remove(kernel["kernel_id"])
    assert own_engine.containers() == []
    await daemon.close()
