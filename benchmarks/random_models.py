"""Random models have no functions: how many of their heads get one all the same, and what explains them.

    python benchmarks/random_models.py [--models N] [--kinds NAMES]

Models of random weights read the captions that ship with all that labels heads: parses, word alignments, pair
functions (`explained`). A BERT and a GPT-2 of 3 layers of 8 heads, and the translation model that ships, its weights
drawn anew. Matrices are normal with a variance of gain² over their rows' length; scores then vary by about gain², so
that with gain 1 (even seeds) attention is soft and with gain 2 (odd seeds) sharp. Some minutes of one core a model.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

from headscope.assets import captions, demo_checkpoint, trained_model
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.base import RunOptions
from headscope.engine.frequencies import token_frequencies
from headscope.engine.plan import analyze, choose_analyses
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

SHAPE: dict[str, Any] = {"bert": {"num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 128}}
SHAPE["gpt2"] = {"n_layer": 3, "n_head": 8, "n_embd": 64, "n_inner": 128}
GAINS = (1.0, 2.0)


def of_library(kind: str) -> Checkpoint:
    """A BERT or a GPT-2 with the tokenizer of the sentence encoder."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(demo_checkpoint())
    if kind == "bert":
        config: Any = transformers.BertConfig(vocab_size=len(tokenizer), hidden_size=64, **SHAPE[kind])
        model: Any = transformers.BertModel(config)
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **SHAPE[kind])
        )
    return HuggingFaceCheckpoint(path=kind, model=model.eval(), tokenizer=tokenizer, digest="0" * 64)


KINDS: dict[str, Callable[[], Checkpoint]] = {
    "bert": lambda: of_library("bert"),
    "gpt2": lambda: of_library("gpt2"),
    "en-de": lambda: open_checkpoint(trained_model(), device="cpu"),
}


def randomise(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """A copy of the model with random matrices, biases 0 and norms 1."""
    torch.manual_seed(seed)
    model: Any = copy.deepcopy(checkpoint.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=GAINS[seed % len(GAINS)] / parameter.shape[-1] ** 0.5)
            else:
                parameter.fill_(float("norm" in name.lower() or "ln_" in name) * float(name.endswith("weight")))
    return checkpoint.with_model(model)


def text(checkpoint: Checkpoint) -> tuple[Corpus, dict[str, Any]]:
    """The captions with their parses, for encoder–decoders with translations; and options of analyses."""
    parses: dict[str, Any] = {"parses": captions("conllu")}
    if not checkpoint.two_sided:
        return open_corpus(captions("en"), **parses), {}
    target: dict[str, Any] = {"target": captions("de"), "target_parses": captions("de.conllu")}
    return open_corpus(captions("en"), **target, **parses), {"alignments": captions("align")}


def main() -> None:
    """Measure and print a row a model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    analyses = choose_analyses(also=("explained",))
    for kind in args.kinds.split(","):
        plain = KINDS[kind]()
        corpus, analysis_options = text(plain)
        frequencies = token_frequencies(plain, corpus, limit=512)
        label_count = heads = 0
        for seed in range(args.models):
            options = RunOptions(**frequencies, seed=seed, analysis_options=analysis_options)
            study = analyze(randomise(plain, seed), corpus, analyses=analyses, options=options)
            labels = {str(head): functions for head, functions in study.labels.items() if functions}
            label_count, heads = label_count + len(labels), heads + len(study.heads)
            shares = study.heads[["explained", "explained_position", "confidence"]].median()
            position_count = study.heads["description"].str.contains("position").sum()
            print(
                f"{kind} seed {seed}: {len(labels)} of {len(study.heads)} heads labelled {labels or ''}; medians: "
                f"confidence {shares['confidence']:.2f}, explained {shares['explained']:.2f}, by position "
                f"{shares['explained_position']:.2f}; {position_count} descriptions name position",
                flush=True,
            )
        print(f"{kind}: {label_count} of {heads} heads ({label_count / heads:.2%}) have a function", flush=True)


if __name__ == "__main__":
    main()
