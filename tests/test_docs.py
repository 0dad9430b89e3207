"""Documents are true: their configurations are accepted, and their links lead somewhere.

A block of TOML is a whole `agent.toml` unless the word after `toml` says otherwise:
`fragment` (of a node that has the agents agent-1 and agent-2), `fleet` and `fleet-fragment` (of a
`fleet.toml`), `not-agentd`.
"""

import itertools
import re
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
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
"""The characters of a heading that its anchor lacks."""
NOT_HERE = (
    "systemd is not PID 1 here; use docker or process",
    "No such file or directory",
    "on this host",
)
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


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    headings = [token for token in tokens(page) if token.type == "heading_open" and token.map]
    lines = page.read_text().splitlines()
    for heading in headings:
        inline = MarkdownIt("commonmark").parseInline(lines[heading.map[0]].lstrip("# "))
        text = "".join(
            token.content for token in inline[0].children if token.type in ("text", "code_inline")
        )
        slug = NOT_IN_ANCHORS.sub("", text.strip().lower()).replace(" ", "-")
        again = itertools.count(1)
        anchor = slug
        while anchor in found:
            anchor = f"{slug}-{next(again)}"
        found.add(anchor)
    return found


def dead(page: Path, link: str) -> bool:
    """Return whether a link of a page leads to a file or a heading that is not there."""
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page: Path) -> None:
    kinds = {"link_open": "href", "image": "src"}
    links = [str(token.attrs[kinds[token.type]]) for token in tokens(page) if token.type in kinds]
    inside = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in inside if dead(page, link)] == []


def test_dead_anchors_and_images_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A `b_c`, d.\n## Twice\n## Twice\n")
    page.write_text("# Here\n")
    for link in ("#here", "other.md", "other.md#a-b_c-d", "other.md#twice-1"):
        assert not dead(page, link), link
    for link in ("#there", "none.png", "other.md#twice-2", "other.md#a-bc-d"):
        assert dead(page, link), link
