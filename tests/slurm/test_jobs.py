from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm.jobs import UnreadableAnswer, expand_hosts, indices, parse_jobs

ROW: dict[str, Any] = {
    "job_id": 7,
    "user_id": 1000,
    "job_state": "RUNNING",
    "comment": "",
    "tres_per_node": "gres:gpu:cuda3:1,gres:gpu:cuda7:1",
    "required_nodes": "",
    "nodes": "n[1-2]",
    "gres_detail": ["gpu:cuda3:1(IDX:3)", "gpu:cuda3:0(IDX:),gpu:cuda7:1(IDX:7)"],
}
"""A job as squeue 22.05 shows it, without the members that are not read."""


@pytest.mark.parametrize(
    ("detail", "wanted"),
    [
        pytest.param("gpu:cuda3:1(IDX:1),gpu:cuda7:1(IDX:3)", {1, 3}, id="two types"),
        pytest.param("gpu:cuda3:0(IDX:),gpu:cuda5:1(IDX:2)", {2}, id="a type with none"),
        pytest.param("gpu:4(IDX:0-2,5)", {0, 1, 2, 5}, id="a range, untyped"),
        pytest.param("nic:1(IDX:4),gpu:1(IDX:0)", {0}, id="another gres"),
        pytest.param("mygpu:1(IDX:4)", set(), id="another gres that ends alike"),
        pytest.param("gpu:0(IDX:N/A)", set(), id="none"),
        pytest.param("", set(), id="empty"),
        pytest.param("gpu:2(CNT:2)", None, id="a count without indices"),
        pytest.param("gpu:2", None, id="a bare count"),
    ],
)
def test_indices_of_a_detail(detail: str, wanted: set[int] | None) -> None:
    assert indices(detail) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,m1", ["n1", "m1"]),
        ("n[1-3,5],m1", ["n1", "n2", "n3", "n5", "m1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_host_list_is_expanded(text: str, wanted: list[str]) -> None:
    assert expand_hosts(text) == wanted


@pytest.mark.parametrize("text", ["n[", "n[a-b]", "n[1-", ",n1", "n[1-999999999]"])
def test_host_list_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hosts(text)


def test_job_has_the_gpus_of_each_node() -> None:
    (job,) = parse_jobs(json.dumps({"jobs": [ROW]}))
    assert job.gpus == {"n1": {3}, "n2": {7}}
    assert (job.gpu_type, job.nodes, job.is_on("n2")) == ("cuda3", ("n1", "n2"), True)


def test_job_of_a_later_release_reads_the_same() -> None:
    later = ROW | {
        "job_id": {"set": True, "infinite": False, "number": 7},
        "job_state": ["RUNNING"],
        "tres_per_node": "gres/gpu:cuda3:1,gres/gpu:cuda7:1",
    }
    assert parse_jobs(json.dumps({"jobs": [later]})) == parse_jobs(json.dumps({"jobs": [ROW]}))


def test_completing_job_is_still_on_its_nodes() -> None:
    later = ROW | {"job_state": ["PENDING", "COMPLETING"]}
    (job,) = parse_jobs(json.dumps({"jobs": [later]}))
    assert job.is_on("n1")


@pytest.mark.parametrize(
    ("user", "comment", "wanted"),
    [(0, "agentd:k1", True), (1000, "agentd:k1", False), (0, "x agentd:k1", False), (0, "", False)],
)
def test_placeholder_is_a_job_of_root_alone(user: int, comment: str, wanted: object) -> None:
    row = ROW | {"user_id": user, "comment": comment}
    (job,) = parse_jobs(json.dumps({"jobs": [row]}))
    assert job.is_placeholder is wanted


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"jobs": 1}', '{"jobs": [{}]}', '{"jobs": [{"job_id": "x"}]}']
)
def test_answer_that_is_something_else_is_an_error(text: str) -> None:
    with pytest.raises(UnreadableAnswer, match="squeue"):
        parse_jobs(text)


@given(st.sets(st.integers(0, 63)))
def test_indices_are_read_back(chosen: set[int]) -> None:
    text = ",".join(str(number) for number in sorted(chosen))
    assert indices(f"gpu:{len(chosen)}(IDX:{text})") == chosen
