"""The options of `headscope train` that all variants share, the position within a run, and its learning rate.

Imports no torch (see `variant`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config import option
from headscope.config.inputs import BleuOption
from headscope.config.option import BEAM, SEED
from headscope.errors import ConfigError, flag, flags, raise_first

data_option, text_option, model_option, optimisation_option, run_option, machine_option = (
    partial(option, panel=panel)
    for panel in ("Data", "Text to ids", "Model", "Optimisation", "Validation and checkpoints", "Machine")
)
"""`option` under the heading of that name."""

Normalise = Literal["none", "lowercase", "moses", "moses-lowercase"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BleuOption):
    """The options that all variants share; the help text of each explains it."""

    out: Path = run_option(Path("run"), "Directory of the run.", metavar="DIR", is_output=True, common=True)
    preset: str | None = model_option(None, "tiny or small: defaults of model and recipe.", common=True)

    source: Path | None = data_option(None, "Training text, one sentence a line (.gz too).", common=True)
    target: Path | None = data_option(None, "Its translation, line by line.", common=True)
    valid_source: Path | None = data_option(None, "Validation text.", common=True)
    valid_target: Path | None = data_option(None, "Its translation.", common=True)
    kind: Literal["translation", "lm"] = data_option(
        "translation", "translation, or lm: a decoder alone, trained on --source.", common=True
    )
    block: int | None = data_option(
        None, "lm: cut the text into blocks of N subwords; default: lines.", minimum=1, needs="kind=lm", flagless=True
    )
    max_sentences: int | None = data_option(None, "Use only the first N lines of the training text.", minimum=1)
    fraction: float = data_option(
        1.0, "Share of the training text, drawn by --seed; a smaller one is part of a larger.", above=0, maximum=1
    )
    max_length: int = data_option(
        512, "Subwords a side may have, the closing one included; longer sentences are left out and counted.", minimum=2
    )

    tokenizer: Path | None = text_option(None, "A SentencePiece model to use instead of learning one.")
    tokenizer_kind: Literal["bpe", "unigram"] = text_option("bpe", "bpe or unigram (SentencePiece).", flagless=True)
    vocab_size: int = text_option(8000, "Subwords to learn, the four special ones included.", minimum=5, maximum=2**22)
    vocabulary: Literal["joint", "separate"] = text_option(
        "joint", "joint: both sides share subwords and embeddings; or separate."
    )
    normalise: Normalise = text_option(
        "none", "none, lowercase, moses or moses-lowercase (punctuation, tokens; docs/training.md)."
    )
    source_lang: str = text_option(
        "en", "Language of the source, for moses.", needs="normalise=moses|moses-lowercase", flagless=True
    )
    target_lang: str = text_option(
        "de", "Language of the target, for moses.", needs="normalise=moses|moses-lowercase", flagless=True
    )

    init: str | None = model_option(
        None, "Start from this checkpoint: its weights, sizes and vocabularies.", metavar="CKPT", common=True
    )
    dicts: Path | None = model_option(
        None, "Dictionaries of --init, where they are not beside it.", metavar="DIR", needs="init"
    )
    bpe: Path | None = model_option(
        None, "BPE merges that split the text for --init; default: it is split already.", metavar="CODES", needs="init"
    )
    encoder_layers: int = model_option(3, "Layers of the encoder.", minimum=1, maximum=1000)
    decoder_layers: int = model_option(3, "Layers of the decoder.", minimum=1, maximum=1000)
    d_model: int = model_option(128, "Width of the model.", minimum=1, maximum=2**18)
    d_ffn: int = model_option(256, "Width of the feed-forward layers.", minimum=1, maximum=2**18)
    heads: int = model_option(8, "Heads of every attention module.", minimum=1, maximum=1024)
    norm: Literal["pre", "post"] = model_option("post", "post or pre: where layers normalise.")
    activation: Literal["relu", "gelu", "gelu-tanh", "silu", "tanh", "linear"] = model_option(
        "relu", "relu, gelu, gelu-tanh, silu, tanh or linear."
    )
    positions: Literal["sinusoidal", "learned", "none"] = model_option("sinusoidal", "sinusoidal, learned or none.")
    initial: Literal["fairseq", "glorot"] = model_option(
        "fairseq", "How new weights are drawn: as fairseq since 0.10, or glorot (docs/training.md).", flagless=True
    )
    tie_output: bool = model_option(True, "The output projection is the decoder's embeddings.")
    dropout: float = model_option(0.1, "On embeddings and the output of every sublayer.", minimum=0, below=1)
    attention_dropout: float = model_option(0.0, "On attention weights.", minimum=0, below=1, flagless=True)
    activation_dropout: float = model_option(0.0, "Inside feed-forward layers.", minimum=0, below=1)
    context_dropout: float = model_option(
        0.0, "On contexts, before the output projection.", minimum=0, below=1, flagless=True
    )

    lr: float = optimisation_option(0.002, "Highest learning rate.", above=0, common=True)
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = optimisation_option(
        "inverse-sqrt", "inverse-sqrt, cosine (to --min-lr at the end of the run) or constant."
    )
    warmup: int = optimisation_option(1000, "Updates during which the learning rate rises from --warmup-lr.", minimum=0)
    warmup_lr: float = optimisation_option(
        1e-7, "Where the warm-up begins; the first update is one step of it above.", minimum=0
    )
    min_lr: float = optimisation_option(
        0.0, "Where a cosine schedule ends.", minimum=0, needs="schedule=cosine", flagless=True
    )
    betas: tuple[float, ...] = optimisation_option((0.9, 0.98), "Adam's two rates.", minimum=0, below=1)
    epsilon: float = optimisation_option(1e-8, "Adam's epsilon.", above=0)
    weight_decay: float = optimisation_option(0.0, "Decoupled weight decay.", minimum=0)
    clip: float = optimisation_option(0.0, "Longest norm of the gradient; 0: no limit.", minimum=0)
    label_smoothing: float = optimisation_option(
        0.1, "Share of probability spread over all subwords.", minimum=0, below=1
    )
    max_tokens: int = optimisation_option(
        4096, "Positions in a batch, the longer side, padding included; per forward pass.", minimum=1
    )
    accumulate: int = optimisation_option(1, "Forward passes an update, in each process.", minimum=1, maximum=65_536)
    updates: int | None = optimisation_option(None, "End after N updates.", minimum=1, common=True)
    max_epochs: int | None = optimisation_option(
        None, "End after N epochs; default: 20, or no limit with --updates.", minimum=1, common=True
    )

    validate_every: int | None = run_option(
        None, "Validate and write checkpoints every N updates; default: after every epoch.", minimum=1
    )
    bleu_every: int = run_option(1, "BLEU at every N-th validation; 0: never.", minimum=0)
    bleu_sentences: int | None = run_option(
        None, "Translate only the first N validation sentences.", minimum=1, needs="valid_source", flagless=True
    )
    beam: int = run_option(5, "Beam of validation, and of the checkpoints.", minimum=1, maximum=BEAM)
    best_by: Literal["loss", "bleu"] = run_option(
        "loss", "loss or bleu: what the best checkpoint has.", needs="valid_source"
    )
    patience: int | None = run_option(
        None, "End after N validations without a better one.", minimum=1, needs="valid_source"
    )
    average: int = run_option(
        0, "Average the weights of N checkpoints into DIR/averaged; 0: none.", minimum=0, maximum=1000
    )
    average_of: Literal["last", "best"] = run_option(
        "last", "last or best: which checkpoints.", needs="average", flagless=True
    )
    save_every: int | None = run_option(
        None, "Save the state that --resume needs every N updates too, not after epochs alone.", minimum=1
    )
    log_every: int = run_option(50, "Updates between lines of metrics.csv.", minimum=1)
    save_confidence: Literal["none", "base", "advanced", "pairwise"] = run_option(
        "none", "Write DIR/confs/epoch-N.pkl after every whole epoch: the MHR program's confidence of heads by batch."
    )
    tensorboard: bool = run_option(False, "Write event files for TensorBoard (needs the package tensorboard).")

    seed: int = machine_option(1, "Seed of weights, dropout and data order.", minimum=0, maximum=SEED, common=True)
    device: str = machine_option("auto", "auto, cpu, cuda or mps.", common=True)
    precision: Literal["float32", "bf16", "fp16", "float64"] = machine_option(
        "float32", "float32, bf16 (autocast), fp16 (autocast, on a GPU only), or float64."
    )
    threads: int | None = machine_option(None, "CPU threads; default: torch's.", minimum=1, maximum=1024, flagless=True)
    compile: bool = machine_option(False, "torch.compile the model.", flagless=True)

    def __post_init__(self) -> None:
        names = ("vocab_size", "tokenizer_kind") if self.tokenizer else ()
        own_subwords = [flag(name) for name in names if getattr(self, name) != default_of(self, name)]
        targets = [flag(name) for name in ("target", "valid_target") if getattr(self, name) is not None]
        divisors = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
        no_width = f"{flag.d_model} {self.d_model} is not divisible by {flag.heads} {self.heads}; take {divisors}"
        is_lm, by_bleu, has_pair, text = self.kind == "lm", self.best_by == "bleu", len(self.betas) == 2, self.source
        lacks_target = not is_lm and self.target is None
        lacks_side = not is_lm and (self.valid_source is None) is not (self.valid_target is None)
        lacks_end = self.schedule == "cosine" and self.updates is None and self.max_epochs is None
        lacks_weights = self.save_confidence != "none" and self.compile
        has_tokens = self.bleu_tokenize is not None and self.normalise.startswith("moses")
        skips_bleu = by_bleu and self.bleu_every != 1
        problems = {
            f"{flag.tokenizer} brings its own subwords; leave out {' and '.join(own_subwords)}": own_subwords,
            f"no text: give {flag.source} FILE, a sentence a line, and {flag.target} FILE to translate": not text,
            f"{flag.kind} lm has one text only; leave out {' and '.join(targets)}": is_lm and targets,
            f"{flag.best_by} bleu: a language model translates nothing; take {flag.best_by} loss": is_lm and by_bleu,
            f"{flag.kind} translation needs {flag.target} FILE; for a language model give {flag.kind} lm": lacks_target,
            f"validation needs both {flag.valid_source} and {flag.valid_target}, or neither": lacks_side,
            no_width: self.d_model % self.heads,
            f"{flag('schedule', 'cosine')} needs an end: give {flag.updates} or {flag.max_epochs}": lacks_end,
            f"{flag.betas} {self.betas} must be two numbers from 0 to less than 1, such as 0.9,0.98": not has_pair,
            f"{flag.save_confidence} reads weights that {flag.compile} hides; leave one out": lacks_weights,
            f"{flag.bleu_tokenize} is for detokenised text; leave it out, or {flag.normalise}": has_tokens,
            f"{flag.best_by} bleu needs {flag.bleu_every} 1, and it is {self.bleu_every}": skips_bleu,
        }
        raise_first(ConfigError, problems)

    @property
    def epochs(self) -> int | None:
        """The number of epochs after which the run ends; None if only updates end it."""
        return 20 if self.max_epochs is None and self.updates is None else self.max_epochs


def default_of(config: TrainConfig, name: str) -> Any:
    """The default of an option, by the preset of a run if that has one."""
    return preset(config.preset).get(name, next(entry.default for entry in fields(config) if entry.name == name))


def remarks_on(config: TrainConfig) -> list[str]:
    """Remarks on options without effect here, and on a run without validation."""
    remarks = []
    if config.kind == "lm" and config.encoder_layers != default_of(config, "encoder_layers"):
        remarks.append(f"a language model has a decoder only: {flag.encoder_layers} has no effect")
    if config.valid_source is None:
        options_missing = flags("valid_source", *["valid_target"] * (config.kind == "translation"))
        remarks.append(
            f"without validation text the checkpoint best is the last one; give {options_missing} to keep the best"
        )
    return remarks


TINY: Mapping[str, Any] = {
    **{"encoder_layers": 4, "decoder_layers": 4, "d_model": 128, "d_ffn": 256, "heads": 4, "norm": "post"},
    **{"vocab_size": 10000, "dropout": 0.3, "label_smoothing": 0.1},
    **{"lr": 0.005, "warmup": 2000, "max_tokens": 4096, "accumulate": 2, "updates": 8000, "average": 10},
}
SMALL: Mapping[str, Any] = {
    **{"encoder_layers": 3, "decoder_layers": 3, "d_model": 128, "d_ffn": 256, "heads": 8, "norm": "post"}
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"tiny": TINY, "small": SMALL}


def preset(name: Any) -> Mapping[str, Any]:
    """The values of a preset, by the names of fields; ConfigError for one that does not exist."""
    if name is not None and str(name) not in PRESETS:
        raise ConfigError(f"{flag.preset} {name!r} is not known; available: {', '.join(PRESETS)}")
    return {} if name is None else PRESETS[str(name)]


@dataclass(frozen=True)
class TrainingPosition:
    """The position in training. Hooks of the very first update see epoch 1, update 0, sentences 0.

    `epoch` counts from 1; `update` counts optimizer updates so far, `update_in_epoch` those of this epoch; `sentences`
    and `tokens` (target tokens with the end) are what those updates read, over all processes. Schedules follow the
    limits that the run began with, `updates_planned` and `epochs_planned`; None is no limit, and one is always known.
    A run that is resumed with other limits (`TrainConfig.updates`, `epochs`) ends by these, its plan unchanged.
    """

    epoch: int = 1
    update: int = 0
    update_in_epoch: int = 0
    sentences: int = 0
    tokens: int = 0
    updates_planned: int | None = None
    epochs_planned: int | None = None
    updates_per_epoch: int | None = None

    @property
    def last_epoch(self) -> int:
        """The last epoch with an update, 0 before the first update."""
        return self.epoch if self.update_in_epoch else self.epoch - 1

    @property
    def fraction(self) -> float:
        """The share of the planned run that is over, 0 to 1, by the nearer limit; 1 beyond its end."""
        shares = [0.0]
        if self.updates_planned:
            shares.append(self.update / self.updates_planned)
        if self.epochs_planned:
            share = self.update_in_epoch / self.updates_per_epoch if self.updates_per_epoch else 0.0
            shares.append((self.epoch - 1 + share) / self.epochs_planned)
        return min(max(shares), 1.0)

    @property
    def planned_length(self) -> int | None:
        """Updates of the planned run, by the nearer limit; None while the updates of an epoch are not known."""
        return updates_until_end(self.updates_planned, self.epochs_planned, self.updates_per_epoch)


def updates_until_end(updates: int | None, epochs: int | None, updates_per_epoch: int | None) -> int | None:
    """Updates until the nearer of two limits; None if neither is known in updates."""
    by_epochs = epochs * updates_per_epoch if epochs and updates_per_epoch else None
    limits = [limit for limit in (updates, by_epochs) if limit]
    return min(limits) if limits else None


Schedule = Callable[[TrainConfig, TrainingPosition], float]


def rate(config: TrainConfig, position: TrainingPosition) -> float:
    """The learning rate of the next update: from `warmup_lr` straight to `lr`, then by the schedule.

    The first update is one step above `warmup_lr`, and update number `warmup` has `lr`.
    """
    number = position.update + 1
    if number <= config.warmup:
        return config.warmup_lr + (config.lr - config.warmup_lr) * number / config.warmup
    return SCHEDULES[config.schedule](config, position)


def inverse_sqrt(config: TrainConfig, position: TrainingPosition) -> float:
    """lr · √(warmup / update) (Vaswani et al. 2017, §5.3, with `lr` as the peak)."""
    return config.lr * math.sqrt(max(config.warmup, 1) / (position.update + 1))


def cosine(config: TrainConfig, position: TrainingPosition) -> float:
    """Half a cosine from lr after the warm-up to min_lr at the planned end (Loshchilov & Hutter 2017, no restarts).

    The rate stays at min_lr in a run that is resumed beyond that end.
    """
    length = max((position.planned_length or math.inf) - config.warmup, 1)
    progress = min((position.update + 1 - config.warmup) / length, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES: Mapping[str, Schedule] = {
    "inverse-sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": lambda config, position: config.lr,
}
