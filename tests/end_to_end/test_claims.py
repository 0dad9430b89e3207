"""Claims, through the HTTP socket."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentd.client.paths import next_query
from support.daemon import AGENTS, Answer, Daemon, gpus
from support.daemon_pool import Serving
from support.waiting import until

NODE = AGENTS + gpus(4)
ONE = {"cuda.device": 1}


@pytest.fixture
async def node(serving_process: Serving) -> Daemon:
    """agentd with four GPUs and two agents."""
    return await serving_process(NODE)


async def claim(daemon: Daemon, claim_id: str, holder: Any = None, **body: Any) -> Answer:
    body.setdefault("slots", ONE)
    content = {"claim_id": claim_id, "holder": holder or {"name": claim_id}, **body}
    return await daemon.call("POST", "/v1/agents/agent-1/claims", content)


async def claimed(daemon: Daemon, claim_id: str, holder: Any = None, **body: Any) -> dict[str, Any]:
    answer = await claim(daemon, claim_id, holder, **body)
    assert answer.status == 201, answer.content
    return answer.json


async def until_ended(daemon: Daemon, claim_id: str) -> None:
    await until(
        lambda: daemon.call("GET", f"/v1/claims/{claim_id}"),
        lambda value: value.status == 404,
        within_s=5,
    )


async def free(daemon: Daemon) -> str:
    """Return the free GPUs, once the plugin is there after a start."""
    await until(
        lambda: daemon.get("/v1/agents/agent-1"),
        lambda value: "cuda.device" in value["slots"],
        within_s=30,
    )
    return await daemon.free("cuda.device")


async def counts(daemon: Daemon) -> dict[str, float]:
    text = (await daemon.call("GET", "/metrics")).content.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines if name.startswith("agentd_claim")}


def problem(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


async def test_a_claim_holds_devices_until_it_is_released(node: Daemon) -> None:
    made = await claimed(node, "c1", slots={"cuda.device": 2}, labels={"engine": "test"})
    assert made["state"] == "held"
    assert made["slots"] == {"cuda.device": "2"}
    assert made["allocation"] == {"cuda": {"cuda.device": {"cuda0": "1", "cuda1": "1"}}}
    assert made["edits"]["env"] == {"CUDA_VISIBLE_DEVICES": "cuda0,cuda1"}
    assert made["holder"] == {"name": "c1", "survives_reboot": False}
    assert made["expires_at"] is None
    assert (await node.device("cuda0"))["holders"] == [
        {"claim_id": "c1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]
    assert await free(node) == "2"
    assert await node.get("/v1/claims/c1") == made
    assert await node.get("/v1/claims?label=engine=test&agent=agent-1") == [made]
    assert await node.get("/v1/claims?agent=agent-2") == []
    again = await claim(node, "c1", slots={"cuda.device": 2}, labels={"engine": "test"})
    assert (again.status, again.json) == (200, made)
    assert problem(await claim(node, "c1")) == (409, "ClaimConflict")
    assert (await node.call("DELETE", "/v1/claims/c1")).status == 204
    assert problem(await node.call("DELETE", "/v1/claims/c1")) == (404, "UnknownClaim")
    assert await free(node) == "4"


async def test_a_claim_and_a_kernel_of_one_id_are_two_holders(node: Daemon) -> None:
    await claimed(node, "same")
    await node.running(kernel_id="same", slots=ONE)
    assert await free(node) == "2"
    await node.call("DELETE", "/v1/kernels/same?timeout=0")
    assert await free(node) == "3"
    assert (await node.get("/v1/claims/same"))["state"] == "held"


async def test_a_claim_ends_with_its_process(node: Daemon) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    await claimed(node, "c1", {"pid": child.pid})
    child.kill()
    child.wait()
    await until_ended(node, "c1")
    assert await free(node) == "4"
    assert not list((node.folder / "state/claims").iterdir())


async def test_a_process_is_named_by_itself_its_parent_or_its_start(node: Daemon) -> None:
    script = "sleep 1000 & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    try:
        assert problem(await claim(node, "c1", {"pid": grandchild})) == (422, "InvalidRequest")
        start = int(Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[19])
        wrong = await claim(node, "c1", {"pid": grandchild, "start_time": start + 1})
        assert problem(wrong) == (422, "InvalidRequest")
        await claimed(node, "c1", {"pid": grandchild, "start_time": start})
        absent = await claim(node, "c2", {"pid": 2**22})
        assert problem(absent) == (422, "InvalidRequest")
    finally:
        os.kill(grandchild, signal.SIGKILL)
        parent.wait()
    await until_ended(node, "c1")


@pytest.mark.needs("root")  # to show it another boot
async def test_claims_survive_a_restart_and_end_with_the_boot(node: Daemon) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    dead = subprocess.Popen(["sleep", "1000"])
    try:
        await claimed(node, "process", {"pid": child.pid})
        await claimed(node, "dead", {"pid": dead.pid})
        await claimed(node, "named")
        await claimed(node, "lasting", {"name": "x", "survives_reboot": True})
        before = await node.get("/v1/claims")
        await node.stop(signal.SIGKILL)
        dead.kill()
        dead.wait()
        await node.start()
        await until_ended(node, "dead")
        assert await node.get("/v1/claims") == [c for c in before if c["claim_id"] != "dead"]
        assert await free(node) == "1"
        await node.stop(signal.SIGKILL)
        child.kill()
        child.wait()
        node.boot_id = "11111111-1111-1111-1111-111111111111"
        await node.start()
        assert [c["claim_id"] for c in await node.get("/v1/claims")] == ["lasting"]
        assert await free(node) == "3"
    finally:
        await node.stop()  # it would live on in that boot, for the tests after this one
        node.boot_id = ""
        for process in (child, dead):
            process.kill()
            process.wait()


async def test_unreadable_claim_withholds_devices_until_its_release(node: Daemon) -> None:
    await claimed(node, "c1")
    await node.stop()
    record = node.folder / "state/claims/c1.json"
    record.unlink()  # its mode allows no writing
    record.write_text("{")
    await node.start()
    assert await free(node) == "0"
    assert any("claim c1" in warning for warning in (await node.get("/v1/node"))["warnings"])
    assert (await node.call("DELETE", "/v1/claims/c1")).status == 204
    assert await free(node) == "4"


async def test_a_create_takes_the_devices_of_a_claim_over(node: Daemon) -> None:
    await claimed(node, "c1", slots={"cuda.device": 2})
    dry = await node.create(query="?dry_run=1", kernel_id="k1", claim="c1", slots=ONE)
    rows = {row["device"]: row["free"] for row in dry.json["explain"]["cuda.device"]}
    assert rows == {"cuda0": "1", "cuda1": "1", "cuda2": "0", "cuda3": "0"}
    kernel = await node.running(kernel_id="k1", claim="c1")
    assert kernel["slots"] == {"cpu": "1", "cuda.device": "2", "mem": "268435456"}
    assert set(kernel["allocation"]["cuda"]["cuda.device"]) == {"cuda0", "cuda1"}
    assert kernel["claim_id"] == "c1"
    assert problem(await node.call("GET", "/v1/claims/c1")) == (404, "UnknownClaim")
    assert await free(node) == "2"
    assert [k["kernel_id"] for k in await node.get("/v1/kernels?claim=c1")] == ["k1"]
    assert await node.get("/v1/kernels?claim=c2") == []


async def test_dry_run_from_a_claim_offers_its_drained_device(node: Daemon) -> None:
    await claimed(node, "c1", slots={"cuda.device": 2})
    await node.call("POST", "/v1/devices/cuda/cuda0/drain")
    dry = await node.create(query="?dry_run=1", kernel_id="k1", claim="c1", slots=ONE)
    rows = {row.pop("device"): row for row in dry.json["explain"]["cuda.device"]}
    assert rows["cuda0"] == {"free": "1", "considered": True, "given": "1", "reason": ""}
    kernel = await node.running(kernel_id="k1", claim="c1", slots=ONE)
    await node.call("POST", "/v1/devices/cuda/cuda0/undrain")
    assert kernel["allocation"] == dry.json["allocation"]
    assert await free(node) == "3", "the rest of the claim is free"


async def test_a_failed_create_gives_the_claim_its_devices_back(node: Daemon) -> None:
    before = await claimed(node, "c1", slots={"cuda.device": 2})
    await node.call("POST", "/v1/devices/cuda/cuda0/drain")
    failed = await node.create(kernel_id="k1", claim="c1", command=["/nowhere"])
    await node.call("POST", "/v1/devices/cuda/cuda0/undrain")
    assert failed.status == 422, failed.content
    assert await node.get("/v1/claims/c1") == before
    assert (await node.device("cuda0"))["holders"] == [
        {"claim_id": "c1", "amount": "1", "amounts": {"cuda.device": "1"}}
    ]
    await node.running(kernel_id="k2", claim="c1")


async def test_a_kept_claim_serves_several_kernels(node: Daemon) -> None:
    await claimed(node, "c1", slots={"cuda.device": 2})
    for number in (1, 2):
        await node.running(kernel_id=f"k{number}", claim="c1", keep_claim=True, slots=ONE)
    assert (await node.get("/v1/claims/c1"))["state"] == "used"
    assert problem(await node.call("DELETE", "/v1/claims/c1")) == (409, "ClaimConflict")
    third = await node.create(kernel_id="k3", claim="c1", keep_claim=True, slots=ONE)
    assert problem(third) == (409, "InsufficientResource")
    for slots in ({}, {"cpu": 0, "cuda.device": 0}):
        fourth = await node.create(kernel_id="k4", claim="c1", keep_claim=True, slots=slots)
        assert problem(fourth) == (409, "InsufficientResource")
        assert "nothing is left of claim c1 (its kernels: k1, k2)" in fourth.json["detail"]
    assert problem(await node.create(kernel_id="k3", claim="c1")) == (409, "ClaimConflict")
    await node.stop(signal.SIGKILL)
    await node.start()
    assert await free(node) == "2"
    for number in (1, 2):
        await node.call("DELETE", f"/v1/kernels/k{number}?timeout=0")
    assert (await node.get("/v1/claims/c1"))["state"] == "held"
    assert await free(node) == "2"
    assert (await node.call("DELETE", "/v1/claims/c1")).status == 204
    assert await free(node) == "4"


async def test_a_create_from_a_claim_of_another_agent_is_refused(node: Daemon) -> None:
    await claimed(node, "c1")
    answer = await node.create("agent-2", kernel_id="k1", claim="c1")
    assert problem(answer) == (422, "InvalidRequest")
    answer = await node.create("agent-2", kernel_id="k1", claim="c2")
    assert problem(answer) == (404, "UnknownClaim")


async def test_edits_of_several_claims_name_their_union(node: Daemon) -> None:
    await claimed(node, "c1")
    await claimed(node, "c2", slots={"cuda.device": 2})
    answer = await node.call("POST", "/v1/edits", {"claims": ["c1", "c2", "c1"], "for": "process"})
    assert answer.status == 200, answer.content
    assert answer.json["env"] == {"CUDA_VISIBLE_DEVICES": "cuda0,cuda1,cuda2"}
    answer = await node.call("POST", "/v1/edits", {"claims": ["c1", "c3"], "for": "container"})
    assert problem(answer) == (404, "UnknownClaim")


async def test_an_observed_claim_collides_and_both_are_named(node: Daemon) -> None:
    await node.running(kernel_id="k1", slots=ONE)
    seen = {"observed": True, "devices": {"cuda": ["cuda0"]}}
    await claimed(node, "c1", **seen)
    device = await node.device("cuda0")
    assert device["state"] == "overcommitted"
    assert device["holders"] == [
        {"kernel_id": "k1", "amount": "1", "amounts": {"cuda.device": "1"}},
        {"claim_id": "c1", "amount": "1", "amounts": {"cuda.device": "1"}},
    ]
    (warning,) = [w for w in (await node.get("/v1/node"))["warnings"] if "cuda/cuda0" in w]
    assert "kernel k1" in warning
    assert "claim c1" in warning


async def test_claims_are_counted(node: Daemon) -> None:
    before = await counts(node)
    await claimed(node, "c1", {"ttl": 60})
    during = await counts(node)
    assert during['agentd_claims{agent="agent-1",holder="ttl"}'] == 1
    assert (await claim(node, "c2", slots={"cuda.device": 9})).status == 409
    await node.call("DELETE", "/v1/claims/c1")
    after = await counts(node)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        'agentd_claims_total{agent="agent-1",result="created"}': 1,
        'agentd_claims_total{agent="agent-1",result="refused"}': 1,
        'agentd_claim_ends_total{reason="released"}': 1,
    }


@pytest.mark.parametrize(
    "holder",
    [
        {},
        {"pid": 1, "ttl": 5},
        {"ttl": 0},
        {"ttl": 604801},
        {"ttl": 1.5},
        {"name": "x", "start_time": 5},
        {"ttl": 5, "survives_reboot": True},
        {"name": "x", "more": 1},
        {"cgroup": "/"},
        {"cgroup": "/nowhere"},
        {"cgroup": "/../x"},
    ],
    ids=json.dumps,
)
async def test_an_invalid_holder_is_refused(node: Daemon, holder: dict[str, Any]) -> None:
    content = {"claim_id": "c1", "holder": holder, "slots": ONE}
    answer = await node.call("POST", "/v1/agents/agent-1/claims", content)
    assert problem(answer) == (422, "InvalidRequest")
    assert await node.get("/v1/claims") == []


async def test_cursor_of_a_claim_that_has_ended_stays_valid(node: Daemon) -> None:
    for number in range(3):
        await claimed(node, f"c{number}", slots={"cpu": 1})
    page = await node.call("GET", "/v1/claims?limit=1")
    assert [each["claim_id"] for each in page.json] == ["c0"]
    assert (await node.call("DELETE", "/v1/claims/c0")).status == 204
    rest = await node.get(f"/v1/claims?{next_query(page.headers['Link'])}")
    assert [each["claim_id"] for each in rest] == ["c1"]
    rest = await node.get("/v1/claims?limit=5&after=c1")
    assert [each["claim_id"] for each in rest] == ["c2"]
    assert (await node.call("GET", "/v1/claims?after=c0")).status == 422
