from __future__ import annotations

import hashlib
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
    describe_holders,
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


def test_prolog_claims_a_shared_device_whole() -> None:
    """One claim for all jobs, so the request of each is the same."""
    parts = {"gpus": {"n1": frozenset({1})}, "shared": {"n1": frozenset({0})}}
    first = decide_prolog(FACTS._replace(job=JOB._replace(**parts)))
    job = JOB._replace(shared=parts["shared"], gpus={})
    second = decide_prolog(FACTS._replace(job_id=8, user="bob", job=job))
    assert isinstance(first, ClaimDevices)
    assert isinstance(second, ClaimDevices)
    assert first.request["devices"] == {"cuda": ["cuda3"]}
    assert second.request == {}
    assert (
        first.shared
        == second.shared
        == (
            {
                "claim_id": "slurm-dev-" + hashlib.sha256(b"GPU-1").hexdigest()[:16],
                "slots": {"cuda.device": "1"},
                "devices": {"cuda": ["cuda1"]},
                "holder": {"name": first.shared[0]["claim_id"]},
                "owner_uid": 0,
                "labels": {"engine": "slurm"},
            },
        )
    )


@pytest.mark.parametrize(
    ("types", "wanted"), [({}, True), ({0: "cuda1", 1: "CUDA3"}, True), ({1: "cuda5"}, False)]
)
def test_type_that_contradicts_the_map_sends_back(types: dict[int, str], wanted: object) -> None:
    action = decide_prolog(FACTS._replace(job=JOB._replace(types={"n1": types})))
    assert isinstance(action, ClaimDevices) is wanted
    if not wanted:
        assert isinstance(action, RefuseJob)
        assert "GPU 1 is of type cuda5 in Slurm, but the map has cuda3" in action.reason


def test_holders_of_refused_devices_are_named() -> None:
    rows = (
        row(1, {"kernel_id": "k1", "amount": "1"}, {"claim_id": "c1", "amount": "1"}),
        row(2, {"kernel_id": "k2", "amount": "1"}),
        row(3, state="drained"),
    )
    requests = [{"devices": {"cuda": ["cuda1", "cuda3"]}}]
    text = "cuda1 is held by kernel k1, claim c1; cuda3 is drained"
    assert describe_holders(requests, rows) == text


PLACEHOLDER = Job(9, "9", 0, "RUNNING", "agentd:k1", "cuda3", "n1", ("n1",), {"n1": frozenset({1})})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({"job": JOB._replace(gpus={})}, NothingToClaim, id="no GPUs"),
        pytest.param({"job": PLACEHOLDER}, NothingToClaim, id="a placeholder"),
        pytest.param({"job": JOB._replace(state="PENDING")}, NothingToClaim, id="requeued"),
        pytest.param({"job": JOB._replace(nodes=("n2",))}, NothingToClaim, id="on another node"),
        pytest.param({"job": None}, FailProlog, id="unknown"),
        pytest.param({"job": JOB._replace(gpus={"n1": None})}, RefuseJob, id="no indices"),
        pytest.param({"devices": ROWS[:1]}, RefuseJob, id="a device that is not listed"),
        pytest.param({"devices": (row(1), row(3, state="gone"))}, RefuseJob, id="missing"),
        pytest.param({"devices": (row(1), row(3, agents=["b"]))}, RefuseJob, id="of another agent"),
        pytest.param({"gres_map": GresMap("slurm", {})}, RefuseJob, id="not in the map"),
        pytest.param({"has_processes": True}, RefuseJob, id="orphans"),
    ],
)
def test_prolog_claims_nothing_when(changes: dict[str, Any], wanted: type) -> None:
    assert isinstance(decide_prolog(FACTS._replace(**changes)), wanted)


