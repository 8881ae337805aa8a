"""The model of the MHR oracle with its vocabularies, and a small one: native checkpoints with alphas."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headscope.config import Companions
from headscope.data.corpus import Corpus, open_corpus
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.training.prepare import TokenizedTexts, TrainingPairs
from tests.makers import wrappers
from tests.oracles import native
from tests.oracles.checkpoints import words


def load_reference(oracles: Path) -> tuple[TransformerCheckpoint, Corpus]:
    """The reference checkpoint and its sentences, of which the whole has 200."""
    folder = oracles / "mhr"
    checkpoint = open_checkpoint(
        str(folder / "alpha" / "checkpoint_best.pt"), device="cpu", companions=Companions(dicts=folder / "data")
    )
    assert isinstance(checkpoint, TransformerCheckpoint)
    return checkpoint, open_corpus(folder / "data" / "test.bpe.de", target=folder / "data" / "test.bpe.en")


def pairs(checkpoint: TransformerCheckpoint, corpus: Corpus) -> TrainingPairs:
    """Their sentences as training batches are made from."""
    assert checkpoint.source is not None and checkpoint.target is not None
    sources = TokenizedTexts.of([checkpoint.source.encode(sentence.source) for sentence in corpus])
    targets = TokenizedTexts.of([checkpoint.target.encode(sentence.target or "") for sentence in corpus])
    return TrainingPairs(sources, targets, np.arange(len(targets)), checkpoint.source, checkpoint.target)


def load_pickle(oracles: Path, name: str) -> Any:
    """A pickle that the fork wrote; ours to trust."""
    return pickle.loads((oracles / "mhr" / "alpha" / "generate" / f"{name}.pkl").read_bytes())


def small(seed: int = 0, **options: Any) -> TransformerCheckpoint:
    """A small model with random alphas; ids 0 to 3 are start, padding, end and unknown."""
    torch.manual_seed(seed)
    model = native.model(self_mixing="alpha.v1", cross_mixing="alpha.v1", **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mixing.alpha"):
                parameter.add_(torch.randn_like(parameter))
    stacks = (model.config.encoder, model.config.decoder)
    sides = [words(stack.vocabulary, "w{}".format) for stack in stacks if stack is not None]
    return wrappers.native(model, *sides, path="small.pt", format="fairseq")
