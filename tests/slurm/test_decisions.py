from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm.claim_ids import shared_claim_id
from agentd_slurm.decisions.doctor import (
    SlurmCheck,
    check_gres,
    check_job,
    check_map,
    check_settings,
    shared_types,
)
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
    GiveUpPlaceholder,
    RenamePlaceholder,
    StartPlaceholder,
    SyncFacts,
    decide_sync,
    pause_s,
)
from agentd_slurm.gres_map import GresDevice, GresMap
from agentd_slurm.jobs import Job
from agentd_slurm.placeholders import Placeholder, SlurmNode

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
SHARED = ["slurm", "notebooks"]
OF_ID = shared_claim_id("GPU-3")
OF_DEVICE = {"claim_id": OF_ID, "labels": {"engine": "slurm"}}
SHARER = JOB._replace(job_id=8, gpus={}, shared={"n1": frozenset({1})})
BUSY = SlurmNode(frozenset({"MIXED"}), used=frozenset({0}))
SYNC = SyncFacts(
    "n1",
    MAP,
    (OWN,),
    (),
    (row(1, agents=SHARED), row(3, agents=SHARED)),
    (JOB,),
    frozenset({7}),
    frozenset({7}),
    slurm_node=BUSY,
)


def third(*holders: dict[str, str], **members: Any) -> dict[str, Any]:
    """The facts of a node whose second GPU is as given."""
    return {"devices": (row(1, agents=SHARED), row(3, *holders, **({"agents": SHARED} | members)))}


def node(*flags: str, used: tuple[int, ...] = (0,), **facts: Any) -> dict[str, Any]:
    """The facts of a node with these flags."""
    return {"slurm_node": SlurmNode(frozenset(flags), used=frozenset(used)), **facts}


