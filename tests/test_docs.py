"""Documents are true and readable: configurations are accepted, links lead somewhere.

Generated pages follow the code, and the text keeps the rules for plain English.

A block of TOML is a whole `agent.toml` unless the word after `toml` says otherwise:
`fragment` (of a node that has the agents agent-1 and agent-2), `fleet` and `fleet-fragment` (of a
`fleet.toml`), `not-agentd`.
"""

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from agentd.http.problems import STATUSES
from support import fork_server
from support.plain_english import FORBIDDEN, FORBIDDEN_FIRST

ROOT = Path(__file__).parents[1]
RECORDS = set((ROOT / "docs/contributing/hardware").glob("2*.md"))
"""What programs printed on real hardware."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted({*(ROOT / "docs").glob("*/**/*.md")} - RECORDS)]
PAGES.append(ROOT / "docs" / "README.md")
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
    "systemd is not PID 1; use docker or process",
    "No such file or directory",
    "on this host",
    "cannot be written: permission denied",
    "not a member of group 'users'",
    "agentd is not root and runs kernels as its own user",
)
"""Ends of refusals that depend on the test's host and not on the document."""

LINE = 100
CELL = 2 * LINE
"""Characters of a line of prose, and of a table cell: two such lines."""


class Block(NamedTuple):
    """A fenced block of a page: what stands after its fence, and its text."""

    place: str
    info: list[str]
    text: str


def tokens(page: Path) -> list[Token]:
    return parsed(page.read_text())


@functools.cache
def parsed(text: str) -> list[Token]:
    """Return the tokens of a page, each followed by its children."""
    found = MarkdownIt("commonmark").enable("table").parse(text)
    return [each for token in found for each in (token, *(token.children or ()))]


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


def prose_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page that stand neither in code, a table nor an address."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    kinds = ("fence", "code_block", "table_open", "html_block")
    skipped = {n for t in parsed if t.type in kinds and t.map for n in range(*t.map)}
    for number, line in enumerate(page.read_text().splitlines()):
        if number not in skipped and not re.fullmatch(r"\[\w+\]: \S+", line):
            yield number + 1, line


def texts(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each block of a page, without code."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    for before, token in itertools.pairwise(parsed):
        if token.type == "inline":
            parts = ("`" if t.type == "code_inline" else t.content for t in token.children or ())
            yield before.type, " ".join("".join(part or " " for part in parts).split())


def breaches(page: Path) -> list[str]:
    """Return the lines, cells and phrases of a page that break the rules for text."""
    found = [f"line {n}: {len(line)} long" for n, line in prose_lines(page) if len(line) > LINE]
    for kind, text in texts(page):
        if kind in ("td_open", "th_open") and len(text) > CELL:
            found.append(f"cell of {len(text)} characters: {text[:60]}")
        if phrase := FORBIDDEN.search(text):
            found.append(f"{phrase[0]!r} in {text[max(phrase.start() - 30, 0) :][:80]!r}")
        if FORBIDDEN_FIRST.match(text):
            found.append(f"begins with a forbidden word: {text[:60]}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_in_plain_english(page: Path) -> None:
    assert breaches(page) == []


def test_breaches_of_plain_english_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    good = "There is no `keeper` here.\n\n```\n" + "anew " * 30 + "\n```\n\nIt is no longer so.\n"
    page.write_text(good)
    assert breaches(page) == []
    bad = ["It is no device.", "The books agree.", "# What it does", "x" * 101, "Is begun\nanew."]
    for text in (*bad, f"| a |\n|---|\n| {'x' * 201} |"):
        page.write_text(f"{good}\n{text}\n")
        assert len(breaches(page)) == 1, text


spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.stem)
def test_generated_page_follows_the_code(page: Path) -> None:
    assert page.read_text() == generate.PAGES[page](), "run python docs/generate.py"


def test_every_error_code_has_a_cause_and_a_remedy() -> None:
    texts_of = generate.error_texts()
    assert set(texts_of) == {*STATUSES, *generate.errors_by_code()}
    assert all(text["cause"] and text["remedy"] for text in texts_of.values())


def test_every_log_event_has_a_meaning() -> None:
    meanings, renamed = generate.event_texts()
    assert set(meanings) == set(generate.log_events())
    assert len(meanings) > 70
    assert not set(renamed) & set(meanings)


def test_index_of_the_documents_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    links = [str(token.attrs["href"]) for token in tokens(index) if token.type == "link_open"]
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index}
    decisions = {page for page in pages if page.parent.name == "adr"}
    assert pages - decisions - linked == set()
