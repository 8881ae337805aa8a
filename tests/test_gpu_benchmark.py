"""`benchmarks/gpu.py` on this machine: a small model, the same program."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.makers.modules import ROOT


@pytest.mark.slow
def test_the_benchmark_of_accelerators_runs_on_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_tasks

    monkeypatch.setattr(gpu_tasks, "ROUNDS", 1)
    gpu.main(["--device", "cpu", "--tiny", "--lengths", "97", "--out", str(tmp_path / "table.csv")])
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["tokens"], row["device"]) for row in rows] == [(mode, "97", "cpu") for mode in gpu.MODES]
    assert all(float(row["peak_mib"]) > 0 < float(row["seconds"]) for row in rows)
    assert "streamed at 97: memory" in capsys.readouterr().out
    with (tmp_path / "table-tasks.csv").open(encoding="utf-8") as file:
        tasks = list(csv.DictReader(file))
    assert all(float(row["seconds"]) > 0 and (row["task"] == "analyze") == bool(row["ratio"]) for row in tasks)
    ends = ["rank by gradient", "remove half", "remove half and refit", "training step"]
    assert [row["task"] for row in tasks] == ["forward", "analyze"] * 2 + ends

    def too_much() -> None:
        raise torch.OutOfMemoryError

    assert gpu.measure(too_much, torch.device("cpu"), repeats=1) == (None, None)
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="CUDA"):
            gpu.main([])


@pytest.mark.parametrize("name", ["LARGE", "TINY"])
def test_its_models_have_the_sizes_that_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.LlamaConfig(**getattr(gpu, name)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert round(parameters / 1e9, 2) == {"LARGE": 7.5, "TINY": 0.0}[name]
