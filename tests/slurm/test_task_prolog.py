"""The task prolog: what it names to a task, and which tasks it refuses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentd.errors import Unreachable
from agentd_slurm import controller
from agentd_slurm.commands import task_prolog
from agentd_slurm.commands.task_prolog import REFUSED, run_task_prolog
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.jobs import Job
from agentd_slurm.node_client import NodeClient

BATCH = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0,1"}
JOB = Job(7, "4_7", 1000, "RUNNING", nodes=("n1",), gpus={"n1": frozenset({0, 1})})
HELD = {"claims": {7: ("cuda0", "cuda1")}}
Run = Callable[..., tuple[int, dict[str, str]]]


def claim_of(job_id: int, devices: tuple[str, ...]) -> dict[str, Any]:
    return {
        "claim_id": f"slurm-{job_id}",
        "slots": {"cuda.device": str(len(devices))},
        "allocation": {"cuda": {"cuda.device": dict.fromkeys(devices, "1"), "cuda.mem": {}}},
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run it with the claims of each job (None: agentd is away), kernels' claims, and the job."""
    devices = {str(n): {"id": f"cuda{n}", "stable_id": f"GPU-{n}"} for n in range(4)}
    (tmp_path / "map").write_text(json.dumps({"agent": "slurm", "devices": devices}))
    (tmp_path / "socket").touch()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("AGENTD_SLURM_MAP", str(tmp_path / "map"))
    requeued: list[str] = []
    monkeypatch.setattr(controller, "requeue", requeued.append)

    def run_once(
        environ: Mapping[str, str],
        *,
        claims: Mapping[int, tuple[str, ...]] | None = None,
        kernels: tuple[str, ...] = (),
        job: Job | Exception | None = JOB,
    ) -> tuple[int, dict[str, str]]:
        def claims_of(_: NodeClient, job_id: int) -> list[dict[str, Any]]:
            if claims is None:
                raise Unreachable("away")
            return [claim_of(job_id, claims[job_id])] if job_id in claims else []

        def get_job(job_id: int) -> Job | None:
            if isinstance(job, Exception):
                raise job
            return job and job._replace(job_id=job_id)

        rows = [{"kernel_id": "k", "claim_id": name, "state": "running"} for name in kernels]
        monkeypatch.setattr(NodeClient, "claims_of", claims_of)
        monkeypatch.setattr(NodeClient, "kernels", lambda _: rows)
        monkeypatch.setattr(task_prolog.controller, "get_job", get_job)
        places = {"AGENTD_SLURM_SOCKET": tmp_path / "socket", "AGENTD_SLURM_RUN": tmp_path / "run"}
        requeued.clear()
        status = run_task_prolog({**environ, **{name: str(p) for name, p in places.items()}})
        lines = capsys.readouterr().out.splitlines()
        named = dict(
            line.removeprefix("export ").split("=", 1) for line in lines if line[:7] == "export "
        )
        return status, named | ({"requeued": requeued[0]} if requeued else {})

    return run_once


def test_task_gets_the_claim_and_its_own_devices(run: Run) -> None:
    both = {"AGENTD_AGENT": "slurm", "AGENTD_CLAIM": "slurm-7"}
    both |= {"AGENTD_DEVICES": "cuda=cuda0 cuda=cuda1", "AGENTD_SLOTS": "cuda.device=2"}
    assert run(BATCH, **HELD) == (0, both)
    one = both | {"AGENTD_DEVICES": "cuda=cuda1", "AGENTD_SLOTS": "cuda.device=1"}
    assert run(BATCH | {"SLURM_STEP_GPUS": "1"}, **HELD) == (0, one)


@pytest.mark.parametrize(
    ("facts", "requeued"),
    [
        pytest.param({"claims": {}}, "4_7", id="no claim"),
        pytest.param({"claims": {7: ("cuda0",)}}, "4_7", id="another GPU"),
        pytest.param({"claims": {}, "kernels": ("slurm-8", "k1")}, "4_7", id="another kernel"),
        pytest.param({"claims": {}, "job": None}, None, id="forgotten"),
        pytest.param({"claims": {}, "job": JOB._replace(state="PENDING")}, None, id="pending"),
    ],
)
def test_task_of_an_unclaimed_job_is_refused(
    run: Run, facts: dict[str, Any], requeued: str | None
) -> None:
    status, named = run(BATCH, **facts)
    assert (status, named.get("requeued")) == (REFUSED, requeued)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"claims": None}, id="agentd is away"),
        pytest.param({"claims": {}, "job": SlurmFailed("away")}, id="slurmctld fails"),
        pytest.param({"claims": {}, "kernels": ("slurm-7",)}, id="a kernel took the claim over"),
        pytest.param({"claims": {}, "job": JOB._replace(gpus={})}, id="variables of another job"),
        pytest.param(
            {"claims": {7: ("cuda3",)}, "job": JOB._replace(gpus={"n1": frozenset({3})})},
            id="variables of another node",
        ),
    ],
)
def test_task_starts_where_a_refusal_is_not_certain(run: Run, facts: dict[str, Any]) -> None:
    status, named = run(BATCH, **facts)
    assert (status, named["AGENTD_CLAIM"]) == (0, "slurm-7")


def test_component_gets_its_own_claim(run: Run) -> None:
    components = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7"}
    components |= {"SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[2-3]"}
    components |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "n1"}
    claims = {7: ("cuda3",), 8: ("cuda0", "cuda1")}
    assert run(BATCH | components, claims=claims)[1]["AGENTD_CLAIM"] == "slurm-8"
    assert run(BATCH | components, claims={7: ("cuda0", "cuda1")})[0] == REFUSED
    other = BATCH | components | {"SLURM_JOB_ID": "9"}
    assert run(other, claims={9: ("cuda0", "cuda1")})[1]["AGENTD_CLAIM"] == "slurm-9"


def test_mark_proves_the_claim_of_a_shared_device(run: Run, tmp_path: Path) -> None:
    shards = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_SHARDS_ON_NODE": "2"}
    mps = BATCH | {"SLURM_JOB_GPUS": "1"}
    job = JOB._replace(gpus={}, shared={"n1": frozenset({1})})
    for environ in (shards, mps):
        assert run(environ, claims={}, job=job)[0] == REFUSED
    claim_id = f"slurm-dev-{hashlib.sha256(b'GPU-1').hexdigest()[:16]}"
    (tmp_path / "run" / "7").write_text(f"{claim_id}\n")
    for environ in (shards, mps):
        assert run(environ, claims={}, job=job) == (0, {"AGENTD_AGENT": "slurm"})
