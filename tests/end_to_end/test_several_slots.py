"""GPU memory beside GPU shares: from a create to the ends of kernels, over restarts."""

import signal

import pytest

from support.daemon import AGENTS, Daemon

GIB = 2**30


def gpus(*, has_memory: bool = True, count: int = 2) -> str:
    return (
        f'[plugins.cuda]\nplugin = "sim"\ncount = {count}\nmode = "shares"\nmemory = "80g"\n'
        f"memory-slot = {str(has_memory).lower()}\n"
    )


async def test_gpu_memory_is_requested_charged_and_shown(daemon: Daemon) -> None:
    await daemon.start(AGENTS + gpus())
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.mem": "20g"})
    assert kernel["slots"].items() >= {"cuda.mem": str(20 * GIB), "cuda.shares": "0.25"}.items()
    assert kernel["allocation"]["cuda"] == {
        "cuda.shares": {"cuda0": "0.25"},
        "cuda.mem": {"cuda0": str(20 * GIB)},
    }
    assert {"cuda.mem", "cuda.shares"} <= set(kernel["not_enforced"])
    device = await daemon.device("cuda0")
    assert (device["slot"], device["allocated"], device["free"]) == ("cuda.shares", "0.25", "0.75")
    assert device["slots"]["cuda.mem"] == {
        "capacity": str(80 * GIB),
        "allocated": str(20 * GIB),
        "free": str(60 * GIB),
    }
    amounts = {"cuda.shares": "0.25", "cuda.mem": str(20 * GIB)}
    assert device["holders"] == [{"kernel_id": "k1", "amount": "0.25", "amounts": amounts}]
    types = {slot["name"]: slot for slot in await daemon.get("/v1/slot-types")}
    assert types["cuda.mem"]["primary"] == "cuda.shares"
    agent = await daemon.get("/v1/agents/agent-1")
    assert agent["slots"]["cuda.mem"]["free"] == str(140 * GIB)
    assert agent["scaling_factors"]["cuda.mem"] == "1"
    again = await daemon.create(kernel_id="k1", slots={"cuda.mem": "20g"})
    assert (again.status, again.json["kernel_id"]) == (200, "k1")
    metrics = (await daemon.call("GET", "/metrics")).content.decode()
    assert 'agentd_device_free{device_name="cuda",id="cuda0",slot="cuda.mem"}' in metrics
    assert 'agentd_slot_allocated{agent="agent-1",slot="cuda.mem"}' in metrics


async def test_a_refusal_and_a_dry_run_name_every_slot(plain: Daemon) -> None:
    await plain.start(AGENTS + gpus(count=1))
    await plain.running(kernel_id="k1", slots={"cuda.shares": "0.1", "cuda.mem": "60g"})
    refused = await plain.create(slots={"cuda.shares": "0.5"})
    assert (refused.status, refused.json["slot"], refused.json["free"]) == (
        409,
        "cuda.shares",
        "0.25",
    )
    (row,) = refused.json["explain"]
    assert row["reason"] == (
        "insufficient cuda.mem: requested 40 GiB (in proportion to cuda.shares 0.5),"
        " 20 GiB free (80 GiB in total); held by k1"
    )
    body = {"slots": {"cuda.shares": "0.2"}, "command": ["true"]}
    looked = await plain.call("POST", "/v1/agents/agent-1/kernels?dry_run=true", body)
    assert looked.status == 200, looked.content
    assert looked.json["slots"]["cuda.mem"] == str(16 * GIB)
    assert looked.json["explain"].keys() >= {"cuda.shares", "cuda.mem"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_memory_is_switched_off_and_on_again(daemon: Daemon, number: int) -> None:
    await daemon.start(AGENTS + gpus())
    kernel = await daemon.running(kernel_id="k1", slots={"cuda.shares": "0.1", "cuda.mem": "60g"})
    claim = {"claim_id": "c1", "slots": {"cuda.shares": "0.1"}, "holder": {"name": "batch"}}
    assert (await daemon.call("POST", "/v1/agents/agent-1/claims", claim)).status == 201
    await daemon.stop(number)
    await daemon.start(AGENTS + gpus(has_memory=False))
    tried = await daemon.create(claim="c1", query="?dry_run=true")
    assert tried.status == 200, tried.content
    assert tried.json["allocation"]["cuda"].keys() == {"cuda.shares"}
    held = await daemon.get("/v1/claims/c1")
    assert held["allocation"]["cuda"] == {"cuda.shares": {"cuda0": "0.1"}}, "what is charged"
    assert (await daemon.call("DELETE", "/v1/claims/c1")).status == 204
    off = await daemon.get("/v1/kernels/k1")
    assert off["slots"] == kernel["slots"]
    assert off["unknown_slots"] == {"cuda.mem": str(60 * GIB)}
    assert off["allocation"]["cuda"] == {"cuda.shares": {"cuda0": "0.1"}}, "what is charged"
    device = await daemon.device("cuda0")
    assert (device["state"], device["free"], list(device["slots"])) == (
        "ok",
        "0.9",
        ["cuda.shares"],
    )
    assert device["holders"][0]["amounts"]["cuda.mem"] == str(60 * GIB)
    await daemon.running(kernel_id="k2", slots={"cuda.shares": "0.2"})
    await daemon.stop(number)
    await daemon.start(AGENTS + gpus())
    assert (await daemon.get("/v1/kernels/k1")) == kernel
    on = await daemon.get("/v1/kernels/k2")
    assert "cuda.mem" not in on["slots"]
    assert on["allocation"]["cuda"]["cuda.mem"] == {"cuda0": str(16 * GIB)}
    device = await daemon.device("cuda0")
    assert (device["state"], device["slots"]["cuda.mem"]["free"]) == ("ok", str(4 * GIB))
    for kernel_id in ("k1", "k2"):
        assert (await daemon.call("DELETE", f"/v1/kernels/{kernel_id}?timeout=0")).status == 204
    assert (await daemon.device("cuda0"))["slots"]["cuda.mem"]["free"] == str(80 * GIB)
