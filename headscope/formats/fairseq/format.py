"""fairseq checkpoints: transformer* and transformer_lm* models of every version and of the MHR fork.

The fork has a matrix `alphas` in every attention module; a model with such matrices gets the mixing "alpha.v1". The
dictionary of each side lies in --dicts, beside the checkpoint, or in the folder that it was trained from.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.config import Companions
from headscope.data.encoded import SideName
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import CheckpointError, DataError, flag, restate, shortlist
from headscope.files.reading import file_digest, read_bytes, read_text
from headscope.files.writing import save_torch, write_atomically
from headscope.formats.base import FORMATS, CheckpointFormat, SavedFiles
from headscope.formats.exports import Probe
from headscope.formats.fairseq.config import Settings, added_subwords, around_texts, read_settings, transformer_config
from headscope.formats.fairseq.from_native import (
    LANGUAGES,
    SPECIAL,
    fairseq_model,
    logits_in_our_order,
    vocabulary_files,
)
from headscope.formats.fairseq.keys import Origin, fairseq_weights, native_weights, origin, upgrade_keys, without_prefix
from headscope.formats.native import native_state, placed_transformer
from headscope.formats.pickles import is_torch_file, read_tensors, read_torch
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, probe_logits
from headscope.model.native.transformer_config import TransformerConfig
from headscope.model.nonfinite import refuse_damaged_file

START, PAD, END, UNKNOWN = range(4)
OVERWRITE = " #fairseq:overwrite"
LANGUAGE = re.compile(r"[\w-]{1,32}")


@dataclass(frozen=True)
class Dictionaries:
    """Vocabularies by side, a sentence for each side (`missing`) why it has none, and the files that were read."""

    vocabularies: Mapping[SideName, Vocabulary] = field(default_factory=dict)
    missing: Mapping[SideName, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def find_dictionaries(settings: Settings, config: TransformerConfig, companions: Companions) -> Dictionaries:
    """The dictionary of each side: in --dicts, beside the checkpoint, or in the folder it was trained from."""
    vocabularies: dict[SideName, Vocabulary] = {}
    missing: dict[SideName, str] = {}
    codes = None if companions.bpe is None else read_bytes(companions.bpe, name=f"{flag.bpe} {companions.bpe}")
    files, folder, data = list[Path](), Path(settings.path).parent, (settings.text("data") or "").split(":")[0]
    trained_in = [folder / Path(data).name, Path(data)] if data and data.isprintable() and len(data) <= 4096 else []
    folders = [folder, *trained_in] if companions.dicts is None else [companions.dicts]
    for stack_name, stack in config.sides.items():
        side, language = LANGUAGES[stack_name], settings.text(f"{LANGUAGES[stack_name]}_lang") or ""
        name = "dict.txt" if config.encoder is None else f"dict.{language}.txt" if LANGUAGE.fullmatch(language) else ""
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if not name:
            option = flag.src_lang if side == "source" else flag.tgt_lang
            missing[side] = f"it does not say its {side}_lang, which names the {side} dictionary; give {option}"
        elif path is None:
            missing[side] = f"there is no {side} dictionary {name} in {folders[0]}; give its folder with {flag.dicts}"
        else:
            start = START if config.encoder is None and settings.on("add_bos_token") else END
            listing = path.parent / Path(settings.text("lang_dict") or "").name
            languages = read_text(listing, name=str(listing)) if listing.is_file() else None
            additions = added_subwords(settings, languages)
            own = read_dictionary(path, stack.vocabulary, codes, owner=settings.path, start=start, additions=additions)
            around = around_texts(settings, side)
            if unlisted := [name for names in around.values() for name in names if own.id_of(name) is None]:
                missing[side] = (
                    f"its task {settings.text('task')} puts {unlisted[0]} around {side} texts, which {path.name} does "
                    f"not list; {flag.src_lang} and {flag.tgt_lang} name other languages"
                )
            else:
                vocabularies[side] = _with_marks(own, around, additions)
            files.append(path)
    if companions.dicts is not None and missing:
        raise CheckpointError(f"{settings.path}: {next(iter(missing.values()))}")
    return Dictionaries(vocabularies, missing, tuple(dict.fromkeys(files)))


def _with_marks(own: Vocabulary, around: Mapping[str, tuple[str, ...]], additions: tuple[str, ...]) -> Vocabulary:
    """A vocabulary with the subwords that a task puts around texts; these and marks of languages become special."""
    ids: dict[str, Any] = {name: tuple(map(own.subwords.index, names)) for name, names in around.items()}
    special = own.special | set().union(*ids.values()) | {own.subwords.index(name) for name in additions}
    return replace(own, special=special, **ids | ({"start": ids["start"][0]} if "start" in ids else {}))


def read_dictionary(
    path: Path, size: int, codes: bytes | None, *, owner: str, start: int = END, additions: tuple[str, ...] = ()
) -> Vocabulary:
    """The vocabulary of a dict.*.txt: four special ids, a line `subword count` for each next id, then `additions`.

    CheckpointError names `owner`, the checkpoint, if these are not `size` ids.
    """
    lines = read_text(path, name=f"the dictionary {path}").split("\n")
    subwords, id_of = list(SPECIAL), {subword: number for number, subword in enumerate(SPECIAL)}
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        text = line.rstrip()
        subword, _, count = text.removesuffix(OVERWRITE).rpartition(" ")
        if not subword or not re.fullmatch(r"-?\d+", count):
            raise DataError(f"line {number} of the dictionary {path} is {line[:40]!r}; give a subword and a count")
        if subword in id_of:
            if not text.endswith(OVERWRITE):
                raise DataError(f"line {number} of the dictionary {path} repeats {subword[:40]!r}")
            subwords[id_of[subword]] += "#overwritten"  # the later id is meant wherever the subword is written
        id_of[subword] = len(subwords)
        subwords.append(subword)
    subwords += [subword for subword in additions if subword not in id_of]
    if len(subwords) != size:
        sizes = f"{len(subwords)} subwords with special ones, and the embeddings {size}"
        raise CheckpointError(f"{owner}: the dictionary {path} has {sizes}; it belongs to another checkpoint")
    special = frozenset({START})
    splitter = _splitter(codes, subwords)
    return Vocabulary(tuple(subwords), splitter, start=start, end=END, unknown=UNKNOWN, pad=PAD, special=special)


def _splitter(codes: bytes | None, subwords: list[str]) -> Splitter:
    """The splitter of text: SentencePiece for a binary file, subword-nmt for codes; else by the form of subwords."""
    if codes is None:
        return Splitter("bpe" if any(subword.endswith("@@") for subword in subwords) else "words")
    text = False
    with suppress(UnicodeDecodeError):
        codes.decode("utf-8")
        text = not codes.startswith(b"\n") and b"\0" not in codes
    with restate(DataError, "{why}"):
        return Splitter("bpe" if text else "sentencepiece", codes)


FILE = "checkpoint_best.pt"


class FairseqCheckpoint(TransformerCheckpoint):
    """A fairseq model; `FAIRSEQ.write` writes its `origin` and `options`. `missing` says why there is no dictionary."""

    origin: Origin
    options: Mapping[str, Any]
    missing: Mapping[SideName, str]

    def with_model(self, model: nn.Module) -> FairseqCheckpoint:
        """This checkpoint with another model; if that has no mixings, the file's matrices `alphas` are dropped."""
        duplicate = super().with_model(model)
        if not any(module.mixing is not None for _, _, _, module in duplicate.model.attention_modules()):
            keys = tuple(key for key in self.origin.keys if "alphas" not in key)
            extra_tensors = {key: tensor for key, tensor in self.origin.extra_tensors.items() if "alphas" not in key}
            duplicate.origin = Origin(keys, extra_tensors, is_folded=self.origin.is_folded or self.origin.of_fork)
        return duplicate

    def _side(self, name: SideName) -> Vocabulary:
        side: SideName = name if self.two_sided else "target"
        if side in self.missing:
            raise CheckpointError(f"{self.path} cannot read text: {self.missing[side]}")
        return super()._side(name)


