from __future__ import annotations

import math

import pytest

from agentd_slurm.jobs import UnreadableAnswer
from agentd_slurm.placeholders import (
    Placeholder,
    SlurmNode,
    choose_partitions,
    parse_node,
    parse_placeholders,
    submit_options,
)
from agentd_slurm.settings import PlaceholderSettings

QUEUE = """\
3|PENDING|Resources|UNLIMITED|gres:gpu:cuda3:1|n1|agentd:k1
8|RUNNING|None|1-00:04:59|gres/gpu:cuda1:1|n1|agentd:a|b
9|RUNNING|None|4:59|gres:gpu:cuda2:1|n2|agentd:k2
10|COMPLETING|None|0:00|gres:gpu:cuda3:1|n1|agentd:k1
12|RUNNING|None|0:00|gres:gpu:cuda3:1|n1|a job of root
11|CANCELLED|None|0:00|gres:gpu:cuda3:1|n1|agentd:k1
"""
NODE = (
    "NodeName=n1 Arch=x86_64 Gres=gpu:cuda0:1,gpu:cuda1:1,shard:cuda0:2 GresDrain=N/A "
    "GresUsed=gpu:cuda0:0(IDX:N/A),gpu:cuda1:3(IDX:1,4-5),shard:cuda0:1(IDX:0),nic:1(IDX:7) "
    "OS=Linux 6.1 #1 SMP State=MIXED*+DRAIN Partitions=main,gpu  Reason=State=IDLE"
)
PARTITIONS = """\
PartitionName=main OverSubscribe=NO DisableRootJobs=NO PriorityTier=1 ReqResv=NO State=UP
PartitionName=gpu OverSubscribe=NO DisableRootJobs=NO PriorityTier=5 ReqResv=NO State=UP
PartitionName=root OverSubscribe=NO DisableRootJobs=YES PriorityTier=1 ReqResv=NO State=UP
PartitionName=down OverSubscribe=NO DisableRootJobs=NO PriorityTier=1 ReqResv=NO State=DOWN
PartitionName=whole OverSubscribe=EXCLUSIVE DisableRootJobs=NO PriorityTier=1 State=UP
PartitionName=resv OverSubscribe=NO DisableRootJobs=NO PriorityTier=1 ReqResv=YES State=UP
PartitionName=other OverSubscribe=NO DisableRootJobs=NO PriorityTier=1 ReqResv=NO State=UP
"""
ALL = SlurmNode(partitions=("main", "gpu", "root", "down", "whole", "resv"))


def test_placeholders_of_a_node_are_read_until_they_end() -> None:
    assert parse_placeholders(QUEUE, "n1") == [
        Placeholder(3, "PENDING", "Resources", math.inf, "cuda3", "k1"),
        Placeholder(8, "RUNNING", "None", 86400 + 299, "cuda1", "a|b"),
    ]
    (changed,) = parse_placeholders("1|RUNNING|None|0:10|N/A|n1|agentd:k1", "n1")
    assert changed.gpu_type == "", "it blocks no GPU, and is ended"
    for text in (
        "x",
        "x|RUNNING|a|1|g:c:1|n1|agentd:k",
    ):
        with pytest.raises(UnreadableAnswer):
            parse_placeholders(text, "n1")


def test_node_is_read_with_the_gpus_that_jobs_have() -> None:
    gres = "gpu:cuda0:1,gpu:cuda1:1,shard:cuda0:2"
    used = frozenset({0, 1, 4, 5})
    assert parse_node(NODE) == SlurmNode(frozenset({"MIXED", "DRAIN"}), ("main", "gpu"), gres, used)


def test_partitions_are_those_that_take_a_job_of_root() -> None:
    default = PlaceholderSettings()
    assert choose_partitions(PARTITIONS, ALL, default) == ["gpu,main", "gpu", "main"]
    assert choose_partitions(PARTITIONS, SlurmNode(partitions=("main",)), default) == ["main"]
    assert choose_partitions(PARTITIONS, SlurmNode(partitions=("down",)), default) == []
    named = default._replace(partition="down")
    assert choose_partitions(PARTITIONS, ALL, named) == ["down"]
    reserved = default._replace(reservation="r")
    assert choose_partitions(PARTITIONS, ALL, reserved)[0] == "gpu,main,resv"


def test_placeholder_has_the_options_of_the_settings() -> None:
    settings = PlaceholderSettings(account="ops", time="1-0", nice=5)
    assert submit_options("n1", "cuda3", settings) == [
        "--account=ops",
        "--time=1-0",
        "--nice=5",
        "--nodelist=n1",
        "--gres=gpu:cuda3:1",
    ]
