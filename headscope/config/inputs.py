"""Options that several commands share: which checkpoint, which text, how it is read. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config.option import BEAM, POWER, RATIO, RESAMPLES, SEED, STEPS, WHOLE, TextLines, option

DATA, MODEL, OUTPUT, SEARCH = "Data", "Model and speed", "Output", "Search"
data_option, model_option, output_option, search_option = (
    partial(option, panel=panel) for panel in (DATA, MODEL, OUTPUT, SEARCH)
)
"""`option` under the heading of that name."""


@dataclass(frozen=True, kw_only=True)
class Companions:
    """What a checkpoint needs and does not hold itself: files beside it or elsewhere, languages to read and write."""

    dicts: Path | None = model_option(
        None, "Dictionaries of fairseq and story-of-heads files; default: beside the checkpoint.", metavar="DIR"
    )
    hp: Path | None = model_option(None, "Hyper-parameters of a story-of-heads file.")
    bpe: Path | None = model_option(
        None, "BPE merges or SentencePiece model that split text; default: it is split already.", metavar="CODES"
    )

    src_lang: str | None = model_option(
        None, "Language that it reads (NLLB: eng_Latn; mBART: en_XX) or hears (Whisper: en).", metavar="LANGUAGE"
    )
    tgt_lang: str | None = model_option(
        None, "Language that it writes; default: what its files say.", metavar="LANGUAGE"
    )
    task: Literal["transcribe", "translate"] | None = model_option(
        None, "What a Whisper writes: a transcript, or an English translation; default: what its files say."
    )

    def companion_values(self) -> dict[str, Any]:
        """The companions that were given, by name."""
        return {name: getattr(self, name) for name in COMPANIONS if getattr(self, name) is not None}


COMPANIONS = tuple(entry.name for entry in fields(Companions))
"""Names of the companions."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Companions):
    """The checkpoint that a command opens, and the devices it runs on. A `device_map` keeps the stored dtypes."""

    checkpoint: str = option(
        help="Checkpoint: a file, a directory or a hub id (owner/name).", metavar="CKPT", argument=True, identity=False
    )
    device: str = model_option("auto", "auto, cpu, cuda or mps.", identity=False, common=True)
    dtype: str = model_option("auto", "auto (as stored; float32 on a CPU), float32, float64, bfloat16 or float16.")
    device_map: str | None = model_option(
        None, "Spread a large model over devices: auto, or a JSON file of modules.", metavar="auto|FILE", identity=False
    )
    format: str | None = model_option(None, "Checkpoint format; default: found from content.")


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The text of a command."""

    source: TextLines | None = data_option(None, "Text, one sentence a line (.gz too).", common=True)
    target: TextLines | None = data_option(
        None, "Translations of the lines, for models with an encoder and a decoder.", common=True, needs="source|parse"
    )
    source2: TextLines | None = data_option(
        None, "Encoders: the other text of every pair, line by line.", needs="source|parse", flagless=True
    )
    pairs: bool = data_option(
        False, "Every line of --source is a pair of texts with a tab between.", needs="source|valid_source|parse"
    )
    labels: TextLines | None = data_option(
        None, "Classifiers: the class of every line; taggers: CoNLL columns, the text without --source.", common=True
    )


@dataclass(frozen=True, kw_only=True)
class ValidatedTextFiles(TextFiles):
    """A text, and a validation text with the same kinds of files."""

    valid_source: TextLines | None = data_option(
        None, "Text to measure the result on; default: the start of --source.", common=True
    )
    valid_target: TextLines | None = data_option(None, "Its translation.", common=True, needs="valid_source")
    valid_source2: TextLines | None = data_option(
        None, "The other text of its pairs, as --source2.", needs="valid_source", flagless=True
    )
    valid_labels: TextLines | None = data_option(None, "Its classes or tags, as --labels.", flagless=True)

    @property
    def has_text(self) -> bool:
        """Whether a text was given: lines, or words in CoNLL columns."""
        return self.source is not None or self.labels is not None

    @property
    def valid_text(self) -> TextFiles | None:
        """The validation text; None if it was not given."""
        if self.valid_source is None and self.valid_labels is None:
            return None
        files = {name: getattr(self, f"valid_{name}") for name in ("source", "target", "source2", "labels")}
        return TextFiles(**files, pairs=self.pairs)


@dataclass(frozen=True, kw_only=True)
class MaskedHeads:
    """Heads that are off while the model runs."""

    mask: str | None = model_option(
        None, "Heads to switch off: 1.3,2.*, cross.0.*, or a file with a name a line.", metavar="LIST", common=True
    )


batch_tokens_option = partial(
    model_option,
    None,
    "Token positions in a batch; auto: 2048 on a CPU, on an accelerator as many as its memory allows (updates that "
    "learn have 2048 there too).",
    metavar="N|auto",
    minimum=1,
    maximum=WHOLE,
    unset="auto",
)
"""The option `batch_tokens`; commands whose text is optional declare that it `needs` that text."""


@dataclass(frozen=True, kw_only=True)
class BatchTokens:
    """The size of batches."""

    batch_tokens: int | None = batch_tokens_option()


@dataclass(frozen=True, kw_only=True)
class TextOptions(MaskedHeads, BatchTokens):
    """Options of reading a text to measure on it, and of the confidence intervals."""

    max_length: int | None = data_option(
        None, "Subwords a sentence may have; default 512 or the model's limit.", minimum=2
    )
    long: Literal["truncate", "refuse"] = data_option("truncate", "What happens to longer sentences.", flagless=True)
    max_sentences: int | None = data_option(None, "Use only the first N lines.", minimum=1, maximum=WHOLE, common=True)
    bootstrap: int = output_option(1000, "Resamples for the 95 % intervals.", minimum=2, maximum=RESAMPLES)
    seed: int = model_option(1, "Seed of the bootstrap and of all that is drawn.", minimum=0, maximum=SEED)


BleuTokenizer = Literal[
    "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "spm", "flores101", "flores200", "spBLEU-1K", "none"
]


@dataclass(frozen=True, kw_only=True)
class BleuOption:
    """BLEU's tokenizer."""

    bleu_tokenize: BleuTokenizer | None = search_option(
        None, "sacreBLEU's tokenizer; default: that of the target language, where it is known, else 13a.", flagless=True
    )


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of beam search, and the choice of experts; None means the checkpoint's own value."""

    beam: int | None = search_option(None, "Beam; default: the checkpoint's own.", minimum=1, maximum=BEAM, common=True)
    lenpen: float | None = search_option(None, "Power of the length penalty; default: the checkpoint's.", maximum=POWER)
    max_len_a: float | None = search_option(
        None, "n source tokens give at most A · n + B; default: the checkpoint's.", minimum=0, maximum=RATIO
    )
    max_len_b: int | None = search_option(None, "B in A · n + B; default: the checkpoint's.", minimum=0, maximum=STEPS)
    expert: str | None = model_option(
        None, "Mixtures of experts: one alone a layer: top (most responsible), random, or N.", metavar="top|random|N"
    )
