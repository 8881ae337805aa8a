"""The options of `headscope train` that all variants share; imports no torch (see `variant`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from headscope.config import flag, option
from headscope.config.inputs import BleuOption
from headscope.config.option import BEAM, SEED
from headscope.errors import ConfigError

DATA, TEXT, MODEL, OPTIMISATION, RUN, MACHINE = (
    "Data",
    "Text to ids",
    "Model",
    "Optimisation",
    "Validation and checkpoints",
    "Machine",
)

Normalise = Literal["none", "lowercase", "moses", "moses-lowercase"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BleuOption):
    """The shared options; those of the variant are in its own class. Help texts say what each means."""

    out: Path = option(Path("run"), "Directory of the run.", metavar="DIR", panel=RUN, written=True, common=True)
    preset: str | None = option(None, "tiny or small: defaults of model and recipe.", panel=MODEL, common=True)

    source: Path | None = option(
        None, "Training text, one sentence a line (.gz too).", metavar="FILE", panel=DATA, common=True
    )
    target: Path | None = option(None, "Its translation, line by line.", metavar="FILE", panel=DATA, common=True)
    valid_source: Path | None = option(None, "Validation text.", metavar="FILE", panel=DATA, common=True)
    valid_target: Path | None = option(None, "Its translation.", metavar="FILE", panel=DATA, common=True)
    kind: Literal["translation", "lm"] = option(
        "translation", "translation, or lm: a decoder alone, trained on --source.", panel=DATA, common=True
    )
    block: int | None = option(
        None,
        "lm: join the lines and cut the text into blocks of N subwords; default: a line is a text.",
        panel=DATA,
        minimum=1,
        of="kind=lm",
        flagless=True,
    )
    max_sentences: int | None = option(None, "Use only the first N lines of the training text.", panel=DATA, minimum=1)
    fraction: float = option(
        1.0,
        "Use only this share of the training text, drawn by --seed; a smaller share is part of a larger one.",
        panel=DATA,
        above=0,
        maximum=1,
    )
    max_length: int = option(
        512,
        "Subwords a side may have, the closing one included; longer sentences are left out and counted.",
        panel=DATA,
        minimum=2,
    )

    tokenizer: Path | None = option(
        None, "A SentencePiece model to use instead of learning one.", metavar="FILE", panel=TEXT
    )
    tokenizer_kind: Literal["bpe", "unigram"] = option(
        "bpe", "bpe or unigram (SentencePiece).", panel=TEXT, flagless=True
    )
    vocab_size: int = option(
        8000, "Subwords to learn, the four special ones included.", panel=TEXT, minimum=5, maximum=2**22
    )
    vocabulary: Literal["joint", "separate"] = option(
        "joint", "joint: both sides share subwords and embeddings; or separate.", panel=TEXT
    )
    normalise: Normalise = option(
        "none",
        "none, lowercase, moses or moses-lowercase (punctuation, tokens; docs/training.md).",
        panel=TEXT,
    )
    source_lang: str = option(
        "en", "Language of the source, for moses.", panel=TEXT, of="normalise=moses|moses-lowercase", flagless=True
    )
    target_lang: str = option(
        "de", "Language of the target, for moses.", panel=TEXT, of="normalise=moses|moses-lowercase", flagless=True
    )

    init: str | None = option(
        None,
        "Start from this checkpoint: its weights, sizes and vocabularies.",
        metavar="CKPT",
        panel=MODEL,
        common=True,
    )
    dicts: Path | None = option(
        None, "Dictionaries of --init, where they are not beside it.", metavar="DIR", panel=MODEL, of="init"
    )
    bpe: Path | None = option(
        None,
        "BPE merges that split the text for --init; default: it is split already.",
        metavar="CODES",
        panel=MODEL,
        of="init",
    )
    encoder_layers: int = option(3, "Layers of the encoder.", panel=MODEL, minimum=1, maximum=1000)
    decoder_layers: int = option(3, "Layers of the decoder.", panel=MODEL, minimum=1, maximum=1000)
    d_model: int = option(128, "Width of the model.", panel=MODEL, minimum=1, maximum=2**18)
    d_ffn: int = option(256, "Width of the feed-forward layers.", panel=MODEL, minimum=1, maximum=2**18)
    heads: int = option(8, "Heads of every attention module.", panel=MODEL, minimum=1, maximum=1024)
    norm: Literal["pre", "post"] = option("post", "post or pre: where layers normalise.", panel=MODEL)
    activation: Literal["relu", "gelu", "gelu-tanh", "silu", "tanh", "linear"] = option(
        "relu", "relu, gelu, gelu-tanh, silu, tanh or linear.", panel=MODEL
    )
    positions: Literal["sinusoidal", "learned", "none"] = option(
        "sinusoidal", "sinusoidal, learned or none.", panel=MODEL
    )
    initial: Literal["fairseq", "glorot"] = option(
        "fairseq",
        "How new weights are drawn: fairseq (as fairseq does since 0.10), or glorot (docs/training.md).",
        panel=MODEL,
        flagless=True,
    )
    tie_output: bool = option(True, "The output projection is the decoder's embeddings.", panel=MODEL)
    dropout: float = option(0.1, "On embeddings and the output of every sublayer.", panel=MODEL, minimum=0, below=1)
    attention_dropout: float = option(0.0, "On attention weights.", panel=MODEL, minimum=0, below=1, flagless=True)
    activation_dropout: float = option(0.0, "Inside feed-forward layers.", panel=MODEL, minimum=0, below=1)
    context_dropout: float = option(
        0.0, "On contexts, before the output projection.", panel=MODEL, minimum=0, below=1, flagless=True
    )

    lr: float = option(0.002, "Highest learning rate.", panel=OPTIMISATION, above=0, common=True)
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = option(
        "inverse-sqrt", "inverse-sqrt, cosine (to --min-lr at the end of the run) or constant.", panel=OPTIMISATION
    )
    warmup: int = option(
        1000, "Updates during which the learning rate rises from --warmup-lr.", panel=OPTIMISATION, minimum=0
    )
    warmup_lr: float = option(
        1e-7,
        "Where the warm-up begins; the first update is one step of it above.",
        panel=OPTIMISATION,
        minimum=0,
    )
    min_lr: float = option(
        0.0, "Where a cosine schedule ends.", panel=OPTIMISATION, minimum=0, of="schedule=cosine", flagless=True
    )
    betas: tuple[float, ...] = option((0.9, 0.98), "Adam's two rates.", panel=OPTIMISATION, minimum=0, below=1)
    epsilon: float = option(1e-8, "Adam's epsilon.", panel=OPTIMISATION, above=0)
    weight_decay: float = option(0.0, "Decoupled weight decay.", panel=OPTIMISATION, minimum=0)
    clip: float = option(0.0, "Longest norm of the gradient; 0: no limit.", panel=OPTIMISATION, minimum=0)
    label_smoothing: float = option(
        0.1, "Share of probability spread over all subwords.", panel=OPTIMISATION, minimum=0, below=1
    )
    max_tokens: int = option(
        4096,
        "Positions in a batch, the longer side, padding included; per forward pass.",
        panel=OPTIMISATION,
        minimum=1,
    )
    accumulate: int = option(
        1, "Forward passes an update, in each process.", panel=OPTIMISATION, minimum=1, maximum=65_536
    )
    updates: int | None = option(None, "End after N updates.", panel=OPTIMISATION, minimum=1, common=True)
    max_epochs: int | None = option(
        None, "End after N epochs; default 20 where nothing says when.", panel=OPTIMISATION, minimum=1, common=True
    )

    validate_every: int | None = option(
        None, "Validate and write checkpoints every N updates; default: after every epoch.", panel=RUN, minimum=1
    )
    bleu_every: int = option(1, "BLEU at every N-th validation; 0: never.", panel=RUN, minimum=0)
    bleu_sentences: int | None = option(
        None, "Translate only the first N validation sentences.", panel=RUN, minimum=1, of="valid_source", flagless=True
    )
    beam: int = option(5, "Beam of validation, and of the checkpoints.", panel=RUN, minimum=1, maximum=BEAM)
    best_by: Literal["loss", "bleu"] = option(
        "loss", "loss or bleu: what the best checkpoint has.", panel=RUN, of="valid_source"
    )
    patience: int | None = option(
        None, "End after N validations without a better one.", panel=RUN, minimum=1, of="valid_source"
    )
    average: int = option(
        0, "Average the weights of N checkpoints into DIR/averaged; 0: none.", panel=RUN, minimum=0, maximum=1000
    )
    average_of: Literal["last", "best"] = option(
        "last", "last or best: which checkpoints.", panel=RUN, of="average", flagless=True
    )
    save_every: int | None = option(
        None,
        "Save the state that --resume needs every N updates too, not after epochs alone.",
        panel=RUN,
        minimum=1,
    )
    log_every: int = option(50, "Updates between lines of metrics.csv.", panel=RUN, minimum=1)
    save_confidence: Literal["none", "base", "advanced", "pairwise"] = option(
        "none",
        "Write DIR/confs/epoch-N.pkl after every whole epoch: the MHR program's confidence of every head, batch by "
        "batch.",
        panel=RUN,
    )
    tensorboard: bool = option(False, "Write event files for TensorBoard (needs the package tensorboard).", panel=RUN)

    seed: int = option(
        1, "Seed of weights, dropout and data order.", panel=MACHINE, minimum=0, maximum=SEED, common=True
    )
    device: str = option("auto", "auto, cpu, cuda or mps.", panel=MACHINE, common=True)
    precision: Literal["float32", "bf16", "fp16", "float64"] = option(
        "float32", "float32, bf16 (autocast), fp16 (autocast, on a GPU only), or float64.", panel=MACHINE
    )
    threads: int | None = option(
        None, "CPU threads; default: torch's.", panel=MACHINE, minimum=1, maximum=1024, flagless=True
    )
    compile: bool = option(False, "torch.compile the model.", panel=MACHINE, flagless=True)

    def __post_init__(self) -> None:
        _check_kind(self)
        if self.d_model % self.heads:
            good = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
            raise ConfigError(f"--d-model {self.d_model} is not divisible by --heads {self.heads}; choose from {good}")
        if self.schedule == "cosine" and self.updates is None and self.max_epochs is None:
            raise ConfigError("--schedule cosine must know the end: give --updates or --max-epochs")
        if len(self.betas) != 2:
            raise ConfigError(f"--betas {self.betas} must be two numbers from 0 to less than 1, such as 0.9,0.98")
        if self.save_confidence != "none" and self.compile:
            raise ConfigError("--save-confidence looks at attention weights, which --compile hides; leave one out")
        if self.bleu_tokenize is not None and self.normalise.startswith("moses"):
            raise ConfigError("--bleu-tokenize is about detokenised text; leave it out, or --normalise moses")
        if self.best_by == "bleu" and self.bleu_every != 1:
            raise ConfigError(f"--best-by bleu needs BLEU at every validation; --bleu-every is {self.bleu_every}")

    @property
    def epochs(self) -> int | None:
        """After how many epochs the run ends; None if only updates count."""
        return 20 if self.max_epochs is None and self.updates is None else self.max_epochs


def default_of(config: TrainConfig, name: str) -> Any:
    """What an option of a run is where it is not given."""
    return preset(config.preset).get(name, next(entry.default for entry in fields(config) if entry.name == name))


def _check_kind(config: TrainConfig) -> None:
    changed = [name for name in ("vocab_size", "tokenizer_kind") if getattr(config, name) != default_of(config, name)]
    if config.tokenizer is not None and changed:
        raise ConfigError(f"--tokenizer brings its own subwords; leave out {flag(changed[0])}")
    if config.source is None:
        raise ConfigError("no text: give --source FILE (one sentence a line), and --target FILE for translation")
    if config.kind == "lm":
        if extra := [flag(name) for name in ("target", "valid_target") if getattr(config, name) is not None]:
            raise ConfigError(f"--kind lm has one text only; leave out {' and '.join(extra)}")
        if config.best_by == "bleu":
            raise ConfigError("--best-by bleu: a language model translates nothing; take --best-by loss")
        return
    if config.target is None:
        raise ConfigError("--kind translation needs --target FILE; for a language model give --kind lm")
    if (config.valid_source is None) is not (config.valid_target is None):
        raise ConfigError("validation needs both --valid-source and --valid-target, or neither")


def remarks_on(config: TrainConfig) -> list[str]:
    """What the user of a run should know: of options that decide nothing here, and of a run without validation."""
    remarks = []
    if config.kind == "lm" and config.encoder_layers != default_of(config, "encoder_layers"):
        remarks.append("a language model has a decoder only: --encoder-layers decides nothing")
    if config.valid_source is None:
        needed = "--valid-source and --valid-target" if config.kind == "translation" else "--valid-source"
        remarks.append(f"without validation text the checkpoint best is last; give {needed} to have the best one kept")
    return remarks


TINY: Mapping[str, Any] = {
    "encoder_layers": 4,
    "decoder_layers": 4,
    "d_model": 128,
    "d_ffn": 256,
    "heads": 4,
    "norm": "post",
    "vocab_size": 10000,
    "dropout": 0.3,
    "lr": 0.005,
    "warmup": 2000,
    "label_smoothing": 0.1,
    "max_tokens": 4096,
    "accumulate": 2,
    "updates": 8000,
    "average": 10,
}
SMALL: Mapping[str, Any] = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "d_model": 128,
    "d_ffn": 256,
    "heads": 8,
    "norm": "post",
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"tiny": TINY, "small": SMALL}


def preset(name: Any) -> Mapping[str, Any]:
    """The values of a preset, by the names of fields; ConfigError for one that does not exist."""
    if name is not None and str(name) not in PRESETS:
        raise ConfigError(f"--preset {name!r} is not known; available: {', '.join(PRESETS)}")
    return {} if name is None else PRESETS[str(name)]
