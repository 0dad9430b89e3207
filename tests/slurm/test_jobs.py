from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd_slurm import controller
from agentd_slurm.jobs import (
    UnclearJob,
    UnreadableAnswer,
    expand_hosts,
    parse_gpu_indices,
    parse_job,
    parse_types,
)

ANSWER = (
    "JobId=7 {ids}JobName={name} UserId={user}(1000) GroupId=domain users(100) MCS_label={label}"
    " Priority=1 Nice=0 Account={account} QOS=(null) JobState={state} Reason=None"
    " Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Partition=main AllocNode:Sid=host:4135"
    " ReqNodeList={required} ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=2"
    " TRES=cpu=2,node=2,billing=2 JOB_GRES=gpu:cuda3:1,gpu:cuda7:1   Nodes=n1 CPU_IDs=1-2,4 Mem=0"
    " GRES=gpu:cuda3:1(IDX:3)   Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:cuda3:0(IDX:),gpu:cuda7:1(IDX:7)"
    " MinCPUsNode=1 Features=(null) Command={command} WorkDir=/home Comment={comment}"
    " StdErr=/dev/null StdOut=/dev/null Power= TresPerNode=gres:gpu:cuda3:1,gres:gpu:cuda7:1 \n"
)
"""An answer of scontrol 22.05, without the members that are not read."""
USUAL = {
    "ids": "",
    "label": "N/A",
    "name": "train",
    "user": "ada",
    "account": "(null)",
    "state": "RUNNING",
    "required": "(null)",
    "command": "(null)",
    "comment": "(null)",
}


def answer(**changes: str) -> str:
    return ANSWER.format(**USUAL | changes)


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
        pytest.param("shard:a100:2(IDX:1),gpu:1(IDX:0)", {0}, id="beside a shard"),
    ],
)
def test_indices_of_a_detail(detail: str, wanted: set[int] | None) -> None:
    assert parse_gpu_indices(detail) == wanted


@pytest.mark.parametrize(
    ("detail", "wanted"),
    [
        ("shard:2(IDX:1),gpu:1(IDX:0)", {1}),
        ("shard:a100:2(IDX:1),mps:50(IDX:3)", {1, 3}),
        ("gpu:1(IDX:0),myshard:1(IDX:1)", set()),
        ("mps:0(IDX:N/A)", set()),
        ("shard:2", None),
    ],
)
def test_shared_indices_of_a_detail(detail: str, wanted: set[int] | None) -> None:
    assert parse_gpu_indices(detail, "shard", "mps") == wanted


def test_types_of_a_detail_are_those_of_its_indices() -> None:
    detail = "gpu:cuda3:2(IDX:0-1),gpu:cuda5:0(IDX:),gpu:1(IDX:7),shard:cuda9:1(IDX:9)"
    assert parse_types(detail) == {0: "cuda3", 1: "cuda3"}


@pytest.mark.parametrize(
    "text",
    ["JobId=" + "9" * 5000 + " JobName=x", "", "(" * 5000, "JobId= JobName=",
     "JobId=7 JobName=x UserId=a(" + "9" * 5000 + ") GroupId=a(1) MCS_label= Priority=1 Nice=0"],
)  # fmt: skip
def test_odd_answers_are_unreadable_or_unclear(text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_job(text)


@given(st.text(alphabet="gpushardmps:,()[]0123456789-IDX=NA/ "))
def test_any_detail_is_read_or_unreadable(detail: str) -> None:
    with contextlib.suppress(UnreadableAnswer):
        parse_job(answer().replace("gpu:cuda3:1(IDX:3)", detail))


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
    job = parse_job(answer())
    assert job.gpus == {"n1": {3}, "n2": {7}}
    assert (job.job_id, job.user_id, job.state) == (7, 1000, "RUNNING")
    assert (job.nodes, job.is_on("n2")) == (("n1", "n2"), True)


def test_later_release_and_several_nodes_read_the_same() -> None:
    text = answer(required="n[1-2]").replace("gres:gpu", "gres/gpu")
    text = text.replace("   Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:cuda3:0(IDX:),gpu:cuda7:1(IDX:7)", "")
    job = parse_job(text.replace("Nodes=n1 CPU", "Nodes=n[1-2] CPU"))
    assert job.gpus == {"n1": {3}, "n2": {3}}


@pytest.mark.parametrize(
    ("ids", "name"),
    [
        ("", "7"),
        ("ArrayJobId=7 ArrayTaskId=2 ", "7_2"),
        ("ArrayJobId=4 ArrayTaskId=0 ArrayTaskThrottle=2 ", "4_0"),
        ("HetJobId=6 HetJobOffset=1 ", "6+1"),
    ],
)
def test_task_and_component_are_named_apart_from_their_set(ids: str, name: str) -> None:
    assert parse_job(answer(ids=ids)).name == name
    with pytest.raises(UnclearJob) as unclear:
        parse_job(answer(ids=ids) + answer(ids=ids))
    assert unclear.value.job == name


def test_job_that_has_the_id_of_its_set_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = answer(ids="ArrayJobId=7 ArrayTaskId=2 ")
    answers = {"7": task + answer(), "7_2": task}
    monkeypatch.setattr(controller, "run_command", lambda *words: answers[words[-1]])
    found = controller.get_job(7)
    assert found is not None
    assert (found.job_id, found.name) == (7, "7_2")


def test_answer_about_another_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "run_command", lambda *_: answer())
    with pytest.raises(UnreadableAnswer, match="job 8: got job 7 first"):
        controller.get_job(8)


