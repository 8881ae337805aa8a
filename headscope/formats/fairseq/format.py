"""fairseq checkpoints: transformer* and transformer_lm* models of every version, and those of the MHR fork.

The fork has a matrix `alphas` in every attention module; a file with any gets the mixing "alpha.v1".
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.config import Companions
from headscope.data.encoded import SideName
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, shortlist
from headscope.files.reading import file_digest
from headscope.files.writing import save_torch, write_atomically
from headscope.formats.base import FORMATS, CheckpointFormat, SavedFiles
from headscope.formats.exports import Conversion, Probe
from headscope.formats.fairseq.config import (
    Settings,
    in_languages,
    read_settings,
    transformer_config,
)
from headscope.formats.fairseq.dictionaries import Dictionaries, find_dictionaries
from headscope.formats.fairseq.from_native import (
    end_difference,
    fairseq_model,
    logits_in_our_order,
    vocabulary_files,
)
from headscope.formats.fairseq.keys import Origin, fairseq_weights, native_weights, origin, upgraded, without_prefix
from headscope.formats.native import native_state, opened_dtype
from headscope.formats.pickles import begins_with_name, is_torch_file, read_tensors, read_torch
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, build_transformer, probe_logits
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.model.nonfinite import refuse_damaged_file

FILE = "checkpoint_best.pt"
TOLERANCE = 1e-5  # of the largest logit


class FairseqCheckpoint(TransformerCheckpoint):
    """A fairseq model; `origin`, `options` and the dictionaries are what `FAIRSEQ.write` writes such a file with."""

    def __init__(
        self, *, origin: Origin, options: Mapping[str, Any], dictionaries: Dictionaries, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.origin, self.options = origin, options
        self.missing, self.read_files = dictionaries.missing, dictionaries.files

    def with_model(self, model: nn.Module) -> FairseqCheckpoint:
        """Around a model without mixings the file's matrices `alphas` go."""
        copied = super().with_model(model)
        if not any(module.mixing is not None for _, _, _, module in copied.model.attention_modules()):
            copied.origin = self.origin.without_alphas()
        return copied

    def _side(self, name: SideName) -> Vocabulary:
        side: SideName = name if self.two_sided else "target"
        if side in self.missing:
            raise CheckpointError(f"{self.path} cannot read text: {self.missing[side]}")
        return super()._side(name)


