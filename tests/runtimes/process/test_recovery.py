"""Process kernels without a record, and the groups that their devices need."""

import asyncio
import grp
import os
import shutil
import threading
import time

import pytest
from msgspec.structs import replace

from agentd.core.kernel.edits import ContainerEdits
from agentd.errors import RuntimeUnavailable
from agentd.host import lookups
from agentd.host.cgroups.hierarchies import find_cgroups
from agentd.host.processes import process_started_at
from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import NODE, plan
from runtimes.process.rig import K1, bundle, create, found, groups_of_kernel

OTHER = plan("sleep", kernel_id="k2", node="node-b").record
PROBLEMS = {
    "missing": (None, ""),
    "empty": ("", "its file is empty or cannot be read"),
    "other": (OTHER, "it is the record of kernel k2 of node node-b"),
    "other-node": (
        plan("sleep", node="node-b").record,
        "it is the record of kernel k1 of node node-b",
    ),
    "no-kernel": (f'{{"node_id": "{NODE}"}}', "it has no kernel_id"),
    "no-json": ("{", "Expecting property name"),
}


@pytest.mark.parametrize(("text", "problem"), PROBLEMS.values(), ids=PROBLEMS)
async def test_problem_of_a_record_is_told(runtime, folder, text, problem) -> None:
    if text and "node-b" in text and find_cgroups() is None:
        return  # a bundle with another kernel's record, and nothing else to know it by
    await create(runtime, "sleep", "1000")
    path = bundle(folder) / "record.json"
    before = path.read_text()
    path.unlink()
    if text is not None:
        path.write_text(text)
    kernel = await found(runtime)
    assert kernel.record == ""
    assert kernel.record_problem.startswith(problem)
    assert bool(kernel.record_problem) is bool(problem)
    path.write_text(before)


@pytest.mark.parametrize("lost", ["identity.json", "everything"])
async def test_start_is_that_of_the_process_without_an_identity(runtime, folder, lost) -> None:
    if lost == "everything" and find_cgroups() is None:
        return
    created = await create(runtime, "sleep", "1000")
    if lost == "everything":
        shutil.rmtree(bundle(folder))
    else:
        (bundle(folder) / lost).unlink()
    kernel = await found(runtime)
    assert kernel.started_at is not None
    assert kernel.started_at == pytest.approx(created.started_at, abs=2)
    assert (await found(runtime)).started_at == kernel.started_at
    await runtime.stop(K1, 0)


def test_start_of_a_process_is_a_time() -> None:
    assert time.time() - 3600 * 24 < (process_started_at(os.getpid()) or 0) <= time.time() + 1
    assert process_started_at(2**22 + 1) is None


@pytest.mark.needs("root")
async def test_a_group_lookup_that_blocks_holds_up_nothing(runtime, folder, monkeypatch) -> None:
    """An NSS service that does not answer, as of a directory whose server is gone."""
    answered, asked = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        asked.set()
        answered.wait(20)

    monkeypatch.setattr("agentd.host.groups.find_entry", hangs)
    monkeypatch.setattr(lookups, "ANSWER_TIMEOUT_S", 0.3)
    edits = ContainerEdits(groups=("render",))
    creating = asyncio.create_task(created_with(runtime, edits))
    while not asked.is_set():
        await asyncio.sleep(0.01)
    assert not creating.done()
    with pytest.raises(RuntimeUnavailable, match="the group database of devices does not answer"):
        await creating
    answered.set()
    assert await runtime.find(K1) is None


@pytest.mark.needs("root")
async def test_a_kernel_is_in_the_groups_of_its_devices(runtime, folder) -> None:
    await created_with(runtime, ContainerEdits(groups=("daemon", "44", "no such group")))
    assert {44, grp.getgrnam("daemon").gr_gid} <= groups_of_kernel(folder)


async def created_with(runtime: ProcessRuntime, edits: ContainerEdits) -> None:
    await runtime.create(replace(plan("sleep", "1000"), edits=edits), lambda *_: None)
