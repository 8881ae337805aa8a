"""Somebody who types the commands of a page, with small texts and few updates, in a folder like the checkout."""

import io
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch
import transformers

from headscope.pruning.options.choice import learners
from scripts.documented import DOCS, Command, commands
from tests.makers.modules import ROOT
from tests.oracles.commands import run_cli

FILES = ("--train", "24", "--val", "6", "--test", "3")
"""Sentences of the texts that `examples/make_files.py` makes."""
RECIPE = "encoder-layers = 3\ndecoder-layers = 3\nd-model = 24\nd-ffn = 16\nheads = 8\nupdates = 2\nbleu-every = 0\n"
"""The reader's recipe.toml, for models that are trained from scratch."""
LEARNING = "--updates 1 --max-sentences 4 --valid-sentences 2"
TINY = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ffn 16 --heads 4 --vocab-size 200 --updates 2 "
    "--max-tokens 4000 --bleu-every 0 --beam 1 --max-sentences 24"
)
SMALLER = {
    ("analyze",): "--max-sentences 2 --bootstrap 10",
    ("evaluate",): "--max-sentences 2 --bootstrap 10",
    ("prune", "l0"): LEARNING,
    ("prune", "subset"): LEARNING,
    ("prune", "rank"): "--max-sentences 2 --valid-sentences 2",
    ("prune", "remove"): "--max-sentences 2 --rounds 0",
    ("prune", "shrink"): "--max-sentences 12 --rounds 0 --allocate global",
    ("prune", "sweep"): f"{LEARNING} --seeds 1 --metric perplexity --bootstrap 10",
    ("train",): TINY,
}
"""Options with which tests reduce the work of a command."""


SKIPPED_PARTS = ("--export onnx",)
"""Parts of commands that are skipped here: `test_onnx.py` types the same line, whose tracing takes minutes."""
QUICK = {"examples/make_whisper.py": ("--updates", "2"), "Qwen3": ("--updates", "2")}
"""Options that tests append after a last word that would train for longer."""


class Newcomer:
    """Types commands, each once; keeps the variables of the shell, and what Python printed by command line.

    A command that differs from an earlier one by its `--out` and `--force` alone gets a copy of what that wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}
        self.lines: set[str] = set()
        self.outputs: dict[str, str] = {}
        self.originals: dict[frozenset[str], Path] = {}
        for name in ("headscope", "examples"):
            (folder / name).symlink_to(ROOT / name)
        [makes_llama] = [command for command in commands(DOCS / "serving.md") if command.line.endswith("make_llama.py")]
        self.type_command(makes_llama)
        self._python(["examples/make_files.py", *FILES])
        (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")

    def type_command(self, command: Command) -> None:
        """Run a command, unless it has been typed before."""
        if command.line in self.lines or command.not_run or any(part in command.line for part in SKIPPED_PARTS):
            return
        self.lines.add(command.line)
        words = [self.variables.get(word.removeprefix("$"), word) for word in command.words]
        if words[:2] == ["headscope", "plot"]:  # nothing reads a figure: one of a kind with the same options is enough
            kind = " ".join([*words[:3], *(word for word in words if word.startswith("--")), words[-1][-4:]])
            if kind in self.lines:
                return
            self.lines.add(kind)
        words += QUICK.get(words[-1], ())
        if words[0] == "python":
            output = self._python(words[1:])
            self.outputs[command.line] = output
            if command.variable:
                self.variables[command.variable] = output
        elif words[0] == "headscope":
            self._headscope(command, reduce_work(words[1:]))

    def _headscope(self, command: Command, words: list[str]) -> None:
        if words[0] != "plot" and "--out" in words:
            out = words.pop(index := words.index("--out") + 1)
            key = self._original_key(words)
            words.insert(index, out)
            if key in self.originals:
                shutil.copytree(self.originals[key], self.folder / out, dirs_exist_ok="--force" in words)
                return
            self.originals[key] = self.folder / out
        stdin = (self.folder / command.source).read_bytes() if command.source else b""
        result = run_cli(words, stdin=stdin)
        assert result.status == 0 and result.crash is None, (command.line, result)
        if command.out:
            (self.folder / command.out).write_text(result.stdout, encoding="utf-8")

    def _original_key(self, words: list[str]) -> frozenset[str]:
        """The key of a command: its words without `--out`, files by their content."""
        paths = [self.folder / word for word in words]
        return frozenset(
            path.read_text(encoding="utf-8") if path.suffix in (".txt", ".en") and path.is_file() else word
            for word, path in zip(words, paths, strict=True)
        ) - {"--force"}

    def _python(self, words: list[str]) -> str:
        """Run `python -c CODE` or `python FILE` in this process and return its stdout."""
        output = io.StringIO()
        with redirect_stdout(output), patch.object(sys, "argv", words):
            if words[0] == "-c":
                exec(compile(words[1], "command", "exec"), {})
            else:
                runpy.run_path(str(self.folder / words[0]), run_name="__main__")
        return output.getvalue().strip()


def narrow_bert(folder: Path, original: str, *, layers: int = 6) -> str:
    """The small BERT with its tokenizer and heads, but two channels a head and weights drawn at random."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": layers}
    config = transformers.AutoConfig.from_pretrained(original, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(original).save_pretrained(folder)
    return str(folder)


def reduce_work(words: list[str]) -> list[str]:
    """Replace options of a command by those of `SMALLER`; of several sizes, keep the first and the last."""
    choices = [options.split() for name, options in SMALLER.items() if tuple(words[: len(name)]) == name]
    if not choices or "--resume" in words:
        return words
    options, sets = dict(zip(choices[0][::2], choices[0][1::2], strict=True)), list[str]()
    if words[:2] == ["prune", "sweep"]:
        sets += ["--set", "score-sentences=2"]
    if "--compensate" in words and words[1] == "remove":
        options["--calibration-sentences"] = "8"
    if words[1] == "shrink":  # commands of `prune remove` compare all refits
        options["--compensate"] = "least-squares"
    if words[1] == "rank" and "--steps" in words:
        options["--steps"] = "2"
    methods = words[words.index("--methods") + 1].split(",") if "--methods" in words else []
    if methods and not set(methods) & set(learners()):
        del options["--updates"]
    if "explained" in words:
        sets += ["--set", "explained.explained-rows=60", "--set", "explained.explained-steps=2"]
    if "--faithfulness" in words:
        sets += ["--set", "faithfulness-seeds=1", "--set", "faithfulness-steps=2"]
    for flag in {"--keep", "--keep-fraction"} & set(words):
        first, *sizes = words[words.index(flag) + 1].split(",")
        options[flag] = ",".join([first, *sizes[-1:]])
    remaining = [word for index, word in enumerate(words) if word not in options and words[index - 1] not in options]
    draws_figures = words[0] != "analyze" or words[-1] == "run"  # the figures of one run are enough
    return [
        *remaining,
        *([] if draws_figures else ["--no-figures"]),
        *(part for option in options.items() for part in option),
        *sets,
    ]
