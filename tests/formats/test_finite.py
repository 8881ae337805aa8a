"""NaN and infinite numbers: named when a checkpoint is opened, and with their layer when they arise in a pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.bootstrap import Ratio
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.engine.base import ANALYSES
from headscope.errors import CheckpointError, NumericalError
from headscope.formats.base import open_checkpoint
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.forward import finite
from headscope.model.nonfinite import is_finite
from tests.makers.shared import Command
from tests.makers.studies import study_of
from tests.oracles import checkpoints, fairseq
from tests.oracles.checkpoints import SOURCES, TARGETS

NAN, INF = float("nan"), float("inf")


def save_model(folder: Path, kind: str = "gpt2", **overrides: float) -> Path:
    """A Hugging Face folder; `overrides` put a number into the middle of a weight, dots written as __."""
    checkpoint = checkpoints.huggingface(kind)
    with torch.no_grad():
        for name, value in overrides.items():
            weight = checkpoint.model.get_parameter(name.replace("__", "."))
            weight.view(-1)[weight.numel() // 2] = value
    model: Any = checkpoint.model.float()
    model.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("gpt2", "transformer.wpe.weight"),  # in the middle: a position that the probe does not reach
        ("gpt2", "transformer.h.1.mlp.c_fc.bias"),
        ("bert", "cls.predictions.transform.dense.weight"),
        ("bart", "model.decoder.layers.0.encoder_attn.v_proj.weight"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_weights_of_a_hugging_face_folder_are_named(tmp_path: Path, kind: str, name: str, value: float) -> None:
    folder = save_model(tmp_path / "model", kind, **{name.replace(".", "__"): value})
    with pytest.raises(CheckpointError, match=f"{name}"):
        open_checkpoint(str(folder), device="cpu")


def test_a_native_file_is_named(tmp_path: Path) -> None:
    checkpoint = checkpoints.small()
    with torch.no_grad():
        checkpoint.model.get_parameter("decoder.layers.2.ffn.inner.bias")[3] = NAN
    NATIVE.save(checkpoint, tmp_path / "native")
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.ffn\.inner\.bias"):
        open_checkpoint(str(tmp_path / "native"), device="cpu")


@pytest.mark.parametrize("copies", [True, False])
def test_a_fairseq_file_is_named_by_its_own_names(tmp_path: Path, copies: bool) -> None:
    """Shared embeddings, which a file contains more than once, are named too."""
    options = fairseq.BASE | {"share_decoder_input_output_embed": True}
    weights = fairseq.state(options)
    wrong = [name for name in weights if "decoder.embed_tokens" in name or "decoder.output_projection" in name]
    for name in wrong if copies else wrong[:1]:
        weights[name] = weights[name].clone()
        weights[name][3, 2] = NAN
    path = fairseq.write(tmp_path / "c.pt", options, weights)
    with pytest.raises(CheckpointError, match=r"decoder\.embed_tokens\.weight"):
        open_checkpoint(str(path), device="cpu")


def test_tensors_of_every_type_are_looked_at() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2):
        values = torch.zeros(2, 3).to(dtype)
        assert is_finite(values) and is_finite(values[:0])
        values[1, 1] = NAN
        assert not is_finite(values) and not is_finite(values, masked=True)
    assert all(is_finite(torch.ones(3, dtype=dtype)) for dtype in (torch.bool, torch.int8, torch.uint8, torch.int64))
    mask = torch.full((3, 3), -INF).triu(1)
    assert is_finite(mask, masked=True) and not is_finite(mask) and not is_finite(-mask, masked=True)
    assert is_finite(torch.full((1000,), 6e4, dtype=torch.float16))  # whose sum is not


def overflowing_model(layer: int = 1) -> TransformerCheckpoint:
    """A native float32 model in which one feed-forward layer overflows."""
    checkpoint = checkpoints.small(seed=4)
    checkpoint.model.float()
    with torch.no_grad():
        checkpoint.model.get_parameter(f"decoder.layers.{layer}.ffn.outer.weight").fill_(3e38)
    return checkpoint


def pairs() -> Corpus:
    return open_corpus(SOURCES, target=TARGETS)


WHERE = r"arise at decoder\.layers\.1\.ffn\.outer; its weights are out of proportion for float32"


@pytest.mark.parametrize("name", ["confidence", "positional", "distance", "similarity", "gradient", "ablation", "lrp"])
def test_analyses_stop_with_the_layer(name: str) -> None:
    with pytest.raises(NumericalError, match=WHERE):
        study_of(overflowing_model(), pairs(), name, objective="loss")


@pytest.mark.parametrize("arguments", [("analyze", "--only", "confidence", "--out"), ("evaluate",)])
def test_overflow_in_half_precision_is_named_by_the_command(
    command: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The model is finite in float32 and on the probe; a position after the probe overflows."""
    checkpoint = checkpoints.huggingface("gpt2")
    model: Any = checkpoint.model
    with torch.no_grad():
        model.transformer.wpe.weight[6] = 3e4
        model.transformer.h[0].attn.c_proj.bias.fill_(5e4)
        model.transformer.wpe.weight[:6] = -3e4
    model.float().save_pretrained(tmp_path / "model")
    checkpoint.tokenizer.save_pretrained(tmp_path / "model")
    long = tmp_path / "long"
    long.write_text("ah bi ck ah bi ck ah bi\n")
    name, *options = arguments
    out = [*options, tmp_path / "out"] if options else []
    status, _, err = command(name, tmp_path / "model", "--source", long, "--dtype", "float16", "--device", "cpu", *out)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "arise at transformer.h.0" in err and "take --dtype float32 or bfloat16" in err
    assert not (tmp_path / "out").exists()


class _Fixed:
    """A checkpoint whose pass gives `values`."""

    path, dtype = "fixed", torch.float32

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.model = values, checkpoints.small().model

    @finite
    def states(self, batch: Batch) -> torch.Tensor:
        return self.values


def test_what_a_model_computes_at_padding_does_not_matter() -> None:
    """A model may give NaN at padding, where all keys are masked, and -inf for suppressed words."""
    source = pad_side([Encoded([5, 6, 7], [False] * 3), Encoded([5], [False])])
    batch = Batch(torch.arange(2), 0, source)
    values = torch.ones(2, 3, 4)
    values[1, 1:], values[0, 0, 0] = NAN, -INF
    assert _Fixed(values).states(batch) is values
    values[1, 0, 3] = NAN
    with pytest.raises(NumericalError, match=r"^fixed.*output"):
        _Fixed(values).states(batch)


def test_sums_of_an_analysis_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = ANALYSES.get("confidence")

    def observe(self: Any, heads: Any) -> dict[str, Ratio]:
        total = torch.full((heads.weights.shape[0], heads.weights.shape[1]), 1.0)
        total[0, 0] = NAN if heads.layer == 1 else 1.0
        return {"confidence": Ratio(total, torch.ones(len(total), 1))}

    monkeypatch.setattr(cls, "observe", observe)
    for analyses in ([cls], [cls, ANALYSES.get("entropy")]):
        with pytest.raises(NumericalError, match=r"confidence.*encoder-self\.1"):
            study_of(checkpoints.small(), pairs(), *analyses)
