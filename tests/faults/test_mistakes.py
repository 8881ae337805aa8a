"""Mistakes of those who type: one line on stderr that names what came or what is missing, and nothing is written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from tests.faults.conftest import one_line

Command = Callable[..., tuple[int, str, str]]
READ, RANK, SHRINK = "analyze M --source T --out o", "prune rank M --by magnitude --out o", "prune shrink M --out o"
REMOVE, SWEEP = "prune remove M --heads cross.0.0 --out o", "prune sweep M --source T --target T --out o"
TRAIN, SCORE = "train baseline --source T --target T --out o", "evaluate M --source T --target T"
SWEPT = f"{SWEEP} --valid-source T --valid-target T"
FILES = {
    "T": "a b c\n" * 5,
    "m.gguf": "GGUF",
    "empty": "",
    "list": "cross.9.9\n",
    "broken.toml": "a = \n",
    "unknown.toml": 'sourse = "x"\n',
    "run/run.json": '{"kind": "analysis", "checkpoint": {"path": "M"}}',
    "trained/run.json": '{"kind": "training"}',
    "trained/best/config.toml": "format = 'headscope'",
    "trained/best/model.safetensors": "",
}
MISTAKES = {
    # words that are no command's
    "anlyze M": "did you mean 'analyze'?",
    "prune remov M": "did you mean 'remove'?",
    "train basline --out o": "did you mean 'baseline'?",
    "plot hedas run --out a.png": "did you mean 'heads'",
    "list criterias": "did you mean 'criteria'?",
    "demo --lng": "No such option: --lng",
    f"{READ} --sourc T": "No such option: --sourc",
    "translate M --length-penalty 1": "No such option: --length-penalty",
    # what is missing
    "analyze": "Missing argument 'CKPT'",
    "analyze M --source T": "--out is missing",
    "analyze M --out o": "give --source FILE",
    "convert M o": "--to is missing",
    "prune subset M --source T --target T --out o": "--keep is missing",
    "prune l0 M --source T --target T --out o": "--lambda L",
    RANK: "give --keep N",
    "prune remove M --out o": "give --heads LIST",
    "evaluate M --source T": "needs --target",
    "prune sweep M --source T --methods magnitude --keep 3 --out o": "needs --target and --valid-target",
    # files and folders
    "show nowhere": "there is no file or directory nowhere",
    "show T": "T is a text; give a checkpoint",
    "show m.gguf": "m.gguf is a truncated or broken GGUF file",
    "show run": "run holds results of headscope (analysis, run.json), and is no checkpoint; give the checkpoint that",
    "prune rank trained --by magnitude --keep 3 --out o": "give one that lies in it: trained/best",
    "analyze nowhere --source T --out o": "there is no file or directory nowhere",
    "analyze M --source missing --out o": "there is no file missing",
    "analyze M --source empty --out o": "empty is empty",
    "analyze M --source . --out o": ". is a directory",
    "analyze M --source T --out T": "choose another output",
    f"{READ} --config missing.toml": "there is no config file missing.toml",
    f"{READ} --config broken.toml": "broken.toml is no TOML",
    f"{READ} --config unknown.toml": "unknown option 'sourse'",
    f"{READ} --mask heads.txt": "there is no file of that name either",
    f"{READ} --parse nothing.conllu": "there is no file nothing.conllu",
    "plot heads nowhere --out a.png": "there is no directory nowhere",
    "plot heads M --out a.png": "is a checkpoint",
    "plot heads . --out a.xyz": "cannot write .xyz",
    "plot pruning nowhere --out a.png": "neither sweep.json nor pruning.json",
    "demo --out T": "T is a file; give a directory",
    # values that are none
    f"{READ} --only sinks": "did you mean 'sink'?",
    f"{READ} --bootstrap many": "--bootstrap is 'many'; it must be a whole number",
    f"{READ} --bootstrap -1": "at least 2",
    f"{READ} --max-sentences 0": "at least 1",
    f"{READ} --batch-tokens 0": "at least 1",
    f"{READ} --device gpu": "device 'gpu' is not available",
    f"{READ} --dtype float8": "unknown dtype 'float8'",
    f"{READ} --attention flash": "it must be 'auto', 'dense' or 'streamed'",
    f"{READ} --importance most": "--importance is 'most'; it must be 'none', 'cheap' or 'all'",
    f"{READ} --importance chaep --only sink": "did you mean 'cheap'",
    f"{READ} --set positional.label-rule=none": "it must be 'tested' or 'published'",
    f"{READ} --mask cross.9.9": "no head of this model is called 'cross.9.9'",
    "prune rank M --by obss --keep 12 --out o": "did you mean 'obs'",
    f"{RANK} --keep 99": "99",
    f"{RANK} --keep 12 --steps 0": "--steps is '0'",
    f"{RANK} --keep 12 --protect cross.9.9": "'cross.9.9'",
    f"{RANK} --keep 12 --sites encoder": "encoder-self",
    f"{RANK} --keep 12 --allocate even": "--allocate is 'even'; it must be 'global'",
    f"{RANK} --keep 12 --compensate least-square": "did you mean 'least-squares'?",
    f"{RANK} --keep 12 --compensate least-squares --set damping=-1 --source T --target T": "--damping is '-1'",
    "prune remove M --heads cross.0 --out o": "'cross.0'",
    f"{REMOVE} --margin lots": "--margin 'lots'",
    f"{REMOVE} --export tensorflow": "--export tensorflow",
    f"{SHRINK} --source T --target T --keep-fraction 2": "at most 1",
    f"{SHRINK} --source T --target T --max-drop much": "--max-drop 'much'",
    f"{SWEPT} --methods magic --keep 3": "'magic'",
    f"{SWEPT} --methods magnitude --keep x": "--keep is 'x'",
    f"{SCORE} --metrics blue": "unknown metric 'blue'; did you mean 'bleu'?",
    f"{SCORE} --beam 0": "--beam is '0'",
    f"{TRAIN} --preset huge": "--preset 'huge' is not known",
    f"{TRAIN} --lr -1": "more than 0",
    f"{TRAIN} --dropout 2": "less than 1",
    f"{TRAIN} --normalise moses --set source-lang=xx": "no rules for the language 'xx'",
    f"{TRAIN} --schedule cosin": "did you mean 'cosine'",
    "convert M o --to fairsq": "did you mean 'fairseq'?",
    "convert M o --to masked": "prune remove --export masked); available: native, fairseq",
    "convert M o --to story_of_heads": "nothing is converted to story_of_heads; available: native, fairseq",
    "convert M o --to gguf": "gguf writes causal language models (llama, mistral, qwen2, qwen3), and this is",
    "convert M o --to native --quantize q8_0": "--quantize q8_0 is for exports that have it: gguf",
    # options that do not go together, or would do nothing
    f"{READ} --only sink --skip sink": "no analysis is left",
    f"{READ} --objective nll": "--objective nll is what importances explain",
    f"{READ} --set syntactic.relations=nsubjj": "--relations is about the analysis syntactic; it needs --parse",
    f"{READ} --set alignment.alignments=T": "--alignments is about the analysis alignment; it needs a --target",
    f"{READ} --only sink --set syntactic.relations=nsubj": "ask for it (--also syntactic)",
    f"{READ} --target-parse T": "give --target FILE too",
    f"{READ} --pairs --parse T": "leave out --source2 and --pairs",
    f"{READ} --set faithfulness-bleu=true": "--faithfulness-bleu is about --faithfulness",
    f"{READ} --set frequencies=T --set frequency-corpus=T": "give one",
    f"{READ} --set keep-special=true --exclude-sinks": "give one",
    f"{READ} --set mhr-rows=batch": "--mhr-rows is about --mhr-pickles",
    f"{READ} --clean T": "give --corrupt and --answer too",
    f"{RANK} --keep 12 --max-sentences 3": "--max-sentences is about --source",
    f"{RANK} --keep 12 --score-sentences 3": "--score-sentences is about --source",
    f"{RANK} --keep 12 --objective loss": "--objective is about --source",
    f"{RANK} --keep 12 --max-length 30": "--max-length is about --source",
    f"{RANK} --keep 12 --batch-tokens 5": "--batch-tokens is about --source",
    f"{RANK} --keep 12 --target T": "--target is about --source",
    f"{RANK} --keep 12 --set source2=T": "--source2 is about --source",
    f"{RANK} --keep 12 --pairs": "--pairs is about --source",
    f"{RANK} --keep 12 --protect list": "list: no head of this model is called 'cross.9.9'",
    f"{RANK} --keep 12 --lr 0.1": "--lr is about learning, and nothing learns",
    f"{SWEPT} --methods magnitude --keep 3 --metric perplexity --set text=tokenised-lowercase": "--text is about",
    f"{SWEPT} --methods magnitude --keep 3 --metric perplexity --set beam=3": "--beam is about translations",
    f"{SWEPT} --methods magnitude --keep 3 --updates 5": "--updates is about gates that l0 and subset learn",
    f"{SWEPT} --methods magnitude --keep 3 --set hiding=random": "--hiding is about perplexity of encoders alone",
    f"{SWEPT} --methods magnitude --keep 3 --set gate-lr=0.1": "--gate-lr is about gates",
    f"{SWEPT} --methods magnitude --keep 3 --lr 0.1": "--lr is about learning, and nothing learns",
    f"{SCORE} --hiding random": "--hiding is about perplexity of encoders alone",
    f"{SCORE} --metrics perplexity --beam 3": "--beam is about translations",
    f"{REMOVE} --keep-only cross.0.1": "not both",
    f"{REMOVE} --anchor mixed": "--anchor is for --compensate least-squares",
    f"{REMOVE} --calibration-sentences 9": "--calibration-sentences is about --compensate",
    f"{REMOVE} --sequential": "--sequential is for --compensate least-squares",
    f"{SHRINK} --source T --target T --keep-fraction 0.5 --keep 3": "give one of them",
    f"{TRAIN} --heads 3 --d-model 16": "not divisible by --heads 3",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line(typed: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    words = [str(hs.assets.trained()) if word == "M" else word for word in shlex.split(typed)]
    status, shown, error = command(*words)
    *said, last = error.splitlines(keepends=True)
    assert (status, shown, one_line(last)) == (2, "", True), error
    assert MISTAKES[typed] in last and all(line.startswith("no --target: ") for line in said), error
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == set(FILES)
