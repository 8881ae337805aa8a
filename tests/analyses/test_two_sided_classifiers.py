"""Classifiers with an encoder and a decoder: the decoder reads the text too, moved right by one."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import headscope as hs
from headscope.heads import Site
from tests.oracles import classifiers, tiny

IDS: dict[str, Any] = {"pad_token_id": tiny.PAD, "bos_token_id": tiny.START, "eos_token_id": tiny.END, "num_labels": 3}
BART: dict[str, Any] = {
    **{"d_model": 15, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 61},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 17, "decoder_ffn_dim": 17},
}
KINDS: dict[str, dict[str, Any]] = {
    "bart": {**BART, "decoder_start_token_id": tiny.END},
    "mbart": BART,  # the last id comes first
    "t5": {"d_model": 13, "d_kv": 5, "d_ff": 17, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": tiny.PAD},
}
TEXTS, LABELS = classifiers.texts(7), [0, 1, 2, 0, 1, 2, 0]


def made(kind: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **IDS, **KINDS[kind], vocab_size=len(tiny.PIECES))
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4 if parameter.ndim > 1 else 0.1)
    return model


def opened(kind: str) -> hs.Model:
    return hs.load(made(kind), tokenizer=tiny.tokenizer([tiny.START], [tiny.END]))


def confidence(model: Any, site: Site) -> torch.Tensor:
    """The mean largest weight [h] in the second layer, by transformers alone, without the decoder's first input."""
    eager, tokenizer = copy.deepcopy(model), tiny.tokenizer([tiny.START], [tiny.END])
    eager.set_attn_implementation("eager")
    rows = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            output = eager(input_ids=ids, output_attentions=True)
        plain = (ids[0] != tiny.START) & (ids[0] != tiny.END)
        moved = torch.cat([plain.new_zeros(1), plain[:-1]])
        keys = moved if site is Site.DECODER_SELF else plain
        weights = output.decoder_attentions if site is Site.DECODER_SELF else output.cross_attentions
        rows.append(weights[1][0][:, moved][:, :, keys].amax(dim=-1))  # [h t]
    return torch.cat(rows, dim=-1).mean(dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_the_decoder_is_measured_on_what_it_reads(kind: str) -> None:
    model = opened(kind)
    plain = model.analyze(TEXTS, only="confidence", bootstrap=10)
    together = model.analyze(TEXTS, labels=LABELS, only="confidence,gradient,ablation", bootstrap=10, batch_tokens=11)
    for study in (plain, together):
        for site in (Site.DECODER_SELF, Site.CROSS):
            heads = study.heads[(study.heads.site == site.value) & (study.heads.layer == 1)]
            assert heads.confidence.tolist() == pytest.approx(confidence(made(kind), site).tolist())
    assert together.heads.notna().all(axis=None)


@pytest.mark.slow
def test_ablation_is_what_evaluation_says_of_each_head() -> None:
    model = opened("bart")
    study = model.analyze(TEXTS, labels=LABELS, only="ablation", bootstrap=10)
    ablation = study.heads.set_index(["site", "layer", "head"])["ablation"]
    off = model.evaluate(TEXTS, labels=LABELS, mask="cross.1.2", bootstrap=10)["loss"].value
    whole = model.evaluate(TEXTS, labels=LABELS, bootstrap=10)["loss"].value
    assert ablation["cross", 1, 2] == pytest.approx(off - whole)
    assert model.evaluate(TEXTS, mask="cross.1.2", metrics="cosine", bootstrap=10)["cosine"].value < 1 - 1e-6
