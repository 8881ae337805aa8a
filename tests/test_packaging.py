"""The wheel, and a package of somebody else that adds one of every kind (in process: `tests/contracts`)."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest

from headscope import registry
from headscope.assets import captions, trained_model
from headscope.errors import ConfigError
from headscope.files.reading import read_toml
from headscope.registry import Registry
from tests.makers.shared import first_lines

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_listed() -> None:
    import tomllib

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {"headscope"}
    for top, name in (("headscope", "headscope"), ("cli", "headscope.cli"), ("analyses", "headscope.analyses")):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            if not (top == "headscope" and parts[:1] in (("cli",), ("analyses",))):
                packages.add(".".join((name, *parts)))
    assert set(setuptools["packages"]) == packages
    assert setuptools["package-dir"] == {"headscope.cli": "cli", "headscope.analyses": "analyses"}


@pytest.mark.parametrize("name", ["cli", "analyses"])
def test_the_links_lead_to_the_root_folders(name: str) -> None:
    link = ROOT / "headscope" / name
    assert link.is_symlink() and link.resolve() == ROOT / name


def test_analyses_refuse_to_be_imported_under_a_second_name() -> None:
    process = subprocess.run([sys.executable, "-c", "import analyses"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1 and "imported as 'analyses'" in process.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_runs_from_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files behind
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "benchmarks")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
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
    process = subprocess.run([sys.executable, "-c", code, "--help"], cwd="/", capture_output=True, text=True)
    assert process.returncode == 0 and "analyze" in process.stdout
    where = code.replace("from headscope.cli.main import run; run()", "import headscope; print(headscope.__file__)")
    process = subprocess.run([sys.executable, "-c", where], cwd="/", capture_output=True, text=True)
    assert str(target) in process.stdout


PLUGIN = Path(__file__).parent / "plugin"
SCRIPT = """
import json, sys
from headscope.cli.main import run

for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        run()
    except SystemExit as end:
        assert not end.code, command
from headscope.description.pair_function import PAIR_FUNCTIONS
from headscope.evaluation.metrics.base import METRICS
from headscope.formats.base import FORMATS
from headscope.model.mixing.base import MIXINGS
from headscope.pruning.options.choice import LEARNERS
from headscope.pruning.ranking.criterion import CRITERIA

for registry, name in (
    (FORMATS, "one_file"), (MIXINGS, "neighbour.v1"), (PAIR_FUNCTIONS, "vowels"), (CRITERIA, "last_layer"),
    (LEARNERS, "sigmoid"), (METRICS, "length-ratio"),
):
    assert name in registry.names(), name
"""
"""Runs commands; what `tests/contracts` and `tests/evaluation` try in their own process is only looked up."""


@pytest.mark.slow
def test_an_installed_package_adds_one_of_each_kind(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(PLUGIN / "headscope_plugin", site / "headscope_plugin")
    metadata = site / "headscope_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: headscope-plugin\nVersion: 1.0\n")
    groups = read_toml(PLUGIN / "pyproject.toml")["project"]["entry-points"]
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in eps.items()) for group, eps in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    model = trained_model()
    english, german = (str(first_lines(captions(language), tmp_path, 24)) for language in ("en", "de"))
    text = ["--source", english, "--max-sentences", "6"]
    pairs = [*text, "--target", german]
    valid = ["--valid-source", english, "--valid-target", german, "--vocab-size", "100", "--device", "cpu"]
    small = ["--d-model", "8", "--d-ffn", "8", "--heads", "2", "--encoder-layers", "1", "--decoder-layers", "1"]
    scoring = ["--only", "taylor,lrp", "--objective", "margin", "--set", "lrp.rules=fixed_weights"]
    commands = [
        ["list", "engines"],
        ["convert", model, "numbers", "--to", "numbers", "--quantize", "float16"],
        ["analyze", model, *text, "--only", "last_key", "--set", "last_key.last-keys=2", "--out", "run"],
        ["analyze", model, *pairs, *scoring, "--out", "why"],
        ["plot", "last_key", "run", "--color", "red", "--out", "red.png"],
        ["plot", "spread", "run", "run", "--column", "last_key", "--out", "spread.svg"],
        ["train", "patient", *pairs, *small, *valid, "--updates", "4", "--patient-for", "2", "--out", "trained"],
    ]
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    process = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr
    assert "numbers all parameters in a row, for NumPy" in " ".join(process.stdout.split())
    assert {path.name for path in (tmp_path / "numbers").iterdir()} == {"README.md", "conversion.json", "model.numbers"}
    header, row = (tmp_path / "run" / "heads.csv").read_text(encoding="utf-8").splitlines()[:2]
    assert "last_key" in header.split(",") and 0 < float(row.split(",")[header.split(",").index("last_key")]) < 1
    assert (tmp_path / "run" / "figures" / "last_key.png").exists() and (tmp_path / "red.png").exists()
    why = pd.read_csv(tmp_path / "why" / "heads.csv")
    assert why.filter(like="taylor").notna().all(axis=None) and why.filter(like="fixed_weights").notna().all(axis=None)
    assert "last_key" in (tmp_path / "spread.svg").read_text(encoding="utf-8")
    course = (tmp_path / "trained" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert float(course[-1].split(",")[course[0].split(",").index("patient")]) == 2


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint(name="shiny", value="no_such_module_anywhere", group="headscope.shades")
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken] if group == "headscope.shades" else [])
    shades: Registry[int] = Registry("shade", package="headscope.assets", group="headscope.shades")
    with pytest.raises(ConfigError, match=r"'shiny'.*no_such_module_anywhere"):
        shades.names()
    with pytest.raises(ConfigError, match="'shiny'"):
        shades.get("dark")
