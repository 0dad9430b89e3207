"""The jobs of a look of `agentd-slurm sync`."""

from __future__ import annotations

import pytest

from agentd_slurm import controller
from agentd_slurm.commands.sync import Synchronizer
from agentd_slurm.controller import QueuedJob
from agentd_slurm.jobs import Job, UnclearJob


def test_job_that_cannot_be_read_may_share_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user can give it a name that looks like another job, while it runs."""

    def get_job(job_id: int) -> Job:
        raise UnclearJob(str(job_id))

    monkeypatch.setattr(controller, "get_job", get_job)
    monkeypatch.setattr(controller, "list_jobs", lambda _: [QueuedJob(7, 1000, "RUNNING", "now")])
    (job,) = Synchronizer("n1")._read_jobs()
    assert (job.is_on("n1"), job.shared) == (True, {"n1": None})
