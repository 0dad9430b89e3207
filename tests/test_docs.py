"""Documents are true: their configurations are accepted, and their links lead somewhere.

A block of TOML is a whole `agent.toml` unless the word after `toml` says otherwise:
`fragment` (of a node that has the agents agent-1 and agent-2), `fleet` and `fleet-fragment` (of a
`fleet.toml`), `not-agentd`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import fork_server

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
AGENTS = "".join(f'[[agents]]\nid = "agent-{number}"\n' for number in (1, 2))
FLEET = '[fleet]\nnodes = ["https://node-1:6001"]\n'
KINDS = {
    "": ("agentd", ""),
    "fragment": ("agentd", AGENTS),
    "fleet": ("agentd-fleet", ""),
    "fleet-fragment": ("agentd-fleet", FLEET),
}
NOT_HERE = ("systemd is not PID 1 here; use docker or process", "No such file or directory")
"""How a refusal ends that is about the machine of the test and not about what is written."""


class Block(NamedTuple):
    """A fenced block of a page: what stands after its fence, and its text."""

    place: str
    info: list[str]
    text: str


def tokens(page: Path) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def blocks(language: str) -> list[Block]:
    return [
        Block(f"{page.relative_to(ROOT)}:{token.map[0] + 1}", token.info.split()[1:], token.content)
        for page in PAGES
        for token in tokens(page)
        if token.type == "fence" and token.map and token.info.split()[:1] == [language]
    ]


@pytest.mark.parametrize(
    "block",
    [block for block in blocks("toml") if block.info != ["not-agentd"]],
    ids=lambda block: block.place,
)
def test_configuration_in_a_document_is_accepted(block: Block, tmp_path: Path) -> None:
    program, base = KINDS[" ".join(block.info)]
    file = tmp_path / "written.toml"
    file.write_text(base + block.text)
    done = fork_server.run(program, "check-config", "--config", str(file))
    refused = [line for line in done.stderr.splitlines() if not line.endswith(NOT_HERE)]
    assert done.returncode == 0 or not refused, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = [str(token.attrs["href"]) for token in tokens(page) if token.type == "link_open"]
    files = [link.partition("#")[0] for link in links if "://" not in link]
    assert [file for file in files if not (page.parent / file).exists()] == []
