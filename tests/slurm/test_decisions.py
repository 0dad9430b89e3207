from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm.decisions.doctor import check_gres, check_settings
from agentd_slurm.decisions.prolog import (
    ClaimDevices,
    FailProlog,
    NothingToClaim,
    PrologFacts,
    RefuseJob,
    decide_prolog,
)
from agentd_slurm.decisions.sync import (
    ClaimRunningJob,
    EndClaim,
    EndPlaceholder,
    RenamePlaceholder,
    StartPlaceholder,
    SyncFacts,
    decide_sync,
)
from agentd_slurm.gres_map import GresDevice, GresMap
from agentd_slurm.jobs import Job

MAP = GresMap.of("slurm", [GresDevice(f"cuda{n}", f"GPU-{n}") for n in (1, 3)])


def row(number: int, *holders: dict[str, str], **members: Any) -> dict[str, Any]:
    """A device of `/v1/devices`."""
    return {
        "device_name": "cuda",
        "id": f"cuda{number}",
        "stable_id": f"GPU-{number}",
        "agents": ["slurm"],
        "state": "ok",
        "slot": "cuda.device",
        "capacity": "1",
        "holders": list(holders),
        **members,
    }


ROWS = (row(1), row(3))
JOB = Job(7, "7", 1000, "RUNNING", nodes=("n1",), gpus={"n1": frozenset({0, 1})})
FACTS = PrologFacts(7, "n1", "ada", JOB, gres_map=MAP, devices=ROWS)


def test_prolog_claims_all_devices_of_the_job() -> None:
    action = decide_prolog(FACTS)
    assert action == ClaimDevices(
        "slurm",
        {
            "slots": {"cuda.device": "2"},
            "devices": {"cuda": ["cuda1", "cuda3"]},
            "holder": {"name": "slurm-7"},
            "owner_uid": 1000,
            "labels": {"engine": "slurm", "job": "7", "user": "ada"},
        },
    )


PLACEHOLDER = Job(9, "9", 0, "RUNNING", "agentd:k1", "cuda3", "n1", ("n1",), {"n1": frozenset({1})})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({"job": replace(JOB, gpus={})}, NothingToClaim, id="no GPUs"),
        pytest.param({"job": PLACEHOLDER}, NothingToClaim, id="a placeholder"),
        pytest.param({"job": replace(JOB, state="PENDING")}, NothingToClaim, id="requeued"),
        pytest.param({"job": replace(JOB, nodes=("n2",))}, NothingToClaim, id="on another node"),
        pytest.param({"job": None}, FailProlog, id="unknown"),
        pytest.param({"job": replace(JOB, gpus={"n1": None})}, RefuseJob, id="no indices"),
        pytest.param({"devices": ROWS[:1]}, RefuseJob, id="a device that is not listed"),
        pytest.param({"devices": (row(1), row(3, state="gone"))}, RefuseJob, id="missing"),
        pytest.param({"devices": (row(1), row(3, agents=["b"]))}, RefuseJob, id="of another agent"),
        pytest.param({"gres_map": GresMap("slurm", {})}, RefuseJob, id="not in the map"),
        pytest.param({"has_processes": True}, RefuseJob, id="orphans"),
    ],
)
def test_prolog_claims_nothing_when(changes: dict[str, Any], wanted: type) -> None:
    assert isinstance(decide_prolog(replace(FACTS, **changes)), wanted)


