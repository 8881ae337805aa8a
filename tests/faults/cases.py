"""Every command that writes, small enough to be run again and again, and what must hold of its output after a fault."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headscope.formats.native import NATIVE
from tests.makers.runs import make_run
from tests.oracles import checkpoints, fairseq


@dataclass(frozen=True)
class Case:
    """A command: its arguments before the output, how the output is named, and whether `--resume` goes on with it."""

    name: str
    arguments: Callable[[Path], Sequence[object]]
    out: Sequence[str] = ("--out", "{out}")
    suffix: str = ""
    resumes: bool = False

    @property
    def keeps_progress(self) -> bool:
        """Whether a run after a fault goes on from an interrupted one."""
        return self.resumes or self.name == "sweep"

    def output_path(self, folder: Path) -> Path:
        """The output of the command in a directory."""
        return folder / f"result{self.suffix}"

    def command(self, inputs: Path, out: Path, *more: str) -> list[str]:
        """The whole command line."""
        output = [part.replace("{out}", str(out)) for part in self.out]
        return [*map(str, self.arguments(inputs)), *output, *more]


def _texts(inputs: Path) -> list[object]:
    return ["--source", inputs / "source", "--target", inputs / "target"]


def _gates(method: str, *more: object) -> Callable[[Path], Sequence[object]]:
    options = ("--updates", 3, "--save-every", 1, "--batch-tokens", 100, "--valid-sentences", 4, "--device", "cpu")
    return lambda inputs: ["prune", method, inputs / "model", *_texts(inputs), *options, *more]


FAST = ("--rounds", 0, "--max-sentences", 4)
SIZES = ("--vocab-size", 30, "--d-model", 8, "--d-ffn", 8, "--heads", 2, "--encoder-layers", 1, "--decoder-layers", 1)
STEPS = ("--max-tokens", 60, "--updates", 4, "--save-every", 1, "--validate-every", 2, "--beam", 1, "--average", 2)
CASES = {
    case.name: case
    for case in (
        Case(
            "analyze",
            lambda inputs: [
                *("analyze", inputs / "model", *_texts(inputs), "--only", "confidence", "--set", "detail=true"),
                *("--mhr-pickles", "--bootstrap", 10, "--batch-tokens", 40, "--no-figures"),
            ],
        ),
        Case("fairseq", lambda inputs: ["convert", inputs / "c.pt", "--to", "fairseq"], out=("{out}",)),
        Case("huggingface", lambda inputs: ["convert", inputs / "c.pt", "--to", "huggingface"], out=("{out}",)),
        Case(
            "remove",
            lambda inputs: ["prune", "remove", inputs / "model", *_texts(inputs), "--heads", "cross.0.1", *FAST],
        ),
        Case(
            "rank",
            lambda inputs: [
                *("prune", "rank", inputs / "model", *_texts(inputs), "--by", "magnitude", "--keep", 9),
                *("--tune-updates", 2, "--valid-sentences", 4),
            ],
        ),
        Case("l0", _gates("l0", "--lambda", 0.1), resumes=True),
        Case(
            "sweep",
            lambda inputs: [
                *("prune", "sweep", inputs / "model", *_texts(inputs), "--methods", "subset,magnitude", "--keep", 9),
                *("--seeds", 1, "--updates", 2, "--valid-sentences", 4, "--bootstrap", 10),
            ],
        ),
        Case("train", lambda inputs: ["train", "baseline", *_training(inputs), *STEPS, *SIZES], resumes=True),
        Case(
            "per-sentence",
            lambda inputs: [
                *("evaluate", inputs / "model", *_texts(inputs), "--metrics", "perplexity", "--bootstrap", 10)
            ],
            out=("--per-sentence", "{out}"),
            suffix=".csv",
        ),
        Case("plot", lambda inputs: ["plot", "functions", inputs / "run", "--dpi", 30], suffix=".png"),
    )
}


def _training(inputs: Path) -> list[object]:
    valid = ["--valid-source", inputs / "valid.source", "--valid-target", inputs / "valid.target"]
    return [*_texts(inputs), *valid]


def prepare(inputs: Path) -> None:
    """Checkpoints, texts and a run of `analyze` for `plot`."""
    NATIVE.save(checkpoints.small(), inputs / "model")
    fairseq.dictionaries(inputs)
    fairseq.write(inputs / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    make_run(inputs / "run", {"encoder-self": [2], "cross": [2]})
    chance = random.Random(0)
    for part, count in (("", 24), ("valid.", 5)):
        for side, letters in (("source", "abcdefghijklmnopqr"), ("target", "abcdefghijklmn")):
            lines = (" ".join(chance.choices(letters, k=chance.randint(2, 7))) for _ in range(count))
            (inputs / f"{part}{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def digests(out: Path) -> dict[str, str]:
    """Every file of an output by the digest of its content; empty where there is none."""
    paths = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def sizes(out: Path) -> list[int]:
    """The sizes of all files of an output."""
    return sorted((out if out.is_file() else out / name).stat().st_size for name in digests(out))


def leftovers(folder: Path) -> list[str]:
    """Temporary files and directories below a directory."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".headscope-*"))


def find_partial(case: Case, folder: Path, expected: set[str]) -> str | None:
    """The problem with the output of a new run after a fault; None where it is absent or complete.

    A run that resumes may leave its state, and an interrupted one files that it calls incomplete.
    """
    out = case.output_path(folder)
    files = set(digests(out))
    if not files or files == expected:
        return None
    if case.name == "analyze" and "run.json" in files:
        record = json.loads((out / "run.json").read_text(encoding="utf-8"))
        return None if set(record["files"]) == files else f"run.json names other files than {sorted(files)}"
    if case.keeps_progress:
        return None
    return f"{sorted(files)} of {sorted(expected)}"


def clear_folder(folder: Path) -> None:
    """Take everything out of a directory."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
