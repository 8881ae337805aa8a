"""Who may import whom, and what stays out of module level."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.makers.modules import MODULES, RANK, ROOT, files, layer

HEAVY = {"torch", "transformers", "stanza", "captum", "matplotlib"}
HEAVY |= {"pandas", "numpy", "scipy", "sacrebleu", "safetensors"}


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file, for all that is asked of it."""
    return list(ast.walk(syntax_tree(path)))


@cache
def imports(path: Path, *, top: bool = False) -> set[str]:
    """Names of imported modules: everywhere in the file, or at run time of its top level only."""
    nodes = syntax_tree(path).body if top else nodes_of(path)
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


def uses(path: Path, *, top: bool = False) -> set[str]:
    """Modules of headscope that a file imports: for types only or in a function included, or at its top level only."""
    modules = set()
    for node in syntax_tree(path).body if top else nodes_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headscope":
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else str(node.module) for name in full_names}
    return modules


NAMES = [name for name in MODULES if name not in ("headscope", "headscope.__main__")]


@cache
def graph() -> dict[str, set[str]]:
    """What every module imports; read when a test asks, not by every process that collects the tests."""
    return {name: uses(MODULES[name]) for name in NAMES}


@pytest.mark.slow
def test_no_test_file_imports_another() -> None:
    """What several need lies in `tests/makers`, `tests/oracles` or beside them in a file that is no test."""
    for path in (ROOT / "tests").rglob("*.py"):
        names = {name.rpartition(".")[2] for name in imports(path) if name.startswith("tests.")}
        assert not any(name.startswith("test_") for name in names), path


def test_every_module_has_a_layer() -> None:
    assert {layer(name) for name in NAMES} == set(RANK)


@pytest.mark.slow
def test_nothing_imports_upwards() -> None:
    """`headscope` itself stands above all: what it offers is imported when it is asked for."""
    assert not [name for name, targets in graph().items() if "headscope" in targets]
    pairs = [(name, other) for name, targets in graph().items() for other in targets if layer(other) != layer(name)]
    assert not [(name, other) for name, other in pairs if RANK[layer(other)] > RANK[layer(name)]]


def cycles(uses: dict[str, set[str]]) -> set[str]:
    """Take away what uses nothing that is left, again and again: what stays is in a cycle, or uses one."""
    remaining = dict(uses)
    while bottom := {name for name, targets in remaining.items() if not targets & set(remaining) - {name}}:
        remaining = {name: targets for name, targets in remaining.items() if name not in bottom}
    return set(remaining)


@pytest.mark.parametrize("start", ["headscope.api.commands", "headscope.formats"])
def test_transformers_is_imported_with_the_first_model_that_needs_it(start: str) -> None:
    """Importing it takes as long as torch and all else together, and a native checkpoint needs none of it."""
    inside = [name for name in NAMES if name.startswith(f"{start}.") and name.count(".") == start.count(".") + 1]
    modules, waiting = set[str](), [start, *inside, f"{start}.huggingface.format"]
    while waiting:
        name = waiting.pop()
        if name in MODULES and name not in modules:
            modules.add(name)
            waiting += uses(MODULES[name], top=True)
    assert len(modules) > 20
    names = {name: {module.partition(".")[0] for module in imports(MODULES[name], top=True)} for name in modules}
    assert not [name for name, targets in names.items() if "transformers" in targets]


def test_no_two_files_import_each_other() -> None:
    assert not cycles(graph())


def test_no_two_folders_import_each_other() -> None:
    """In every folder at every depth: what lies in it, files and folders, imports each other in one direction only."""
    graphs: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, targets in graph().items():
        for other in targets:
            source, target = name.split("."), other.split(".")
            depth = next((at for at, pair in enumerate(zip(source, target, strict=False)) if pair[0] != pair[1]), None)
            if depth is not None:
                uses = graphs.setdefault(tuple(source[:depth]), {})
                uses.setdefault(source[depth], set()).add(target[depth])
                uses.setdefault(target[depth], set())
    assert {".".join(folder): cycle for folder, uses in graphs.items() if (cycle := cycles(uses))} == {}


def test_folders_are_small_enough_to_look_through() -> None:
    folders = {path.parent for path in files()}
    sizes = {str(folder.relative_to(ROOT)): sum(path.is_file() for path in folder.iterdir()) for folder in folders}
    assert sizes.pop("headscope") <= 12 + 1  # py.typed
    assert {name: size for name, size in sizes.items() if size > 15 and name not in LARGE} == {}


def test_only_the_command_line_knows_typer_and_only_figures_matplotlib() -> None:
    outside = [path for path in files() if not path.is_relative_to(ROOT / "cli")]
    assert not [name_of(path) for path in outside if "typer" in imports(path)]
    drawing = [path for path in files() if any(name.startswith("matplotlib") for name in imports(path))]
    commands = ROOT / "headscope" / "api" / "commands.py"  # under TYPE_CHECKING
    report = ROOT / "headscope" / "report"
    assert not [name_of(path) for path in drawing if path != commands and not path.is_relative_to(report)]


@pytest.mark.parametrize("path", sorted((ROOT / "cli").glob("*.py")), ids=name_of)
def test_commands_import_heavy_libraries_in_their_bodies(path: Path) -> None:
    for name in imports(path, top=True):
        assert name.partition(".")[0] not in HEAVY
        light = {
            "headscope.assets",
            "headscope.config",
            "headscope.pruning.options",
            "headscope.config.declarations",  # options and figures of analyses are options and commands
            "headscope.errors",
            "headscope.heads",
            "headscope.files",
            "headscope.files.output_checks",
            "headscope.progress",
            "headscope.registry",
            "headscope.report.registry",
            "headscope.report.styles",
        }
        folder = name.rpartition(".")[0]
        assert not name.startswith("headscope") or name.startswith("headscope.cli") or light & {name, folder}


def test_only_the_command_line_prints() -> None:
    calls = [
        (name_of(path), node.func.id)
        for path in files()
        if not path.is_relative_to(ROOT / "cli")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert len(calls) > 1000
    assert not [name for name, function in calls if function == "print"]


def test_files_and_functions_are_short() -> None:
    assert not [name_of(path) for path in files() if path.read_text(encoding="utf-8").count("\n") > 400]
    sizes = {}
    for path in files():
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                sizes[name_of(path), node.name] = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
    assert {where: size for where, size in sizes.items() if size > 60} == {}
