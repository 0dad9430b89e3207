"""The rules for text, names and sizes that ruff does not know: `make lint` runs this program.

It prints a line for each breach, and exits with 1 if there is one. The rules for text are those of
docs/contributing/writing.md, for code those of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import itertools
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from code_size import class_names, modules_of

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PACKAGE_MODULES = 16
MAX_TEST_NAME = 60
MAX_LINE = 100
MAX_CELL = 2 * MAX_LINE
"""Characters of a table's cell."""
DRAWERS = {"utils", "helpers", "common", "base", "types", "manager"}
"""Names of modules for odds and ends."""
FORBIDDEN = re.compile(
    r"\b(seats?|the books|kept back|neighbours?|unheld|keepers?|checkup|whoever|anew|of which)\b"
    r"|(?<!there )\bis no (?!longer\b)",
    re.IGNORECASE,
)
FORBIDDEN_FIRST = re.compile(r"(What|How|Tell|Have|Let|Who)\b(?!-)")
FORBIDDEN_IN_TESTS = re.compile(r"neighbour|seat|keeper|whoever|anew|unheld")
_RAISED = re.compile(r"^    (\w[\w.]*(?:, \w[\w.]*)*):", re.MULTILINE)
"""Exceptions in the `Raises:` section of a docstring."""
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_LOG_EVENT = re.compile(r"[a-z]+(_[a-z]+)*\.[a-z]+(_[a-z]+)*")
_NAMES = (ast.Name, ast.Attribute)
_OWN_FILES = {"lint.py", "test_lint.py"}
"""They contain the forbidden words."""


def breaches(root: Path) -> Iterator[str]:
    """Yield a line for each breach in a checkout."""
    patterns = ("src", "plugins/*/src", "fleet/src", "engines/*/src")
    sources = [p for folder in patterns for p in sorted(root.glob(f"{folder}/**/*.py"))]
    tests = sorted(root.glob("tests/**/*.py"))
    classes = class_names(modules_of(root)).keys()
    for path in [*sources, *tests]:
        name = path.relative_to(root)
        text = path.read_text()
        tree = _parse(text)
        checks = [_sizes(text, tree)]
        if path.name not in _OWN_FILES:
            checks.append(source_breaches(text, tree))
        if path in sources:
            checks += [structure_breaches(path, tree), unknown_exceptions(tree, classes)]
        else:
            checks.append(_test_names(tree))
        for line in itertools.chain(*checks):
            yield f"{name}:{line}"
    for path in pages(root):
        for line in page_breaches(path.read_text()):
            yield f"{path.relative_to(root)}:{line}"
    yield from _tree_breaches(sources, root)


def pages(root: Path) -> list[Path]:
    """Return the documents, without records of what programs printed on real hardware."""
    records = set((root / "docs/contributing/hardware").glob("2*.md"))
    below = {*(root / "docs").glob("**/*.md")} - records - {*(root / "docs").glob("*.md")}
    return [*sorted(root.glob("*.md")), *sorted(below), root / "docs/README.md"]


def _parse(text: str) -> ast.Module:
    """Parse with the collector off, which can break parsing before Python 3.11.8.

    https://github.com/python/cpython/issues/106905
    """
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def _sizes(text: str, tree: ast.Module) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"1: {lines} lines, expected at most {MAX_FILE_LINES}"
    for node in _functions(tree):
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has more than {MAX_FUNCTION_LINES} lines"


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _test_names(tree: ast.Module) -> Iterator[str]:
    for node in _functions(tree):
        if node.name.startswith("test_"):
            if len(node.name) > MAX_TEST_NAME:
                yield f"{node.lineno}: {node.name} is longer than {MAX_TEST_NAME} characters"
            if FORBIDDEN_IN_TESTS.search(node.name):
                yield f"{node.lineno}: {node.name} has a forbidden word"


