"""`agentctl create`: the body that its options make."""

from typing import Any

import pytest

from agentd.cli.agentctl.create import create, kernel_body
from agentd.rpc.requests import CreateKernelRequest


@pytest.mark.parametrize(
    ("words", "members"),
    [
        ([], {}),
        (["--init"], {"init": True}),
        (["--group", "2000", "--group", "video"], {"groups": ["2000", "video"]}),
        (["--entrypoint", ""], {"entrypoint": []}),
        (["--entrypoint", "/bin/sh"], {"entrypoint": ["/bin/sh"]}),
    ],
)
def test_options_make_the_members_of_a_create(words: list[str], members: dict[str, Any]) -> None:
    with create.make_context("create", ["a", *words, "--", "x", "--init"]) as context:
        body = kernel_body(context.params)
    assert body == {"command": ["x", "--init"], **members}
    CreateKernelRequest.model_validate(body)
