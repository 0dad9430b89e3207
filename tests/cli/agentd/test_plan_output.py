"""Devices that kernels and claims would hold under another partition, with a stand-in client."""

from pathlib import Path

import pytest

from agentd.cli.agentd import plan_output
from core.machines import cores, gpus, machine, memory, shared


class Answers:
    """The answers of a daemon: of the holders of its devices, some have ended since."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def devices(self) -> list[dict[str, object]]:
        holders = [
            {"kernel_id": "gone", "amount": "1", "amounts": {"cuda.device": "1"}},
            {"claim_id": "gone", "amount": "1", "amounts": {"cuda.device": "1"}},
            {"claim_id": "c1", "amount": "1", "amounts": {"cuda.device": "1"}},
        ]
        return [
            {
                "device_name": "cuda",
                "id": "cuda0",
                "stable_id": "GPU-cuda-0",
                "slot": "cuda.device",
                "holders": holders,
            }
        ]

    def kernels(self) -> list[dict[str, object]]:
        return []

    def claims(self) -> list[dict[str, object]]:
        held = {"cuda": {"cuda.device": {"cuda0": "1"}}}
        return [{"claim_id": "c1", "agent_id": "left", "allocation": held}]


def test_a_holder_that_has_ended_since_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_output, "Client", Answers)
    (held,) = plan_output.holdings_under(
        shared(machine(*cores(2), memory(), *gpus(1)), "a"), Path("/nowhere")
    )
    assert (held["claim_id"], held["reason"]) == ("c1", "the device would belong to a")