OWN = {"claim_id": "slurm-7", "labels": {"engine": "slurm", "job": "7"}}
KERNEL = {"kernel_id": "k1", "claim_id": "slurm-7", "state": "running"}
SYNC = SyncFacts("n1", MAP, (OWN,), (), ROWS, (JOB,), frozenset({7}), frozenset({7}))
OTHER = {"kernel_id": "k1", "amount": "1"}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({}, [], id="in step"),
        pytest.param(
            {"devices": (row(1), row(3, OTHER))}, [StartPlaceholder("cuda3", "k1")], id="a kernel"
        ),
        pytest.param(
            {"devices": (row(1), row(3, {"claim_id": "c-1"}))},
            [StartPlaceholder("cuda3", "c-1")],
            id="a claim",
        ),
        pytest.param(
            {"devices": (row(1, {"claim_id": "slurm-7"}), row(3))}, [], id="the job's claim"
        ),
        pytest.param(
            {
                "devices": (row(1), row(3, OTHER)),
                "kernels": (KERNEL,),
            },
            [],
            id="a kernel of the job's claim",
        ),
        pytest.param(
            {"devices": (row(1), row(3, OTHER)), "jobs": (JOB, PLACEHOLDER)}, [], id="blocked"
        ),
        pytest.param(
            {"devices": (row(1), row(3, {"kernel_id": "k2"})), "jobs": (JOB, PLACEHOLDER)},
            [RenamePlaceholder(9, "k2")],
            id="another holder",
        ),
        pytest.param({"jobs": (JOB, PLACEHOLDER)}, [EndPlaceholder(9)], id="free again"),
        pytest.param(
            {
                "devices": (row(1), row(3, OTHER)),
                "jobs": (JOB, PLACEHOLDER, replace(PLACEHOLDER, job_id=10, state="PENDING")),
            },
            [EndPlaceholder(10)],
            id="blocked twice",
        ),
        pytest.param(
            {"jobs": (JOB, replace(PLACEHOLDER, required_nodes="n2", nodes=("n2",)))},
            [],
            id="a placeholder of another node",
        ),
        pytest.param(
            {"jobs": (JOB, replace(PLACEHOLDER, state="COMPLETING"))}, [], id="ending already"
        ),
        pytest.param(
            {"devices": (row(1), row(3, state="drained"))},
            [StartPlaceholder("cuda3", "drained")],
            id="drained",
        ),
        pytest.param({"devices": (row(1),)}, [StartPlaceholder("cuda3", "missing")], id="missing"),
        pytest.param({"jobs": ()}, [], id="unknown to slurmctld, alive"),
        pytest.param({"alive": frozenset()}, [], id="known to slurmctld, no process yet"),
        pytest.param({"jobs": (), "alive": frozenset()}, [EndClaim(7)], id="unknown, and gone"),
        pytest.param(
            {"jobs": (replace(JOB, state="COMPLETED"),), "alive": frozenset()},
            [EndClaim(7)],
            id="ended, and gone",
        ),
        pytest.param({"claims": ()}, [], id="a job without a claim, for the first time"),
        pytest.param(
            {"claims": (), "unclaimed": frozenset({7})},
            [ClaimRunningJob(7)],
            id="a job without a claim, still",
        ),
        pytest.param(
            {"claims": (), "unclaimed": frozenset({7}), "running": frozenset()},
            [],
            id="a job without a claim or a process",
        ),
        pytest.param(
            {
                "claims": (),
                "unclaimed": frozenset({7}),
                "kernels": (KERNEL,),
            },
            [],
            id="a job whose claim a kernel took over",
        ),
        pytest.param(
            {
                "claims": (),
                "unclaimed": frozenset({7}),
                "kernels": (KERNEL | {"state": "terminated"},),
            },
            [ClaimRunningJob(7)],
            id="a job with an ended kernel of an earlier claim",
        ),
        pytest.param(
            {"claims": (OWN | {"claim_id": "slurm-7-2"},), "unclaimed": frozenset({7})},
            [],
            id="a claim with another id",
        ),
        pytest.param(
            {"claims": (OWN, OWN | {"claim_id": "slurm-7-2"}), "jobs": (), "alive": frozenset()},
            [EndClaim(7)],
            id="two claims of a job that is over",
        ),
        pytest.param(
            {
                "claims": (),
                "unclaimed": frozenset({7}),
                "jobs": (replace(JOB, state="CONFIGURING"),),
            },
            [],
            id="a job in its prolog",
        ),
        pytest.param(
            {
                "claims": (
                    OWN | {"labels": {}},
                    OWN | {"labels": {"engine": "slurm", "job": "8"}},
                    OWN | {"claim_id": "x"},
                    OWN | {"claim_id": "slurm-7-x"},
                ),
                "jobs": (),
                "alive": frozenset(),
            },
            [],
            id="claims of others",
        ),
    ],
)
def test_sync_when(changes: dict[str, Any], wanted: list[Any]) -> None:
    assert decide_sync(replace(SYNC, **changes)) == wanted


@given(st.booleans(), st.booleans(), st.sampled_from(["RUNNING", "COMPLETING", "CONFIGURING"]))
def test_sync_never_ends_the_claim_of_a_live_job(known: bool, alive: bool, state: str) -> None:
    jobs = (replace(JOB, state=state),) if known else ()
    facts = replace(SYNC, jobs=jobs, alive=frozenset({7} if alive else ()))
    assert (EndClaim(7) in decide_sync(facts)) == (not known and not alive)


GOOD = {
    "ProctrackType": "proctrack/cgroup",
    "PrologFlags": "Alloc,Contain",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "Prolog": "/usr/bin/agentd-slurm-prolog",
    "Epilog": "/usr/bin/agentd-slurm-epilog",
    "DisableRootJobs": "No",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ProctrackType", "proctrack/linuxproc"),
        ("PrologFlags", "(null)"),
        ("Prolog", "(null)"),
        ("Epilog", "(null)"),
        ("DisableRootJobs", "Yes"),
        ("SelectType", "select/linear"),
        ("GresTypes", "(null)"),
    ],
)
def test_doctor_names_the_setting(name: str, value: str) -> None:
    assert all(check.passed for check in check_settings(GOOD))
    failed = [check for check in check_settings(GOOD | {name: value}) if not check.passed]
    assert [check.name for check in failed] == [name]
    assert value in failed[0].detail


def test_doctor_compares_gres_with_the_map() -> None:
    assert check_gres(MAP, "gpu:cuda1:1,gpu:cuda3:1(S:0)").passed
    assert not check_gres(MAP, "gpu:cuda1:1").passed
    assert not check_gres(MAP, "(null)").passed
