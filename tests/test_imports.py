"""Who may import whom, and what stays out of module level."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"headscope": ROOT / "headscope", "headscope.cli": ROOT / "cli", "headscope.analyses": ROOT / "analyses"}
HEAVY = {"torch", "transformers", "stanza", "captum", "matplotlib", "pandas", "numpy", "sacrebleu", "safetensors"}


def files() -> list[Path]:
    found = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    links = (ROOT / "headscope" / "cli", ROOT / "headscope" / "analyses")
    return sorted(path for path in found if not any(path.is_relative_to(link) for link in links))


def imported(path: Path, *, top: bool = False) -> set[str]:
    """Names of imported modules: everywhere in the file, or at run time of its top level only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top else list(ast.walk(tree))
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


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_nobody_imports_the_command_line_and_the_library_knows_no_analysis(path: Path) -> None:
    names = imported(path)
    if path.is_relative_to(ROOT / "cli") or path.name == "__main__.py":
        return
    assert not any(name.startswith("headscope.cli") or name == "typer" for name in names)
    if path.is_relative_to(ROOT / "headscope"):
        assert not any(name.startswith("headscope.analyses") for name in names)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_layers_look_down_only(path: Path) -> None:
    names = imported(path)
    allowed = {
        "heads.py": {"headscope.errors", "headscope.reading"},
        "registry.py": {"headscope.errors"},
        "errors.py": set(),
        "accumulate.py": set(),
        "results.py": {"headscope.output.files"},
    }
    own = {name for name in names if name.startswith("headscope")}
    if path.parent == ROOT / "headscope" and path.name in allowed:
        assert own <= allowed[path.name]
    if path.is_relative_to(ROOT / "headscope" / "model"):
        assert not any(name.startswith(("headscope.formats", "headscope.report", "headscope.analy")) for name in own)
    annotated = ("cli/plot.py", "headscope/api/commands.py", "headscope/api/study.py")  # under TYPE_CHECKING
    typed_only = path in {ROOT / name for name in annotated}
    if not path.is_relative_to(ROOT / "headscope" / "report") and not typed_only:
        assert not any(name.startswith("matplotlib") for name in names)


@pytest.mark.parametrize("path", sorted((ROOT / "cli").glob("*.py")), ids=name_of)
def test_commands_import_heavy_libraries_in_their_bodies(path: Path) -> None:
    for name in imported(path, top=True):
        assert name.partition(".")[0] not in HEAVY
        light = {"headscope.bounds", "headscope.errors", "headscope.heads", "headscope.output", "headscope.output.rule"}
        assert not name.startswith("headscope") or name.startswith("headscope.cli") or name in light


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.is_relative_to(ROOT / "cli"):
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert size <= 60, f"{node.name} has {size} lines"