OWN = {"claim_id": "slurm-7", "labels": {"engine": "slurm", "job": "7"}}
KERNEL = {"kernel_id": "k1", "claim_id": "slurm-7", "state": "running"}
SYNC = SyncFacts("n1", MAP, (OWN,), (), ROWS, (JOB,), frozenset({7}), frozenset({7}))
USED_BY_KERNEL = {"devices": (row(1), row(3, {"kernel_id": "k1", "amount": "1"}))}
BLOCKED = {"jobs": (JOB, PLACEHOLDER)}
OVER = {"jobs": (), "alive": frozenset()}
UNCLAIMED = {"claims": (), "unclaimed": frozenset({7})}
SYNC_CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "in step": ({}, []),
    "a kernel": (USED_BY_KERNEL, [StartPlaceholder("cuda3", "k1")]),
    "a claim": (
        {"devices": (row(1), row(3, {"claim_id": "c-1"}))},
        [StartPlaceholder("cuda3", "c-1")],
    ),
    "the job's claim": ({"devices": (row(1, {"claim_id": "slurm-7"}), row(3))}, []),
    "a kernel of the job's claim": (USED_BY_KERNEL | {"kernels": (KERNEL,)}, []),
    "blocked": (USED_BY_KERNEL | BLOCKED, []),
    "another holder": (
        BLOCKED | {"devices": (row(1), row(3, {"kernel_id": "k2"}))},
        [RenamePlaceholder(9, "k2")],
    ),
    "free again": (BLOCKED, [EndPlaceholder(9)]),
    "blocked twice": (
        USED_BY_KERNEL
        | {"jobs": (JOB, PLACEHOLDER, PLACEHOLDER._replace(job_id=10, state="PENDING"))},
        [EndPlaceholder(10)],
    ),
    "a placeholder of another node": (
        {"jobs": (JOB, PLACEHOLDER._replace(required_nodes="n2", nodes=("n2",)))},
        [],
    ),
    "ending already": ({"jobs": (JOB, PLACEHOLDER._replace(state="COMPLETING"))}, []),
    "drained": (
        {"devices": (row(1), row(3, state="drained"))},
        [StartPlaceholder("cuda3", "drained")],
    ),
    "missing": ({"devices": (row(1),)}, [StartPlaceholder("cuda3", "missing")]),
    "unknown to slurmctld, alive": ({"jobs": ()}, []),
    "known to slurmctld, no process yet": ({"alive": frozenset()}, []),
    "unknown, and gone": (OVER, [EndClaim(7)]),
    "ended, and gone": (OVER | {"jobs": (JOB._replace(state="COMPLETED"),)}, [EndClaim(7)]),
    "a job without a claim, for the first time": ({"claims": ()}, []),
    "a job without a claim, still": (UNCLAIMED, [ClaimRunningJob(7)]),
    "a job without a claim or a process": (UNCLAIMED | {"running": frozenset()}, []),
    "a job whose claim a kernel took over": (UNCLAIMED | {"kernels": (KERNEL,)}, []),
    "a job with an ended kernel of an earlier claim": (
        UNCLAIMED | {"kernels": (KERNEL | {"state": "terminated"},)},
        [ClaimRunningJob(7)],
    ),
    "a claim with another id": (
        UNCLAIMED | {"claims": (OWN | {"claim_id": "slurm-7-2"},)},
        [],
    ),
    "two claims of a job that is over": (
        OVER | {"claims": (OWN, OWN | {"claim_id": "slurm-7-2"})},
        [EndClaim(7)],
    ),
    "a job in its prolog": (UNCLAIMED | {"jobs": (JOB._replace(state="CONFIGURING"),)}, []),
    "claims of others": (
        OVER
        | {
            "claims": (
                OWN | {"labels": {}},
                OWN | {"labels": {"engine": "slurm", "job": "8"}},
                OWN | {"claim_id": "x"},
                OWN | {"claim_id": "slurm-7-x"},
            )
        },
        [],
    ),
}


@pytest.mark.parametrize("case", SYNC_CASES)
def test_sync_decides(case: str) -> None:
    changes, wanted = SYNC_CASES[case]
    assert typed(decide_sync(SYNC._replace(**changes))) == typed(wanted)


def typed(actions: list[Any]) -> list[tuple[Any, ...]]:
    """Return actions with their types, since a tuple equals one of another type."""
    return [(type(action), *action) for action in actions]


@given(st.booleans(), st.booleans(), st.sampled_from(["RUNNING", "COMPLETING", "CONFIGURING"]))
def test_sync_never_ends_the_claim_of_a_live_job(known: bool, alive: bool, state: str) -> None:
    jobs = (JOB._replace(state=state),) if known else ()
    facts = SYNC._replace(jobs=jobs, alive=frozenset({7} if alive else ()))
    has_ended = (EndClaim, 7) in typed(decide_sync(facts))
    assert has_ended == (not known and not alive)


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
