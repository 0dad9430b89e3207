"""Source text is in plain English: docstrings, comments, messages, log events and test names."""

import re
from pathlib import Path

import pytest

from support.plain_english import source_breaches

ROOT = Path(__file__).parents[1]
TESTS = sorted(ROOT.glob("tests/**/*.py"))
SOURCES = sorted(
    path
    for root in ("src", "fleet/src", "plugins", "engines", "tests")
    for path in (ROOT / root).rglob("*.py")
    if path.name not in {"plain_english.py", "test_docs.py", "test_words.py"}
)
MOST_NAME = 60
STORIES = re.compile(r"neighbour|seat|keeper|whoever|anew|unheld")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_text_is_in_plain_english(path: Path) -> None:
    assert source_breaches(path) == []


@pytest.mark.parametrize(
    ("text", "breaches"),
    [
        ('"""Return it."""\n', 0),
        ('"""What it returns."""\n', 1),
        ('"""A tax is no fun."""\n', 1),
        ('"""It is no longer so, and there is no other."""\n', 0),
        ('"""The word `anew` is quoted."""\n', 0),
        ("x = 1  # for whoever reads it\n", 1),
        ('x = "keeper"\n', 0),
        ('x = "keeper.failed"\n', 1),
        ('x = "start it anew"\n', 1),
        ('X = 1\n"""How many there are."""\n', 1),
    ],
)
def test_breaches_of_plain_english_are_found(text: str, breaches: int, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert len(source_breaches(file)) == breaches


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_tests_fit_in_60_characters(path: Path) -> None:
    for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
        assert len(name) <= MOST_NAME, name
        assert not STORIES.search(name), name