RUNNING = Placeholder(9, "RUNNING", "None", float("inf"), "cuda3", "k1")
WAITS = RUNNING._replace(job_id=10, state="PENDING")
USED_BY_KERNEL = third({"kernel_id": "k1", "amount": "1"})
BLOCKED = node("MIXED", used=(0, 1), placeholders=(RUNNING,))
OVER = {"jobs": (), "alive": frozenset()}
UNCLAIMED = {"claims": ()}
START = StartPlaceholder("cuda3", "k1")
SYNC_CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "in step": ({}, []),
    "a kernel": (USED_BY_KERNEL, [START]),
    "a claim": (third({"claim_id": "c-1"}), [StartPlaceholder("cuda3", "c-1")]),
    "a device of its own": (third({"kernel_id": "k1"}, agents=["slurm"]), []),
    "a drained device of its own": (third(agents=["slurm"], state="drained"), []),
    "the job's claim": ({"devices": (row(1, {"claim_id": "slurm-7"}, agents=SHARED), row(3))}, []),
    "a kernel of the job's claim": (USED_BY_KERNEL | {"kernels": (KERNEL,)}, []),
    "the claim of a device that jobs share": (
        third({"claim_id": OF_ID}) | {"claims": (OWN, OF_DEVICE), "jobs": (JOB, SHARER)},
        [],
    ),
    "blocked": (USED_BY_KERNEL | BLOCKED, []),
    "a GPU that a job has": (USED_BY_KERNEL | node("MIXED", used=(0, 1)), []),
    "another holder": (third({"kernel_id": "k2"}) | BLOCKED, [RenamePlaceholder(9, "k2")]),
    "free again": (BLOCKED, [EndPlaceholder(9, "its GPU is free or blocked by another one")]),
    "blocked twice": (
        USED_BY_KERNEL | BLOCKED | {"placeholders": (WAITS, RUNNING)},
        [EndPlaceholder(10, "its GPU is free or blocked by another one")],
    ),
    "near its limit": (
        USED_BY_KERNEL | BLOCKED | {"placeholders": (RUNNING._replace(time_left_s=59),)},
        [EndPlaceholder(9, "its time limit is near")],
    ),
    "not looked at by Slurm yet": (USED_BY_KERNEL | {"placeholders": (WAITS,)}, []),
    "waits while a job has the GPU": (
        USED_BY_KERNEL | node("MIXED", used=(0, 1), placeholders=(WAITS,)),
        [EndPlaceholder(10, "a job has its GPU")],
    ),
    "waits for a reason": (
        USED_BY_KERNEL | {"placeholders": (WAITS._replace(reason="Resources"),)},
        [GiveUpPlaceholder(10, "cuda3", "Resources")],
    ),
    "failed just now": (USED_BY_KERNEL | {"postponed": frozenset({"cuda3"})}, []),
    "a type of several GPUs": (
        USED_BY_KERNEL | {"gres_map": GresMap("slurm", dict.fromkeys((0, 1), MAP.devices[1]))},
        [GiveUpPlaceholder(None, "cuda3", "several GPUs have this type in gres.conf")],
    ),
    "no CPU is free": (USED_BY_KERNEL | node("ALLOCATED"), []),
    "not responding": (USED_BY_KERNEL | node("MIXED", "NOT_RESPONDING"), []),
    "blocked, not responding": (
        USED_BY_KERNEL | BLOCKED | node("MIXED", "NOT_RESPONDING", used=(0, 1)),
        [],
    ),
    "in its reservation": (
        USED_BY_KERNEL | node("MIXED", "RESERVED", in_reservation=True),
        [START],
    ),
    "waits for the first look": (
        third(state="withheld", reason="until engine slurm is ready"),
        [],
    ),
    "withheld": (
        third(state="withheld", reason="until engine kubernetes is ready"),
        [StartPlaceholder("cuda3", "withheld")],
    ),
    "drained": (third(state="drained"), [StartPlaceholder("cuda3", "drained")]),
    "missing": ({"devices": (row(1, agents=SHARED),)}, [StartPlaceholder("cuda3", "missing")]),
    "missing, of its own": ({"devices": (row(1),)}, []),
    "unknown to slurmctld, alive": ({"jobs": ()}, []),
    "known to slurmctld, no process yet": ({"alive": frozenset()}, []),
    "unknown, and gone": (OVER, [EndClaim("slurm-7", 7)]),
    "ended, and gone": (
        OVER | {"jobs": (JOB._replace(state="COMPLETED"),)},
        [EndClaim("slurm-7", 7)],
    ),
    "a job without a claim": (UNCLAIMED, [ClaimRunningJob(7)]),
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
        [EndClaim("slurm-7", 7), EndClaim("slurm-7-2", 7)],
    ),
    "a shared device": ({"jobs": (JOB, SHARER), "claims": (OWN, OF_DEVICE)}, []),
    "a shared device that nobody uses": ({"claims": (OWN, OF_DEVICE)}, [EndClaim(OF_ID, None)]),
    "a shared device, and processes of no job": (
        {"claims": (OWN, OF_DEVICE), "running": frozenset({5, 7})},
        [],
    ),
    "a shared device without a claim": (
        {"jobs": (JOB, SHARER), "running": frozenset({7, 8})},
        [ClaimRunningJob(8)],
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


@pytest.mark.parametrize(
    "flag", ["DRAIN", "DOWN", "FAIL", "REBOOT_REQUESTED", "MAINTENANCE", "RESERVED", "POWER_DOWN"]
)
def test_node_that_takes_no_jobs_has_no_placeholders(flag: str) -> None:
    facts = SYNC._replace(**USED_BY_KERNEL, **node("MIXED", flag, used=(0, 1)))
    assert decide_sync(facts) == []
    facts = facts._replace(placeholders=(RUNNING,))
    assert typed(decide_sync(facts)) == typed([EndPlaceholder(9, flag)])


def test_pause_grows_with_the_time_of_the_answer() -> None:
    assert [pause_s(seconds) for seconds in (0, 0.1, 1, 60)] == [4, 4, 20, 60]


@given(st.booleans(), st.booleans(), st.sampled_from(["RUNNING", "COMPLETING", "CONFIGURING"]))
def test_sync_never_ends_the_claim_of_a_live_job(known: bool, alive: bool, state: str) -> None:
    jobs = (JOB._replace(state=state),) if known else ()
    facts = SYNC._replace(jobs=jobs, alive=frozenset({7} if alive else ()))
    has_ended = (EndClaim, "slurm-7", 7) in typed(decide_sync(facts))
    assert has_ended == (not known and not alive)


GOOD = {
    "ProctrackType": "proctrack/cgroup",
    "PrologFlags": "Alloc,Contain,DeferBatch",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "Prolog": "/usr/bin/agentd-slurm-prolog",
    "Epilog": "/usr/bin/agentd-slurm-epilog",
    "TaskProlog": "/usr/bin/agentd-slurm-task-prolog",
    "DisableRootJobs": "No",
    "TaskPlugin": "task/affinity,task/cgroup",
    "ConstrainDevices": "yes",
    "SuspendProgram": "(null)",
    "SuspendTime": "INFINITE",
    "RebootProgram": "(null)",
}
SUSPENDS = {"SuspendProgram": "/sbin/suspend", "SuspendTime": "600 sec"}


def settings_checks(**changes: str) -> list[SlurmCheck]:
    return list(check_settings(GOOD | changes, "n1", SlurmNode(partitions=("gpu", "all"))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ProctrackType", "proctrack/linuxproc"),
        ("PrologFlags", "(null)"),
        ("Prolog", "(null)"),
        ("Epilog", "(null)"),
        ("TaskProlog", "(null)"),
        ("DisableRootJobs", "Yes"),
        ("SelectType", "select/linear"),
        ("GresTypes", "(null)"),
    ],
)
def test_doctor_names_the_setting(name: str, value: str) -> None:
    assert all(check.passed for check in settings_checks())
    failed = [check for check in settings_checks(**{name: value}) if not check.passed]
    assert [check.name for check in failed] == [name]
    assert value in failed[0].detail


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, False),
        ({"SuspendExcNodes": "m[1-2],n2"}, False),
        ({"SuspendExcNodes": "n[1-9]:2,n[", "SuspendExcParts": "cpu"}, True),
        ({"SuspendExcNodes": "n["}, False),
        ({"SuspendExcParts": "cpu,gpu"}, True),
        ({"SuspendTime": "NONE"}, True),
        ({"SuspendProgram": "(null)"}, True),
    ],
)
def test_doctor_names_what_suspends_the_node(changes: dict[str, str], passes: bool) -> None:
    assert all(check.passed for check in settings_checks(**SUSPENDS | changes)) == passes


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("GresTypes", "gpu,shard,nic", "nic"),
        ("PrologFlags", "Alloc", "DeferBatch"),
        ("RebootProgram", "/sbin/reboot", "/sbin/reboot"),
        ("TaskPlugin", "task/none", "task/none"),
        ("ConstrainDevices", "no", "ConstrainDevices=no"),
        ("PreemptType", "preempt/qos", "qos"),
    ],
)
def test_doctor_notes_the_setting(name: str, value: str, text: str) -> None:
    notes = [row for row in settings_checks(**{name: value}) if row.detail.startswith("note: ")]
    assert [row.passed for row in notes] == [True]
    assert text in notes[0].detail
    assert not [row for row in settings_checks() if row.detail.startswith("note: ")]