class FairseqFormat(CheckpointFormat[FairseqCheckpoint]):
    """A file of torch.save with the weights (`model`) and the options (`args` or `cfg`) of a fairseq model."""

    name = "fairseq"
    summary = "a .pt file of fairseq or of its fork MHR, with dict.*.txt beside it or in --dicts"
    takes = frozenset({"dicts", "bpe", "src_lang", "tgt_lang"})
    converts = True

    def recognise(self, path: Path) -> bool:
        return path.is_file() and is_torch_file(path) and not begins_with_name(path, "attn.W_Q")

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> FairseqCheckpoint:
        content = _content(Path(path))
        prefix, raw = without_prefix(read_tensors(Path(path), content["model"]))
        refuse_damaged_file(path, raw)
        settings = in_languages(read_settings(path, content), companions.src_lang, companions.tgt_lang)
        state = upgraded(raw)
        config = transformer_config(settings, state)
        weights = _completed(path, config, native_weights(path, state))
        model = build_transformer(path, config, weights)
        stored = {key: tensor.dtype for key, tensor in weights.items() if tensor.is_floating_point()}
        model_dtype = opened_dtype(dtype, stored, device)
        dictionaries = find_dictionaries(settings, config, companions)
        checkpoint = FairseqCheckpoint(
            path=path,
            format=self.name,
            model=model.to(model_dtype).to(device),
            model_type=settings.arch,
            digest=file_digest([Path(path)]),
            source=dictionaries.vocabularies.get("source"),
            target=dictionaries.vocabularies.get("target"),
            stored=stored if dtype == "auto" else {},
            origin=origin(raw),
            options=_plain(settings, config),
            dictionaries=dictionaries,
        )
        checkpoint.prefix, checkpoint.writes = prefix, settings.text("target_lang")
        return checkpoint

    def write(self, checkpoint: FairseqCheckpoint, folder: Path, companions: Companions) -> SavedFiles:
        """A file with the old name, keys, order and types, without training state, and its dictionaries."""
        path = folder / Path(checkpoint.path).name
        state = native_state(checkpoint.model, checkpoint.stored)
        state |= {tied: state[original] for tied, original in checkpoint.model.tied().items()}
        _write_file(path, checkpoint.options, fairseq_weights(state, checkpoint.origin))
        for file in checkpoint.read_files:
            shutil.copyfile(file, folder / file.name)
        notes = _notes(checkpoint)
        if _pruned(checkpoint):
            return SavedFiles(path, self.name, notes, ("headscope",), (_ONE_NUMBER, *notes))
        of_fork = checkpoint.origin.of_fork
        return SavedFiles(path, self.name, notes, ("headscope", _OPENS[of_fork]), (_LIMITS[of_fork], *notes))

    def convert(self, checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> Conversion:
        if isinstance(checkpoint, FairseqCheckpoint):
            if _pruned(checkpoint):
                raise CheckpointError(
                    f"{checkpoint.path} has layers with fewer heads than the others, and fairseq has one number of "
                    "heads; `headscope prune remove --export masked` leaves zeros in their place"
                )
            written = self.write(checkpoint, folder, Companions())
            again = self.load(str(written.path), device="cpu", dtype="float64", companions=Companions())
            logits = probe_logits(again.model, probe)
            return Conversion(
                checkpoint.model_type, logits, written.notes, written.opens, written.limits, written.path.name
            )
        written_model = fairseq_model(checkpoint)
        _write_file(folder / FILE, written_model.options, written_model.weights)
        for name, content in vocabulary_files(checkpoint).items():
            (folder / name).write_bytes(content)
        again = self.load(str(folder / FILE), device="cpu", dtype="float64", companions=Companions())
        if not (difference := end_difference(checkpoint, written_model, again)) <= TOLERANCE:
            raise CheckpointError(
                f"{checkpoint.path} was converted, but its first logits differ by {difference:.1e}; nothing was left "
                "behind. Please report this with the output of `headscope show`"
            )
        logits = logits_in_our_order(again.model, written_model, probe)
        opens, limits = ("headscope", _OPENS[written_model.of_fork]), (_LIMITS[written_model.of_fork],)
        return Conversion(written_model.options["arch"], logits, written_model.notes, opens, limits, FILE)


_ONE_NUMBER = "fairseq itself: heads were removed, and its layers have one number of heads"
# By whether a file has the fork's matrices.
_OPENS = {
    False: "fairseq (`--path`, with the folder of the dictionaries as data)",
    True: "the fork MHR of fairseq, with its matrices `alphas`",
}
_LIMITS = {
    False: "the fork MHR of fairseq, which wants a matrix `alphas` in every attention module",
    True: "fairseq itself, which has no matrices `alphas`",
}


def _write_file(path: Path, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Options and weights with as much of a trainer's state as fairseq looks up when it opens a file."""
    history = {
        "criterion_name": "LabelSmoothedCrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": 0,
    }
    content = {
        "args": argparse.Namespace(**options),
        "model": dict(weights),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": None},
    }
    write_atomically(path, lambda target: save_torch(content, target))


def _pruned(checkpoint: FairseqCheckpoint) -> bool:
    config = checkpoint.model.config
    full = {stack.d_model // stack.d_head for stack in (config.encoder, config.decoder) if stack is not None}
    return bool(set(checkpoint.layout.values()) - full)


FAIRSEQ = FairseqFormat()
FORMATS.register("fairseq", FAIRSEQ, where=__name__)


def _notes(checkpoint: FairseqCheckpoint) -> tuple[str, ...]:
    notes = []
    if checkpoint.origin.folded:
        notes.append("the matrices that mix heads are folded into the output projections: no longer a file of the fork")
    if _pruned(checkpoint):
        notes.append("fairseq itself has no layers with fewer heads than its options say: open it with headscope")
    return tuple(notes)


def _content(path: Path) -> Mapping[str, Any]:
    content = read_torch(path)
    entries: Mapping[str, Any] = content if isinstance(content, dict) else {}
    if entries.get("args") is entries.get("cfg") is None or not isinstance(entries.get("model"), dict):
        raise CheckpointError(
            f"{path} is a torch file that fairseq did not write: it has the entries "
            f"{shortlist([repr(key)[:40] for key in entries])}, and files of fairseq `model` with `args` or `cfg`"
        )
    if not all(isinstance(key, str) for key in entries["model"]):
        raise CheckpointError(f"{path}: its `model` has keys that are no text; the file is broken")
    return entries


def _completed(path: str, config: TransformerConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        for site, mixing, heads in _sites(stack):
            for layer in range(len(heads) if mixing else 0):
                key = f"{side}.layers.{layer}.{site}"
                like = state.get(f"{key}.output.weight", torch.empty(0))
                state.setdefault(f"{key}.mixing.alpha", torch.eye(heads[layer], dtype=like.dtype))
    if "output.weight" not in state and not config.tie_output:
        raise CheckpointError(f"{path}: there is no decoder.output_projection.weight, and the output is not tied")
    return state


def _sites(stack: StackConfig | None) -> list[tuple[str, str | None, tuple[int, ...]]]:
    if stack is None:
        return []
    return [
        ("self_attention", stack.self_mixing, stack.self_heads),
        ("cross_attention", stack.cross_mixing, stack.cross_heads),
    ]


def _plain(settings: Settings, config: TransformerConfig) -> dict[str, Any]:
    """Options that can be written again: numbers, texts, flags and lists of them, and how many heads fill a layer."""
    simple = (str, int, float, type(None))
    heads = {
        f"{side}_attention_heads": stack.d_model // stack.d_head
        for side, stack in (("encoder", config.encoder), ("decoder", config.decoder))
        if stack is not None
    }
    options = {
        name: value
        for name, value in settings.values.items()
        if isinstance(value, simple)
        or (isinstance(value, list) and len(value) < 256 and all(isinstance(part, simple) for part in value))
    }
    return {
        **heads,
        **{name: value for name, value in options.items() if value is not None or name not in heads},
        "arch": settings.arch,
    }