def structure_breaches(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield breaches of the rules for a module of the product."""
    if not ast.get_docstring(tree):
        yield "1: no module docstring"
    if path.stem in DRAWERS:
        yield "1: a module for odds and ends"
    for node in ast.walk(tree):
        if "plugins" in path.parts:
            yield from _imports_of_agentd(node)
        if not {"services", "rpc"}.isdisjoint(path.parts):
            yield from _shared_attributes(node)


def _imports_of_agentd(node: ast.AST) -> Iterator[str]:
    """Yield what a plugin imports of agentd beside the plugin API."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    for name in names:
        if name.partition(".")[0] == "agentd" and name != "agentd.plugin_api":
            yield f"{node.lineno}: a plugin imports {name}"  # type: ignore[attr-defined]


def _shared_attributes(node: ast.AST) -> Iterator[str]:
    """Yield attributes of a service that another class writes, or could use (ruff's SLF001)."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Attribute):
            is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
            if not is_own or not target.attr.startswith("_"):
                yield f"{target.lineno}: {ast.unparse(target)} is not a private attribute of self"


def unknown_exceptions(tree: ast.Module, classes: Collection[str]) -> Iterator[str]:
    """Yield the exceptions in docstrings that neither the module uses nor agentd defines."""
    nodes = list(ast.walk(tree))
    used = {n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, _NAMES)}
    for node in _functions(tree):
        raises = (ast.get_docstring(node) or "").partition("Raises:\n")[2].partition("\n\n")[0]
        for name in ", ".join(_RAISED.findall(raises)).split(", "):
            last = name.rpartition(".")[2]
            if last and last not in used and last not in classes and not hasattr(builtins, last):
                yield f"{node.lineno}: unknown exception {name} in the docstring of {node.name}"


def _tree_breaches(sources: Iterable[Path], root: Path) -> Iterator[str]:
    for name, count in class_names(modules_of(root)).items():
        if count > 1:
            yield f"class {name} is defined {count} times"
    modules = Counter(path.parent for path in sources if path.stem != "__init__")
    for folder, count in modules.items():
        if count > MAX_PACKAGE_MODULES:
            yield f"{folder.relative_to(root)} has more than {MAX_PACKAGE_MODULES} modules"
    support = root / "tests/support"
    listed = set(re.findall(r"^\| `(\w+)` \|", (support / "README.md").read_text(), re.MULTILINE))
    if listed != {path.stem for path in support.glob("*.py")}:
        yield "tests/support/README.md: not one line for each module"


def source_breaches(text: str, tree: ast.Module) -> list[str]:
    """Return the phrases of a module that break the rules for text, outside of backticks."""
    nodes = list(ast.walk(tree))
    docstrings = _docstrings(nodes)
    phrases = [
        f"{line}: {phrase!r}"
        for line, prose in [*docstrings, *_comments(text), *_strings(nodes)]
        if (phrase := _forbidden(prose))
    ]
    return phrases + [
        f"{line}: begins with {prose.split()[0]!r}"
        for line, prose in docstrings
        if FORBIDDEN_FIRST.match(prose)
    ]


def _forbidden(prose: str) -> str | None:
    phrase = FORBIDDEN.search(" ".join(_CODE.sub("", prose).replace("_", " ").split()))
    return phrase and phrase[0]


def _docstrings(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return docstrings, those of attributes included."""
    return [
        (node.lineno, node.value.value)
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments; none of a module without a breach behind any `#`, which saves seconds."""
    if not any(_forbidden(line.partition("#")[2]) for line in text.splitlines() if "#" in line):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield string literals that are prose or the name of a log event, without docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)) if id(node) not in docstrings:
                if " " in value or _LOG_EVENT.fullmatch(value):
                    yield node.lineno, value


def page_breaches(text: str) -> Iterator[str]:
    """Yield the lines, cells and phrases of a page that break the rules for text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    kinds = ("fence", "code_block", "table_open", "html_block")
    skipped = {n for t in tokens if t.type in kinds and t.map for n in range(*t.map)}
    for number, line in enumerate(text.splitlines()):
        is_address = re.fullmatch(r"\[\w+\]: \S+", line)
        if len(line) > MAX_LINE and number not in skipped and not is_address:
            yield f"{number + 1}: {len(line)} characters, expected at most {MAX_LINE}"
    for before, token in itertools.pairwise(tokens):
        if token.type != "inline":
            continue
        line = (token.map or [0])[0] + 1
        parts = ("`" if t.type == "code_inline" else t.content for t in token.children or ())
        prose = " ".join("".join(part or " " for part in parts).split())
        if before.type in ("td_open", "th_open") and len(prose) > MAX_CELL:
            yield f"{line}: cell of {len(prose)} characters, expected at most {MAX_CELL}"
        if phrase := FORBIDDEN.search(prose):
            yield f"{line}: {phrase[0]!r} in {prose[max(phrase.start() - 30, 0) :][:80]!r}"
        if FORBIDDEN_FIRST.match(prose):
            yield f"{line}: begins with {prose.split()[0]!r}"


if __name__ == "__main__":
    found = list(breaches(ROOT))
    print("\n".join(found) or "tests/lint.py: no breach")
    sys.exit(bool(found))