def test_doctor_compares_gres_with_the_map() -> None:
    assert check_gres(MAP, "gpu:cuda1:1,gpu:cuda3:1(S:0)").passed
    assert not check_gres(MAP, "gpu:cuda1:1").passed
    assert not check_gres(MAP, "gpu:cuda3:1,gpu:cuda1:1").passed
    assert not check_gres(MAP, "(null)").passed
    models = GresMap.of("slurm", [GresDevice(f"cuda{n}", f"GPU-{n}", "A100") for n in (1, 3)])
    assert check_gres(models, "gpu:a100:2(S:0-1),shard:8").passed
    assert not check_gres(models, "gpu:a100:1").passed


def test_doctor_compares_the_types_of_a_job_with_the_map() -> None:
    assert check_job(None, "n1", MAP).passed
    assert check_job(JOB._replace(types={"n1": {0: "cuda1", 1: "cuda3"}}), "n1", MAP).passed
    check = check_job(JOB._replace(types={"n1": {0: "cuda3"}}), "n1", MAP)
    assert not check.passed
    assert "cuda3" in check.detail
    assert "cuda1" in check.detail


def test_doctor_wants_a_type_for_each_shared_device() -> None:
    models = GresMap.of("slurm", [GresDevice(f"cuda{n}", f"GPU-{n}", "a100") for n in (1, 3)])
    shared = (row(1, agents=SHARED), row(3, agents=SHARED))
    assert check_map(models, ROWS).passed
    assert not check_map(models, shared).passed
    assert check_map(MAP, shared).passed
    assert shared_types(MAP, shared) == ["cuda1", "cuda3"]
    assert shared_types(MAP, ROWS) == []
