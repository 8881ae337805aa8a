"""`convert --to fairseq`: the keys, shapes and weights that fairseq and its fork write, and the same logits."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.config import Companions
from headscope.errors import CheckpointError
from headscope.export.convert import convert
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import plan_removal
from tests.makers.translators import WORDS, around, changed, trained_here
from tests.oracles import fairseq


def opened(path: Path, **options: Any) -> TransformerCheckpoint:
    found = open_checkpoint(str(path), device="cpu", **options)
    assert isinstance(found, TransformerCheckpoint)
    return found


def contents(path: Path) -> dict[str, Any]:
    """A file of fairseq as torch reads it."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and weights of the file that was written."""
    content = contents(folder / "checkpoint_best.pt")
    assert content["optimizer_history"][-1]["num_updates"] == 0  # fairseq looks these up when it opens a file
    assert content["extra_state"]["train_iterator"]["epoch"] == 1
    return vars(content["args"]), content["model"]


@pytest.mark.slow
def test_the_forks_own_file_comes_back(oracles: Path, tmp_path: Path) -> None:
    """By way of a native model: keys in their order, shapes, types and values, and what the options say."""
    folder = oracles / "mhr"
    path = folder / "alpha" / "checkpoint_best.pt"
    original = opened(path, companions=Companions(dicts=folder / "data"))
    convert(original, tmp_path / "native", to="native")
    done = convert(opened(tmp_path / "native"), tmp_path / "back", to="fairseq")
    assert done.difference == 0.0 and "alphas" in done.notes[0]
    content = contents(path)
    wanted, (options, weights) = content["model"], written(tmp_path / "back")
    assert list(weights) == list(wanted)
    for key, tensor in weights.items():
        assert tensor.shape == wanted[key].shape and tensor.dtype == wanted[key].dtype
        assert key.endswith("_float_tensor") or torch.equal(tensor, wanted[key]), key
    theirs = vars(content["args"])
    shaping = {name for name in options if name.startswith(("encoder_", "decoder_", "share_", "max_", "no_", "left_"))}
    assert shaping and {name: options[name] for name in shaping - {"encoder_embed_path", "decoder_embed_path"}} == {
        name: theirs[name] for name in shaping - {"encoder_embed_path", "decoder_embed_path"}
    }
    for side, language in (("source", "de"), ("target", "en")):
        lines = (tmp_path / "back" / f"dict.{side}.txt").read_text(encoding="utf-8").splitlines()
        expected = (folder / "data" / f"dict.{language}.txt").read_text(encoding="utf-8").splitlines()
        assert [line.split()[0] for line in lines] == [line.split()[0] for line in expected]


def test_a_file_of_fairseq_is_written_again(tmp_path: Path) -> None:
    fairseq.dictionaries(tmp_path)
    weights = fairseq.state(fairseq.BASE)
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, weights)
    done = convert(opened(path), tmp_path / "out", to="fairseq")
    again = contents(tmp_path / "out" / "c.pt")
    assert done.difference == 0.0 and list(again["model"]) == list(weights)
    assert all(torch.equal(again["model"][key], weights[key]) for key in weights)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["README.md", "c.pt", "conversion.json", "dict.de.txt", "dict.en.txt"]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pre-norm, learned": {"norm": "pre", "positions": "learned", "activation": "gelu-tanh"},
    "untied, two vocabularies": {"tie_output": False, "vocabulary": "separate", "positions": "none"},
    "a language model": {"kind": "lm", "norm": "pre"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_models_trained_here_give_the_same_logits_in_fairseqs_formulas(tmp_path: Path, name: str) -> None:
    """The oracle reads the file alone: its ids, its start, its positions."""
    made = trained_here(**OPTIONS[name])
    done = convert(made, tmp_path / "out", to="fairseq")
    assert done.difference is not None and done.difference < 1e-6
    options, weights = written(tmp_path / "out")
    subwords = ["<s>", "<pad>", "</s>", "<unk>", *WORDS.subwords[4:]]
    lm = made.source is None
    lines = (tmp_path / "out" / ("dict.txt" if lm else "dict.target.txt")).read_text().splitlines()
    assert [line.split()[0] for line in lines] == subwords[4:]
    ids = [WORDS.subwords.index(subword) for subword in subwords]  # ours, in fairseq's order
    text, source = [5, 14, 0, 9], [7, 0, 16, 8, 2]
    theirs = [ids.index(number) for number in text]
    before = [0] if lm else [2]
    found = fairseq.logits(options, weights, None if lm else [ids.index(n) for n in source], before + theirs)
    with torch.no_grad():
        target = torch.tensor([[1, *text]])
        expected = made.model.double()(None if lm else torch.tensor([source]), target)[0]
    torch.testing.assert_close(found, expected[:, ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: trained_here(kind="lm"), "post-norm"),
        (lambda: changed(d_head=5), "width"),
        (lambda: changed(self_heads=(3, 2)), "--export masked"),
        (lambda: changed(norm_epsilon=1e-6), "epsilon"),
        (lambda: changed(self_mixing="experts.v1"), "mixed"),
        (lambda: around(trained_here().model, vocabulary=replace(WORDS, pad=None)), "<pad>"),
    ],
)
def test_what_fairseq_has_not_is_one_line(tmp_path: Path, make: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"{reason}"):
        convert(make(), tmp_path / "out", to="fairseq")
    assert not (tmp_path / "out").exists()


def test_a_pruned_file_is_refused_and_a_masked_one_is_not(tmp_path: Path) -> None:
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    fairseq.dictionaries(tmp_path)
    whole = opened(path)
    plan = plan_removal(whole.attention_sites, [HeadId(Site.CROSS, 0, 1)])
    with pytest.raises(CheckpointError, match="--export masked"):
        convert(whole.alter_heads(plan, "shrink"), tmp_path / "out", to="fairseq")
    masked = whole.alter_heads(plan, "zero")
    assert convert(masked, tmp_path / "out", to="fairseq").difference == 0.0
