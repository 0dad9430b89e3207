"""A GPU in MIG mode that is in trouble, under a daemon whose agents own the others."""

import asyncio
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from native.libraries import nvml_library
from support.daemon import AGENTS, Daemon

CONFIG = """[resource]
allocation-mode = "auto-split"
[plugins]
health-interval = 0.1
[plugins.cuda]
"""
SHARES = 'mode = "shares"\nmemory-slot = true\n'
GPU = "gpu uuid=GPU-{node}-{n} pci={domain:08X}:0{n}:00.0 mig={mig} events=8 name=NVIDIA H100\n"
PART = "mig gpu=4 idx={n} uuid=MIG-{node}-{n} gi={n} gslices=1 cslices=1 name=H100 MIG 1g.10gb\n"
TROUBLE = "fail nvmlDeviceGetMemoryInfo 16 4\n"


def text(node: str) -> str:
    domain = crc32(node.encode()) % 2**16
    whole = [GPU.format(node=node, n=n, domain=domain, mig=int(n == 4)) for n in range(5)]
    return "".join([*whole, *(PART.format(node=node, n=n) for n in range(2))])


def say(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    new.replace(file)


async def views(daemon: Daemon) -> dict[str, dict[str, Any]]:
    devices = await daemon.get("/v1/devices")
    return {d["id"]: d for d in devices if d["device_name"] == "cuda"}


async def until_state(daemon: Daemon, state: str) -> None:
    async with asyncio.timeout(20):
        while {(await views(daemon))[f"cuda4:{n}"]["state"] for n in range(2)} != {state}:
            await asyncio.sleep(0.05)


async def owners(daemon: Daemon) -> dict[str, list[str]]:
    return {name: view["agents"] for name, view in (await views(daemon)).items()}


@pytest.mark.parametrize("settings", ["", SHARES], ids=["whole", "memory-slot"])
async def test_mig_gpu_in_trouble_moves_no_gpu_of_a_kernel(
    plain: Daemon, tmp_path_factory: pytest.TempPathFactory, settings: str
) -> None:
    file, node = plain.folder / "gpus", plain.folder.name
    environ = {
        "LD_LIBRARY_PATH": str(nvml_library(tmp_path_factory)), "FAKE_NVML_FILE": str(file),
    }  # fmt: skip
    say(file, text(node))
    await plain.start(AGENTS + CONFIG + settings, **environ)
    before = await owners(plain)
    assert before == {
        "cuda0": ["agent-1"], "cuda1": ["agent-1"], "cuda2": ["agent-2"], "cuda3": ["agent-2"],
        "cuda4:0": ["agent-1"], "cuda4:1": ["agent-2"],
    }  # fmt: skip
    slot = "cuda.shares" if settings else "cuda.device"
    await plain.running("agent-2", kernel_id="k1", slots={slot: 2})

    say(file, text(node) + TROUBLE)
    await until_state(plain, "unhealthy")
    assert await owners(plain) == before
    await plain.stop()
    await plain.start(**environ)
    assert await owners(plain) == before
    devices = await views(plain)
    assert {devices[f"cuda4:{n}"]["reason"] for n in range(2)} == {
        "no answer: GPU requires restart"
    }
    assert [h["kernel_id"] for h in devices["cuda2"]["holders"]] == ["k1"]
    part = {"cuda.device:1g.10gb-mig": 1}
    refused = await plain.create("agent-1", slots=part)
    assert (refused.status, "unhealthy" in str(refused.json)) == (409, True), refused.content

    say(file, text(node))
    await until_state(plain, "ok")
    assert await owners(plain) == before
    kernel = await plain.running("agent-1", kernel_id="k2", slots=part)
    assert kernel["state"] == "running"
    status = await plain.get("/v1/node")
    assert "restart agentd" not in str(status)
    await plain.stop()
    await plain.start(**environ)
    assert await owners(plain) == before
