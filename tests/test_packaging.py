"""The map of packages, the two links, and what an installed headscope looks like."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_listed() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {"headscope"}
    for top, name in (("headscope", "headscope"), ("cli", "headscope.cli"), ("analyses", "headscope.analyses")):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            if not (top == "headscope" and parts[:1] in (("cli",), ("analyses",))):
                found.add(".".join((name, *parts)))
    assert set(listed["packages"]) == found
    assert listed["package-dir"] == {"headscope.cli": "cli", "headscope.analyses": "analyses"}


@pytest.mark.parametrize("name", ["cli", "analyses"])
def test_the_links_lead_to_the_root_folders(name: str) -> None:
    link = ROOT / "headscope" / name
    assert link.is_symlink() and link.resolve() == ROOT / name


def test_analyses_refuse_to_be_imported_under_a_second_name() -> None:
    ran = subprocess.run([sys.executable, "-c", "import analyses"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and "imported as 'analyses'" in ran.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_runs_from_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files behind
    left = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "benchmarks")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    install = [*pip, "install", "--quiet", "--no-compile", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert sorted(entry.name for entry in target.iterdir() if entry.suffix == "") == ["bin", "headscope"]
    assert (target / "headscope" / "assets" / "sample.conllu").is_file()
    code = f"import sys; sys.path.insert(0, {str(target)!r}); from headscope.cli.main import run; run()"
    ran = subprocess.run([sys.executable, "-c", code, "--help"], cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0 and "analyze" in ran.stdout
    where = code.replace("from headscope.cli.main import run; run()", "import headscope; print(headscope.__file__)")
    ran = subprocess.run([sys.executable, "-c", where], cwd="/", capture_output=True, text=True)
    assert str(target) in ran.stdout