class FairseqFormat(CheckpointFormat[FairseqCheckpoint]):
    """A file of torch.save with the weights (`model`) and the options (`args` or `cfg`) of a fairseq model."""

    name = "fairseq"
    summary = "a .pt file of fairseq or of its fork MHR, with its dict.*.txt"
    takes = frozenset({"dicts", "bpe", "src_lang", "tgt_lang"})
    converts = True

    def recognise(self, path: Path) -> bool:
        return path.is_file() and is_torch_file(path) and not is_torch_file(path, "attn.W_Q")

    def load(self, path: str, *, device: str, dtype: str, companions: Companions) -> FairseqCheckpoint:
        content = _content(Path(path))
        prefix, raw = without_prefix(read_tensors(Path(path), content["model"]))
        refuse_damaged_file(path, raw)
        settings = read_settings(path, content, companions.src_lang, companions.tgt_lang)
        state = upgrade_keys(raw)
        config = transformer_config(settings, state)
        weights = _complete_state(path, config, native_weights(path, state))
        model, file_types = placed_transformer(path, config, weights, dtype=dtype, device=device)
        dictionaries = find_dictionaries(settings, config, companions)
        checkpoint = FairseqCheckpoint(
            path=path,
            format=self.name,
            model=model,
            model_type=settings.arch,
            digest=file_digest([Path(path)]),
            source=dictionaries.vocabularies.get("source"),
            target=dictionaries.vocabularies.get("target"),
            file_types=file_types,
        )
        checkpoint.prefix, checkpoint.writes = prefix, settings.text("target_lang")
        checkpoint.origin, checkpoint.options = origin(raw), _writable_options(settings, config)
        checkpoint.missing, checkpoint.read_files = dictionaries.missing, dictionaries.files
        return checkpoint

    def write(self, checkpoint: FairseqCheckpoint, folder: Path) -> SavedFiles:
        """Write a file with the original's name, keys, order and types, without training state, and dictionaries."""
        path = folder / Path(checkpoint.path).name
        state = native_state(checkpoint.model, checkpoint.file_types)
        state |= {tied: state[original] for tied, original in checkpoint.model.tied().items()}
        _write_file(path, checkpoint.options, fairseq_weights(state, checkpoint.origin))
        for file in checkpoint.read_files:
            shutil.copyfile(file, folder / file.name)
        of_fork, notes = checkpoint.origin.of_fork, tuple[str, ...]()
        if checkpoint.origin.is_folded:
            notes = (
                "the matrices that mix heads are folded into the output projections: no file of the fork any more",
            )
        if _has_removed_heads(checkpoint):
            notes = (*notes, "fairseq itself has layers with one number of heads: open it with headscope")
            return SavedFiles(path, self.name, notes, ("headscope",), notes)
        return SavedFiles(path, self.name, notes, ("headscope", _OPENS[of_fork]), (_LIMITS[of_fork], *notes))

    def convert(self, checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> SavedFiles:
        if isinstance(checkpoint, FairseqCheckpoint):
            if _has_removed_heads(checkpoint):
                advice = "`headscope prune remove --export masked` leaves zeros in their place"
                raise CheckpointError(f"{checkpoint.path}: fairseq has one number of heads for all layers; {advice}")
            files = self.write(checkpoint, folder)
            copy = self.load(str(files.path), device="cpu", dtype="float64", companions=Companions())
            return replace(files, architecture=checkpoint.model_type, logits=probe_logits(copy.model, probe))
        written_model = fairseq_model(checkpoint)
        _write_file(folder / FILE, written_model.options, written_model.weights)
        for name, content in vocabulary_files(checkpoint).items():
            (folder / name).write_bytes(content)
        copy = self.load(str(folder / FILE), device="cpu", dtype="float64", companions=Companions())
        logits = logits_in_our_order(copy.model, written_model, probe)
        opens, limits = ("headscope", _OPENS[written_model.of_fork]), (_LIMITS[written_model.of_fork],)
        arch = written_model.options["arch"]
        return SavedFiles(folder / FILE, self.name, written_model.notes, opens, limits, arch, logits)


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
    """Write options and weights, with as much of a trainer's state as fairseq looks up when it opens a file."""
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


def _has_removed_heads(checkpoint: FairseqCheckpoint) -> bool:
    config = checkpoint.model.config
    full = {stack.d_model // stack.d_head for stack in config.stacks}
    return bool(set(checkpoint.layout.values()) - full)


FAIRSEQ = FairseqFormat()
FORMATS.register("fairseq", FAIRSEQ, where=__name__)


def _content(path: Path) -> Mapping[str, Any]:
    content = read_torch(path)
    entries: Mapping[str, Any] = content if isinstance(content, dict) else {}
    weights = entries.get("model")
    has_names = isinstance(weights, dict) and all(isinstance(key, str) for key in weights)
    if entries.get("args") is entries.get("cfg") is None or not has_names:
        raise CheckpointError(
            f"{path} is a torch file that fairseq did not write: it has the entries "
            f"{shortlist([repr(key)[:40] for key in entries])}, and files of fairseq `model` with `args` or `cfg`"
        )
    return entries


def _complete_state(path: str, config: TransformerConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    for side, stack in config.sides.items():
        own = ("self_attention", stack.self_mixing, stack.self_heads)
        for site, mixing, heads in (own, ("cross_attention", stack.cross_mixing, stack.cross_heads)):
            for layer in range(len(heads) if mixing else 0):
                key = f"{side}.layers.{layer}.{site}"
                like = state.get(f"{key}.output.weight", torch.empty(0))
                state.setdefault(f"{key}.mixing.alpha", torch.eye(heads[layer], dtype=like.dtype))
    if "output.weight" not in state and not config.tie_output:
        raise CheckpointError(f"{path}: there is no decoder.output_projection.weight, and the output is not tied")
    return state


def _writable_options(settings: Settings, config: TransformerConfig) -> dict[str, Any]:
    """Options to write again: numbers, texts, flags and lists of these, and the number of heads that fill a layer."""
    simple = (str, int, float, type(None))
    options: dict[str, Any] = {
        name: value
        for name, value in settings.values.items()
        if isinstance(value, simple)
        or (isinstance(value, list) and len(value) < 256 and all(isinstance(part, simple) for part in value))
    }
    for side, stack in config.sides.items():
        if options.get(name := f"{side}_attention_heads") is None:
            options[name] = stack.d_model // stack.d_head
    return {**options, "arch": settings.arch}
