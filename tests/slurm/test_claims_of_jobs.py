"""One job has one claim, whatever ids others have and however often its prolog runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentd.errors import ClaimConflict
from agentd_slurm import controller
from agentd_slurm.claim_ids import MAX_IDS, claim_ids
from agentd_slurm.commands.epilog import run_epilog
from agentd_slurm.commands.prolog import run_prolog
from agentd_slurm.node_client import NodeClient
from support.daemon import Daemon
from support.daemon_pool import TWO_AGENTS, Serving

LABELS = {"engine": "slurm", "job": "7", "user": "ada"}
REQUEST = {"slots": {"cuda.device": "1"}, "holder": {"name": "slurm-7"}, "labels": LABELS}
FOREIGN = {"slots": {"mem": "1m"}, "holder": {"name": "x"}}


@pytest.fixture
async def daemon(serving_process: Serving) -> Daemon:
    return await serving_process()


async def taken(daemon: Daemon, *ids: str, **body: Any) -> None:
    for claim_id in ids:
        content = {"claim_id": claim_id, **FOREIGN, **body}
        answer = await daemon.call("POST", "/v1/agents/agent-2/claims", content)
        assert answer.status == 201


async def released(daemon: Daemon) -> None:
    for row in await daemon.get("/v1/claims"):
        assert (await daemon.call("DELETE", f"/v1/claims/{row['claim_id']}")).status == 204


async def ids_after(daemon: Daemon, act: Callable[[NodeClient], object]) -> list[str]:
    """Act as the engine and return the ids of the claims of job 7."""
    client = NodeClient(str(daemon.folder / "agentd.sock"))
    await asyncio.to_thread(act, client)
    return [row["claim_id"] for row in await asyncio.to_thread(client.claims_of, 7)]


def claim(client: NodeClient) -> None:
    client.create_claim(7, "agent-1", REQUEST)


async def test_repeated_prolog_has_one_claim(daemon: Daemon) -> None:
    for _ in range(2):
        assert await ids_after(daemon, claim) == ["slurm-7"]
    await released(daemon)


@pytest.mark.parametrize("labels", [{}, LABELS | {"job": "8"}, LABELS | {"engine": "x"}])
async def test_taken_id_is_passed_over(daemon: Daemon, labels: dict[str, str]) -> None:
    await taken(daemon, "slurm-7", "slurm-7-2", labels=labels)
    for _ in range(2):
        assert await ids_after(daemon, claim) == ["slurm-7-3"]
    assert len(await daemon.get("/v1/claims")) == 3
    await released(daemon)


async def test_labels_without_the_prefix_name_no_claim_of_a_job(folder: Path) -> None:
    """Nor do they hide the claim of the job: a page of the list may end after any claim."""
    daemon = Daemon(folder, "process")
    daemon.deadlines = {"agentd.rpc.pages.MAX_PAGE_BYTES": 1.0}
    await daemon.start(TWO_AGENTS)
    try:
        await taken(daemon, "first", "slurm-70", "slurm-7x", "slurm-7-x", labels=LABELS)
        assert await ids_after(daemon, claim) == ["slurm-7"]
    finally:
        await daemon.close()


async def test_claim_of_a_killed_prolog_is_ended(daemon: Daemon) -> None:
    """Its request reaches agentd after the next prolog has looked."""

    class Late(NodeClient):
        looks = 0

        def claims_of(self, job_id: int) -> list[Mapping[str, Any]]:
            self.looks += 1
            return [] if self.looks == 1 else super().claims_of(job_id)

    await taken(daemon, "slurm-7", labels=LABELS)
    late = Late(str(daemon.folder / "agentd.sock"))
    assert await ids_after(daemon, lambda _: claim(late)) == ["slurm-7-2"]
    await released(daemon)


async def test_job_whose_ids_are_all_taken_is_refused(daemon: Daemon) -> None:
    await taken(daemon, *claim_ids(7))
    with pytest.raises(ClaimConflict):
        await ids_after(daemon, claim)
    assert len(await daemon.get("/v1/claims")) == MAX_IDS
    await released(daemon)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a job without GPUs, where each question fails the test."""

    def ask(*words: object, **options: object) -> str:
        raise AssertionError((words, options))

    monkeypatch.setattr(controller, "run_command", ask)
    monkeypatch.setattr(NodeClient, "_call", ask)
    monkeypatch.setenv("AGENTD_SOCKET", str(tmp_path / "agentd.sock"))
    return {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "AGENTD_SLURM_RUN": str(tmp_path / "run")}


def test_hooks_of_a_job_without_gpus_ask_nothing(job: dict[str, str]) -> None:
    assert (run_prolog(job), run_epilog(job)) == (0, 0)
    assert not Path(job["AGENTD_SLURM_RUN"]).exists()


def test_epilog_asks_where_the_prolog_left_a_mark(job: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="show"):
        run_prolog(job | {"SLURM_JOB_GPUS": "0"})
    assert (Path(job["AGENTD_SLURM_RUN"]) / "7").exists()
    with pytest.raises(AssertionError, match="job%3D7"):
        run_epilog(job)


def test_hooks_import_little() -> None:
    """Each job starts three interpreters, and what is slow to import costs all of them."""
    names = ("prolog", "epilog", "task_prolog")
    program = f"import sys, {', '.join(f'agentd_slurm.commands.{name}' for name in names)}\n"
    program += "assert not {'http.client', 'ssl', 'email', 'hashlib', 'tomllib'} & {*sys.modules}\n"
    program += "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    modules = {name for name in output.split() if not name.startswith("_")}
    assert modules == {"agentd", "agentd_slurm"}
