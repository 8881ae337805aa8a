"""Who may import whom, and what stays out of module level."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.makers.modules import MODULES, RANK, ROOT, files, layer

HEAVY = {"torch", "transformers", "stanza", "captum", "matplotlib", "pandas", "numpy", "sacrebleu", "safetensors"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file, for all that is asked of it."""
    return list(ast.walk(parsed(path)))


@cache
def imported(path: Path, *, top: bool = False) -> set[str]:
    """Names of imported modules: everywhere in the file, or at run time of its top level only."""
    nodes = parsed(path).body if top else nodes_of(path)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


LARGE = (
    "analyses",
    "cli",
    "headscope/pruning/ranking/criteria",
    "headscope/report/figures",
)  # folders of one-file variants


def uses(path: Path) -> set[str]:
    """Modules of headscope that a file imports, for types only or in a function included."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headscope":
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in whole}
    return found


NAMES = [name for name in MODULES if name not in ("headscope", "headscope.__main__")]


@cache
def graph() -> dict[str, set[str]]:
    """What every module imports; read when a test asks, not by every process that collects the tests."""
    return {name: uses(MODULES[name]) for name in NAMES}


def test_no_test_file_imports_another() -> None:
    """What several need lies in `tests/makers`, `tests/oracles` or beside them in a file that is no test."""
    for path in (ROOT / "tests").rglob("*.py"):
        names = {name.rpartition(".")[2] for name in imported(path) if name.startswith("tests.")}
        assert not any(name.startswith("test_") for name in names), path


def test_every_module_has_a_layer() -> None:
    assert {layer(name) for name in NAMES} == set(RANK)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_imports_upwards(name: str) -> None:
    """`headscope` itself stands above all: what it offers is imported when it is asked for."""
    assert "headscope" not in graph()[name]
    for other in graph()[name]:
        assert layer(other) == layer(name) or RANK[layer(other)] <= RANK[layer(name)], f"{name} imports {other}"


def cycles(uses: dict[str, set[str]]) -> set[str]:
    """Take away what uses nothing that is left, again and again: what stays is in a cycle, or uses one."""
    left = dict(uses)
    while bottom := {name for name, others in left.items() if not others & set(left) - {name}}:
        left = {name: others for name, others in left.items() if name not in bottom}
    return set(left)


def test_no_two_files_import_each_other() -> None:
    assert not cycles(graph())


def test_no_two_folders_import_each_other() -> None:
    """In every folder at every depth: what lies in it, files and folders, imports each other in one direction only."""
    between: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, others in graph().items():
        for other in others:
            here, there = name.split("."), other.split(".")
            depth = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
            if depth is not None:
                uses = between.setdefault(tuple(here[:depth]), {})
                uses.setdefault(here[depth], set()).add(there[depth])
                uses.setdefault(there[depth], set())
    assert {".".join(folder): found for folder, uses in between.items() if (found := cycles(uses))} == {}


def test_folders_are_small_enough_to_look_through() -> None:
    folders = {path.parent for path in files()}
    sizes = {str(folder.relative_to(ROOT)): sum(path.is_file() for path in folder.iterdir()) for folder in folders}
    assert sizes.pop("headscope") <= 12 + 1  # py.typed
    assert {name: size for name, size in sizes.items() if size > 15 and name not in LARGE} == {}


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_only_the_command_line_knows_typer_and_only_figures_matplotlib(path: Path) -> None:
    names = imported(path)
    if not path.is_relative_to(ROOT / "cli"):
        assert "typer" not in names
    annotated = ("headscope/api/study.py",)  # under TYPE_CHECKING
    if not path.is_relative_to(ROOT / "headscope" / "report") and name_of(path) not in annotated:
        assert not any(name.startswith("matplotlib") for name in names)


@pytest.mark.parametrize("path", sorted((ROOT / "cli").glob("*.py")), ids=name_of)
def test_commands_import_heavy_libraries_in_their_bodies(path: Path) -> None:
    for name in imported(path, top=True):
        assert name.partition(".")[0] not in HEAVY
        light = {
            "headscope.bounds",
            "headscope.config",
            "headscope.pruning.options",
            "headscope.engine.declarations",  # options and figures of analyses are options and commands
            "headscope.errors",
            "headscope.heads",
            "headscope.files",
            "headscope.files.output_checks",
            "headscope.model.process_settings",
            "headscope.progress",
            "headscope.registry",
            "headscope.report.registry",
        }
        folder = name.rpartition(".")[0]
        assert not name.startswith("headscope") or name.startswith("headscope.cli") or light & {name, folder}


def test_options_of_commands_are_made_of_declarations() -> None:
    """`made_of` (cli/options.py) makes them of fields; `--version` alone is written by hand."""
    written = {path.name for path in (ROOT / "cli").glob("*.py") if "typer.Option(" in path.read_text("utf-8")}
    written |= {path.name for path in (ROOT / "cli").glob("*.py") if "typer.Argument(" in path.read_text("utf-8")}
    assert written == {"main.py", "options.py"}


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.is_relative_to(ROOT / "cli"):
        return
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 400
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert size <= 60, f"{node.name} has {size} lines"


def test_a_public_class_has_a_name_of_its_own() -> None:
    """So that a name in a message, in a search or in a signature means one thing."""
    places: dict[str, list[str]] = {}
    for path in files():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
