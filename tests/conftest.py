"""Fixtures that more than one test file uses."""

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import headscope as hs
from headscope.errors import command_flag, flag, python_keyword
from tests.makers.shared import SHIPPED_FOLDER, shared_folder
from tests.oracles import simulation

if simulation.DEVICE is None:  # the CPU is tested, also where there is a GPU: no simulated device can lie beside it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    simulation.register()
torch.set_num_threads(1)  # the models are tiny: a second thread only waits
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too

gc.set_threshold(20_000, 20, 20)  # of Python's 700: a quarter of the time that figures took was looking for garbage

HANGS = 900
"""Seconds after which a process is taken to hang: many times what any takes, also on a machine that is busy."""


WHOLE_FOLDERS = [Path(__file__).parent / folder for folder in ("contracts", "faults", "properties")]
"""Folders whose tests go through every analysis, format, variant, option or fault that there is."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of `WHOLE_FOLDERS`: `-m "not whole"` leaves it out."""
    if any(item.path.is_relative_to(folder) for folder in WHOLE_FOLDERS):
        item.add_marker("whole")


LONG = (
    *("docs/test_commands", "export/test_onnx", "faults/test_interrupted", "test_distributed", "training/test_trainer"),
    *("faults/test_faults", "contracts/test_analyses", "test_packaging", "contracts/test_removal", "test_api_docs"),
    *("pruning/test_shrink", "pruning/test_compensated_removal", "contracts/test_every_architecture"),
    *("contracts/test_devices", "report/test_layout", "properties/test_inputs", "pruning/test_sweep"),
    *("contracts/test_variants", "contracts/test_unusual_models", "report/test_page_browser", "cli/test_cli"),
    *("contracts/test_device_costs", "pruning/test_sweep_files", "cli/test_next_commands", "contracts/test_streaming"),
    *("test_api", "training/test_variant_resume"),
)
"""Files that take ten seconds of a processor and more, the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, then those with the most slow tests: no process waits for another's last file."""
    tests = Path(__file__).parent
    long = {tests / f"{name}.py": rank for rank, name in enumerate(LONG)}
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (long.get(item.path, len(LONG)), -slow[item.path]))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _words_of_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Messages name options as commands do, but in the tests of Python's own words."""
    with flag.spelling(python_keyword if request.path.name.startswith("test_api") else command_flag):
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_searches() -> Iterator[None]:
    """Removals compare shorter translations than commands do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscope.pruning.removal.verify.NEW_TOKENS", 5)
        patch.setattr("headscope.pruning.removal.verify.BEAM", 2)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data beside the repository, or where HEADSCOPE_SHARED says."""
    return shared_folder(os.environ)


@pytest.fixture(scope="session", params=["shipped", "shared"])
def oracles(request: pytest.FixtureRequest) -> Path:
    """Numbers of the original programs: the excerpt that ships, then the complete set, in files of the same names."""
    return SHIPPED_FOLDER if request.param == "shipped" else request.getfixturevalue("shared") / "oracles"


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """Runs Python with arguments, in so many `processes` of one torchrun, and returns what it prints."""

    def run_python(*arguments: object, processes: int = 1) -> str:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", "0", "--standalone"]
        command = [sys.executable, *map(str, [*(torchrun if processes > 1 else []), *arguments])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run_python


@pytest.fixture(scope="session")
def pair() -> hs.Model:
    """The small translation model that ships, open."""
    return hs.load(hs.assets.trained_model(), device="cpu")


@pytest.fixture
def caption_files(tmp_path: Path) -> tuple[Path, Path]:
    """`oracles.memory.SOURCES` and `TARGETS` as files."""
    from tests.oracles.memory import SOURCES, TARGETS

    paths = tmp_path / "text.en", tmp_path / "text.de"
    for path, lines in zip(paths, (SOURCES, TARGETS), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit status, stdout, stderr."""
    from headscope.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headscope", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main.run()
        out, err = capfd.readouterr()
        return int(exit_info.value.code or 0), out, err

    return run
