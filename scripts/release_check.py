"""Build the wheel and the source, and try them as a stranger would: `make release-check`.

They are built from what is committed, so a file that was forgotten is missing here too. Every file of the packages
must be in both, the metadata must be true, and in an environment of its own, of every Python that is at hand, the wheel
must run the demonstration from a folder that is not the checkout.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

from headscope.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCH = "torch>=2.9,<2.14"
FOLDERS = {"headscope": "headscope", "cli": "headscope/cli", "analyses": "headscope/analyses"}


def extract_head(folder: Path) -> Path:
    """A copy of HEAD."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, **({"filter": "fully_trusted"} if sys.version_info >= (3, 12) else {}))  # type: ignore[arg-type]
    return folder


def expected(source: Path) -> set[str]:
    """The files of a wheel, by their names there: every file of the packages that is not hidden."""
    return {
        f"{name}/{path.relative_to(source / folder).as_posix()}"
        for folder, name in FOLDERS.items()
        for path in (source / folder).rglob("*")
        if path.is_file() and not path.parent.is_symlink() and not path.name.startswith(".")
    }


def check_files(source: Path, wheel: Path, sdist: Path) -> None:
    """Compare both archives with the source, and the wheel's metadata with the expected fields."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata)
    wheel_files = {name for name in names if ".dist-info/" not in name}
    if odd := expected(source) ^ wheel_files:
        raise SystemExit(f"the wheel and the source differ in {len(odd)} files, such as {sorted(odd)[:5]}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise SystemExit("the wheel has no licence")
    with tarfile.open(sdist) as files:
        sdist_files = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    missing = {"README.md", "LICENSE", "pyproject.toml"} - sdist_files
    if missing:
        raise SystemExit(f"the source archive lacks {sorted(missing)}")
    about = message_from_bytes(text)
    fields = {"Name": "headscope", "Version": VERSION, "License-Expression": "MIT", "Requires-Python": ">=3.10"}
    if wrong := {key: about[key] for key, value in fields.items() if about[key] != value}:
        raise SystemExit(f"metadata: {wrong}, expected {fields}")


def pythons() -> Iterator[Path]:
    """The interpreters at hand: this one, and those on PATH (and of pyenv) that start."""
    yield Path(sys.executable)
    roots = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    for version in PYTHONS:
        if version == "{}.{}".format(*sys.version_info):
            continue
        on_path = shutil.which(f"python{version}")
        candidates = [*([Path(on_path)] if on_path else []), *(root / f"python{version}" for root in roots)]
        yield from [path for path in candidates if path.exists() and not _run(path, "--version").returncode][:1]


def _run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)


def try_out(python: Path, wheel: Path, folder: Path) -> str:
    """Install the wheel in an environment of its own, and run it from elsewhere; the result as text."""
    folder.mkdir()
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    inside = folder / "venv" / "bin"
    process = _run(inside / "python", "-m", "pip", "install", "--quiet", "--no-compile", TORCH, f"{wheel}[demo]")
    if process.returncode:
        return f"not installed: {process.stderr.strip().splitlines()[-1]}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for command in (["--version"], ["--help"], ["demo", "--out", "demo"]):
        result = subprocess.run(
            [inside / "headscope", *command], cwd=folder, env=environment, capture_output=True, text=True
        )
        if result.returncode:
            raise SystemExit(f"headscope {' '.join(command)} of the wheel under {python}:\n{result.stderr}")
    if not list((folder / "demo").rglob("*.html")):
        raise SystemExit(f"the demonstration under {python} wrote no page")
    return "the demonstration ran from the wheel"


def main() -> None:
    """Build into `dist/`, compare, try on each Python; status 1 with a line where something is wrong."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = extract_head(Path(folder) / "source")
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        check_files(source, wheel, sdist)
        print(f"{wheel.name}: every file, licence and metadata right")
        for number, python in enumerate(pythons()):
            version = _run(python, "--version").stdout.strip()
            print(f"{version}: {try_out(python, wheel, Path(folder) / f'try{number}')}", flush=True)


if __name__ == "__main__":
    main()
