"""A device that an operator names in another spelling than the plugin's."""

import pytest

from agentd.cli.agentctl.main import _find_device

UUID = "0000abcd-1111-2222-3333-444444444444"


class Client:
    def devices(self) -> list[dict[str, object]]:
        names = {"stable_id": f"GPU-{UUID}", "aliases": ["0000:3b:00.0"]}
        return [{"device_name": "cuda", "id": "cuda1", **names}]


@pytest.mark.parametrize("name", ["cuda1", "00000000:3B:00.0", "3b:00.0", UUID, f"cuda/{UUID}"])
def test_agentctl_finds_a_device_in_each_spelling(name: str) -> None:
    assert _find_device(Client(), name) == ("cuda", "cuda1")