LIES = (
    "x JobState=PENDING NodeList=(null) JOB_GRES=(null)",
    "x\nJobId=1 JobState=PENDING ReqNodeList=n9 NodeList=n9 Comment=agentd:x",
    "x JOB_GRES=gpu:1   Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0) MinCPUsNode=1",
    "\t\x85\u2028 TresPerNode=gres:gpu:cuda1:1",
    "JobName=y ArrayJobId=1 ArrayTaskId=1",
    "\ufffd\x00",
)


TEXTS = pytest.mark.parametrize("member", ["name", "label", "command", "comment"])


@TEXTS
@pytest.mark.parametrize("lie", LIES)
def test_texts_of_a_user_change_no_other_field(member: str, lie: str) -> None:
    job, true = parse_job(answer(**{member: lie})), parse_job(answer())
    for field in ("job_id", "name", "user_id", "state", "nodes", "gpus"):
        assert getattr(job, field) == getattr(true, field)


@TEXTS
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "begin",
    ["x UserId=root(0) GroupId=root(0) MCS_label=N/A", "x Priority=1 Nice=0 Account=(null)",
     "x UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=-5 Account=(null)"],
)  # fmt: skip
def test_text_that_could_be_another_job_is_unclear(member: str, begin: str, lie: str) -> None:
    """Such a job is sent back: which of the two is the true one cannot be told."""
    with pytest.raises(UnclearJob, match="job 7: its name, label or comment looks like another"):
        parse_job(answer(**{member: f"{begin} {lie}"}))


@TEXTS
@pytest.mark.parametrize(
    "part",
    ["UserId=root(0)", "UserId=root(0) GroupId=", "UserId=root(0) GroupId=root(0)", "UserId=root",
     "Priority=1", "Priority=1 Nice=0", "Priority=1 Nice=0 Account", "MCS_label=", "GroupId=a(1)"],
)  # fmt: skip
def test_parts_of_those_fields_change_nothing(member: str, part: str) -> None:
    for text in (f"x {part}", f"{part} x", f"x {part} y {part}"):
        job = parse_job(answer(**{member: text}))
        assert (job.user_id, job.state, job.gpus) == (1000, "RUNNING", {"n1": {3}, "n2": {7}})


WORDS = st.lists(
    st.sampled_from([" UserId=", "(0)", " GroupId=", " MCS_label=", " Priority=", "1", " Nice=",
                     " Account=", " JobState=", " NodeList=", " JOB_GRES=", "\n", "x", "=", " "])
).map("".join)  # fmt: skip


@given(st.text() | WORDS, st.text() | WORDS, st.text() | WORDS)
def test_texts_never_forge_a_field(name: str, label: str, comment: str) -> None:
    try:
        job = parse_job(answer(name=name, label=label, comment=comment))
    except UnclearJob:
        return
    assert (job.user_id, job.state, job.gpus) == (1000, "RUNNING", {"n1": {3}, "n2": {7}})


def test_account_and_user_are_any_words() -> None:
    job = parse_job(answer(account="a jobstate=pending userid=root(0)", user="ad\\ada lovelace"))
    assert (job.user_id, job.state) == (1000, "RUNNING")


def test_required_nodes_of_a_user_are_any_text() -> None:
    assert parse_job(answer(required="n1,,x[")).nodes == ("n1", "n2")


@pytest.mark.parametrize(
    ("user", "comment", "wanted"),
    [("0", "agentd:k1", True), ("1000", "agentd:k1", False), ("0", "x agentd:k1", False),
     ("0", "(null)", False)],
)  # fmt: skip
def test_placeholder_is_a_job_of_root_alone(user: str, comment: str, wanted: object) -> None:
    job = parse_job(answer(comment=comment).replace("(1000)", f"({user})"))
    assert job.is_placeholder is wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "JobId=x JobName=",
        "JobId=7 JobName=x",
        answer().replace("NodeList=n[1-2]", "NodeList=n["),
    ],
)
def test_answer_that_is_something_else_is_an_error(text: str) -> None:
    with pytest.raises(UnreadableAnswer, match="scontrol"):
        parse_job(text)


@given(st.sets(st.integers(0, 63)))
def test_indices_are_read_back(chosen: set[int]) -> None:
    text = ",".join(str(number) for number in sorted(chosen))
    assert parse_gpu_indices(f"gpu:{len(chosen)}(IDX:{text})") == chosen
