"""Whisper-like checkpoints: a line of the source names a recording, or a `.npy` file with its features.

Each position of the encoder gets an id of its own after the vocabulary; positions after the recording are special.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, GenerationMixin
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from headscope.config.commands import TranslateOptions
from headscope.data.encoded import Batch, Encoded, Side, SideName, pad_side
from headscope.errors import CheckpointError, ConfigError, DataError, flag, one_line, shortlist
from headscope.files.archives import native_numbers
from headscope.formats.base import POSITION, Checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint, TokenIds
from headscope.formats.huggingface.companions.languages import Prompts
from headscope.heads import HeadId
from headscope.model.interface import features_shape
from headscope.model.removal_plan import alignment_heads
from headscope.model.taps import capture

SILENCE = -1.5  # Whisper's feature of silence: (log10(1e-10) + 4) / 4
FILTER = 7  # positions of the median filter, as in transformers


class Word(NamedTuple):
    """A word of a transcript, and its begin and end in the recording, in seconds."""

    text: str
    begin: float
    end: float


class SpeechCheckpoint(HuggingFaceCheckpoint):
    """A speech recognition model; `encode` takes names of recordings on the source side."""

    default_length = Checkpoint.default_length

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.limit: int = int(self.config.max_target_positions)
        self._recordings: list[str] = []
        self._features = lru_cache(maxsize=64)(self._read)

    @cached_property
    def _extractor(self) -> Any:
        try:
            return AutoFeatureExtractor.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError) as error:
            advice = "put it there, or give features as .npy files"
            raise CheckpointError(f"{self.path} has no preprocessor_config.json; {advice}") from error

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        if side == "source":
            return [self._positions(name) for name in texts]
        encodings = []
        for ids, uncut, _ in self._transcripts(texts, limit):
            special = [number in self._special["target"] for number in ids[:-1]]
            encodings.append(Encoded(list(ids[:-1]), [True, *special[1:]], len(uncut) - len(ids)))
        return encodings

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """The ids of a transcript after its start; they include language and task, as in transformers' own loss."""
        rows = self._transcripts(texts, limit)
        return [row.ids[1:] if len(row.uncut) == len(row.ids) else self._without_end(row.ids[1:]) for row in rows]

    def _transcripts(self, texts: Sequence[str], limit: int) -> list[TokenIds]:
        """Ids of transcripts with start and end; CheckpointError if nothing names the language of the recordings."""
        prompts = Prompts(self.model, self._tokenizer(), self.path)
        if prompts.languages and prompts.spoken() is None:
            languages = f"{len(prompts.languages)} languages ({shortlist([*prompts.languages])})"
            advice = f"give {flag.src_lang} LANGUAGE, {flag.task} translate for English translations"
            raise CheckpointError(f"{self.path} knows {languages} and not which the recordings are in; {advice}")
        return self._ids({"text_target": list(texts)}, limit + 1)

    def _languages(self) -> dict[str, Any] | None:
        prompts = Prompts(self.model, self.tokenizer, self.path)
        if not (n_languages := len(prompts.languages)):
            return None
        spoken = prompts.spoken()
        return {"reads": spoken and spoken.language, "writes": spoken and spoken.description, "known": n_languages}

    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        spoken = Prompts(self.model, self.tokenizer, self.path).spoken()
        return {**({} if spoken is None else spoken._asdict()), **super().search_facts(options)}

    def _generate(self, source: Side, **settings: Any) -> Tensor:
        """Generate from the tokenizer's language and task; Whisper's own `generate` would cut recordings."""
        begin = torch.tensor([self._begin], device=source.ids.device).expand(len(source.ids), -1)
        return GenerationMixin.generate(self.model, **self._source(source), decoder_input_ids=begin, **settings)

    @cached_property
    def _begin(self) -> Sequence[int]:
        return self.encode([""], side="target", limit=self.limit)[0].ids

    def _prefix_length(self) -> int:
        return len(self._begin)

    def _positions(self, name: str) -> Encoded:
        _, length = self._features(name)
        count = int(self.config.max_source_positions)
        if name not in self._recordings:
            self._recordings.append(name)
        first = self.vocabulary + self._recordings.index(name) * count
        return Encoded(list(range(first, first + count)), [position >= length for position in range(count)])

    def _source(self, source: Side) -> dict[str, Tensor]:  # type: ignore[override]  # it needs the recordings
        """Features [b bins frames] of the recordings that ids of positions belong to; silence for ids of probes."""
        numbers = (source.ids[:, 0] - self.vocabulary) // int(self.config.max_source_positions)
        silence = torch.full(features_shape(self.config)[1:], SILENCE)
        rows = [silence if number < 0 else self._features(self._recordings[number])[0] for number in numbers.tolist()]
        return {"input_features": torch.stack(rows).to(self.device, self.dtype)}

    def _read(self, name: str) -> tuple[Tensor, int]:
        bins, frames = int(self.config.num_mel_bins), 2 * int(self.config.max_source_positions)
        try:
            rows = np.load(name, allow_pickle=False) if name.endswith(".npy") else None
        except (OSError, ValueError) as error:
            raise DataError(f"{name} cannot be read as features: {one_line(error)[:200]}") from error
        rows = None if rows is None else native_numbers(rows)
        if rows is not None and rows.dtype.kind not in "fiu":
            raise DataError(f"{name} holds {rows.dtype} and no features; save them as float32")
        rows, length = self._extract_features(name) if rows is None else (rows, rows.shape[-1])
        if rows.shape[:-1] != (bins,) or not 0 < length <= frames:
            raise DataError(
                f"{name} has features {list(rows.shape)} ({length} frames); this model reads [{bins}, 1 to {frames}], "
                f"which are {frames * POSITION / 2:.0f} seconds: cut longer recordings"
            )
        features = np.full((bins, frames), rows.min(), dtype=np.float32)
        features[:, : rows.shape[1]] = rows
        return torch.from_numpy(features), -(-length // 2)

    def _extract_features(self, name: str) -> tuple[Any, int]:
        if not Path(name).is_file():
            raise DataError(f"there is no file {name[:200]}; each line of the source names a recording")
        try:
            soundfile = importlib.import_module("soundfile")
        except ModuleNotFoundError:
            advice = 'pip install "headscope[audio]", or give features as .npy files'
            raise ConfigError(f"{name}: reading sound needs soundfile; {advice}") from None
        try:
            sound, rate = soundfile.read(name, dtype="float32", always_2d=True)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{name} cannot be read as sound: {one_line(error)[:200]}") from error
        extractor = self._extractor
        if rate != extractor.sampling_rate:
            raise DataError(f"{name} has {rate} samples a second; resample it to {extractor.sampling_rate}")
        features = extractor(sound.mean(axis=1), sampling_rate=rate, return_tensors="np")["input_features"][0]
        return features, -(-len(sound) // extractor.hop_length)

    def spans(self, text: str, ids: Sequence[int], *, side: SideName) -> list[tuple[int, int] | None] | None:
        return [None] * len(ids) if side == "source" else super().spans(text, ids, side=side)

    def subwords(self, ids: Sequence[int], *, side: SideName) -> list[str]:
        if side == "target":
            return super().subwords(ids, side=side)
        count, n_subwords = int(self.config.max_source_positions), self.vocabulary
        behind = {number: f"{(number - n_subwords) % count * POSITION:.2f}s" for number in ids if number >= n_subwords}
        return [behind.get(number) or super(SpeechCheckpoint, self).subwords([number], side=side)[0] for number in ids]

    def word_times(self, recording: str, transcript: str, heads: Sequence[HeadId] = ()) -> list[Word]:
        """The times of the words of a transcript, from the weights of `heads` (default: the alignment heads)."""
        heads_used = list(heads) or alignment_heads(self.model)
        if not heads_used:
            advice = "`headscope analyze --write-alignment` writes them"
            raise ConfigError(f"{self.path} names no alignment heads; {advice}")
        source = pad_side(self.encode([recording], side="source", limit=self.limit))
        target = pad_side(self.encode([transcript], side="target", limit=self.limit))
        with capture(self.model) as capture_of_pass, torch.no_grad():
            self.forward(Batch(torch.arange(1), 0, source.to(self.device), target.to(self.device)))
        ids = [*target.ids[0].tolist(), self.labels([transcript], limit=self.limit)[0][-1]]
        spans = super().spans(transcript, ids, side="target")
        if spans is None:
            raise DataError(f"subwords of {transcript[:60]!r} cannot be located")
        spoken_rows = [
            row for row, number in enumerate(ids[1:]) if number not in self._special["target"] or row == len(ids) - 2
        ]
        is_spoken = (source.real & ~source.special)[0]
        weights = torch.stack(
            [capture_of_pass[head]["weights"][0][spoken_rows][:, is_spoken] for head in heads_used]
        )  # [n t s]
        return _words(transcript, [spans[row + 1] for row in spoken_rows], token_times(weights))


def token_times(weights: Tensor) -> list[float]:
    """The seconds [t + 1] at which each of t tokens begins and the last one ends, from weights [n t s] of n heads.

    By dynamic time warping of mean weights, normalised over tokens, as in transformers' Whisper
    (`_extract_token_timestamps`); the weights at a token predict the next one.
    """
    weights = weights.float()
    spread = weights.std(dim=-2, keepdim=True, unbiased=False).clamp(min=1e-9)
    normal = _median_filter((weights - weights.mean(dim=-2, keepdim=True)) / spread, FILTER)  # [n t s]
    tokens, positions = _dynamic_time_warping(-normal.mean(dim=0).double().cpu().numpy())
    starts = [int(positions[np.argmax(tokens == token)]) for token in range(weights.shape[1])]
    return [position * POSITION for position in (*starts, weights.shape[2])]


def _words(text: str, spans: Sequence[tuple[int, int] | None], times: Sequence[float]) -> list[Word]:
    """Join subwords, given their spans in a text and their times (each lasts until the next), to words."""
    words: list[tuple[int, int, float, float]] = []
    for span, begin, end in zip(spans, times[:-1], times[1:], strict=True):
        if span is None or not text[slice(*span)].strip():
            continue
        if words and not any(letter.isspace() for letter in text[words[-1][0] : span[1]].strip()):
            words[-1] = (words[-1][0], span[1], words[-1][2], end)
        else:
            words.append((*span, begin, end))
    return [Word(text[first:last].strip(), begin, end) for first, last, begin, end in words]
