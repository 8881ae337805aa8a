"""Configs of the commands: frozen, every default in one place; and the fields of option classes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headscope.bounds import check_numbers
from headscope.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    panel: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    refuse_idle: bool = False,
) -> Any:
    """A field of an options class; it becomes `--the-name`, the TOML key `the-name` and a keyword of the API.

    Types that an option may have: bool, int, float, str, Path, Literal, any of them `| None`, and
    `tuple[int, ...]`, `tuple[float, ...]`, `tuple[str, ...]`, which are written with commas. `panel` is the
    heading in --help (default: that of what has the option). `minimum` and `maximum` bound numbers. With `refuse_idle`
    a value is refused, not ignored, in a run of which nothing has the option.
    """
    about = {"help": help, "metavar": metavar, "panel": panel, "refuse_idle": refuse_idle}
    return field(default=default, metadata={**about, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True)
class NoOptions:
    """For what takes no options. Options classes check themselves in `__post_init__` (ConfigError)."""


@dataclass(frozen=True)
class LabelOptions:
    """Options of analyses that label heads (`headscope.engine.evidence.labels`); their own may inherit them."""

    min_instances: int = option(
        20,
        "Instances that a label of a head needs; with --relations all rarer relations are left out.",
        metavar="N",
        minimum=1,
    )


def check_choices(options: Any) -> None:
    """ConfigError for a value of a Literal field (or one of several) that is not among its words."""
    for name, allowed, strange in _strange_choices(options):
        words = ", ".join(map(str, allowed))
        raise ConfigError(f"{flag(name)} {strange!r} is not known; choose from {words}")


def check_options(options: Any) -> None:
    """ConfigError for a number of an options class that is out of bounds, and for a word that is none of a Literal."""
    for entry in fields(options):
        value, minimum = getattr(options, entry.name), entry.metadata.get("minimum")
        if minimum is not None and value is not None and value < minimum:
            raise ConfigError(f"{flag(entry.name)} {value}: at least {minimum} is needed")
    check_numbers(options)
    for name, allowed, strange in _strange_choices(options):
        _one_of(flag(name), strange, *filter(None, allowed))


def flag(name: str) -> str:
    """A field's name as the command line has it."""
    return f"--{name.replace('_', '-')}"


def _strange_choices(options: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Name, allowed words and value of every Literal field that has another value."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name, None)
        inner = [part for part in get_args(hint) if get_origin(part) is Literal] or [hint]
        allowed = get_args(inner[0]) if get_origin(inner[0]) is Literal else ()
        values = value if isinstance(value, tuple) else (value,)
        strange = [part for part in values if part not in allowed and not (part is None and inner != [hint])]
        if allowed and strange:
            yield name, allowed, strange[0]


@dataclass(frozen=True, kw_only=True)
class Companions:
    """Files that belong to a checkpoint and lie elsewhere.

    `dicts`: folder of dictionaries or vocabularies (default: beside the checkpoint); `hp`: hyper-parameters
    of a story-of-heads file; `bpe`: BPE merges or SentencePiece model that split text into subwords (default: text
    is taken as already split).
    """

    dicts: Path | None = None
    hp: Path | None = None
    bpe: Path | None = None

    def names(self) -> list[str]:
        """Names of the companions that were given."""
        return [name for name in ("dicts", "hp", "bpe") if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Companions):
    """Which checkpoint a command opens, as which `format` (default: found from content), and where it runs.

    `dtype` "auto" is as stored, on a CPU float32. `device_map` spreads a model over devices, the CPU's memory and the
    disk: "auto", or a JSON file; its types are then as stored.
    """

    checkpoint: str
    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    format: str | None = None

    @property
    def companions(self) -> Companions:
        """Files that belong to the checkpoint."""
        return Companions(dicts=self.dicts, hp=self.hp, bpe=self.bpe)


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The text of a command.

    `target` has the translations of `source`, `source2` the other text of every pair that a model reads together; with
    `pairs` it stands in the line itself, after a tab. `labels` are what a classifier should say: a class a line, or
    CoNLL columns, which have the words too, for models that tag them.
    """

    source: Path | None = None
    target: Path | None = None
    source2: Path | None = None
    pairs: bool = False
    labels: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PromptFiles:
    """Prompts, line by line: `clean` ones, `corrupt` ones of as many subwords, and the `answer` to each clean one.

    After a tab a line of `answer` has a wrong answer. ConfigError where one of the three is missing.
    """

    clean: Path | None = None
    corrupt: Path | None = None
    answer: Path | None = None

    def check_prompts(self, **others: Any) -> None:
        """ConfigError where files are missing, or where one of the other texts is given too."""
        files = {name: getattr(self, name) for name in ("clean", "corrupt", "answer")}
        missing = [flag(name) for name, path in files.items() if path is None]
        if 0 < len(missing) < 3:
            raise ConfigError(f"--clean, --corrupt and --answer belong together; give {' and '.join(missing)} too")
        if not missing and (given := [flag(name) for name, value in others.items() if value]):
            raise ConfigError(f"--clean has the text and --answer what is right; leave out {' and '.join(given)}")


@dataclass(frozen=True, kw_only=True)
class ValidatedTextFiles(TextFiles):
    """A text, and another one that results are measured on, whose files are those of `TextFiles`."""

    valid_source: Path | None = None
    valid_target: Path | None = None
    valid_source2: Path | None = None
    valid_labels: Path | None = None

    @property
    def has_text(self) -> bool:
        """Whether there is a text: lines, or words in CoNLL columns."""
        return self.source is not None or self.labels is not None

    @property
    def valid_text(self) -> TextFiles | None:
        """The text that results are measured on, where it is another; ConfigError for a part of one."""
        for name in ("valid_target", "valid_source2"):
            if self.valid_source is None and getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} is for --valid-source; give that too")
        if self.valid_source is None and self.valid_labels is None:
            return None
        return TextFiles(
            source=self.valid_source,
            target=self.valid_target,
            source2=self.valid_source2,
            pairs=self.pairs,
            labels=self.valid_labels,
        )


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a text is read while a model is measured, and how sure the numbers are.

    `mask` names heads that are off meanwhile; `max_length` None is 512 subwords or the model's limit, whichever is
    less; `long` says what happens to longer sentences; `bootstrap` is the number of resamples.
    """

    mask: str | None = None
    max_length: int | None = None
    long: Literal["truncate", "refuse"] = "truncate"
    max_sentences: int | None = None
    batch_tokens: int = 2048
    bootstrap: int = 1000
    seed: int = 1

    def __post_init__(self) -> None:
        check_numbers(self)
        _one_of("--long", self.long, "truncate", "refuse")


EXAMPLES = 12
"""Sentences whose attention a run with a page keeps, unless it is said."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(TextOptions):
    """How heads are measured, whatever the checkpoint and the text.

    `only`, `skip` and `also` name analyses or groups of them, `importance` adds that group, `faithfulness` tests the
    rankings; `objective` is what importances explain (empty: what fits the model); `parse` is "stanza" or a CoNLL-U
    file. With `report` the run gets its page, report.html, and keeps the attention of `examples` short sentences for
    it (None: 12 with `report`, else none). `attention` says whether matrices of weights are made ("dense"), or only
    what the analyses need of them ("streamed"); "auto" streams long sentences. `analysis_options` are values of
    options that analyses declare (`Analysis.Options`), by name; they are checked when the analyses are known
    (`headscope.engine.declarations.checked_options`).
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    importance: bool = False
    faithfulness: bool = False
    faithfulness_steps: int = 10
    faithfulness_seeds: int = 5
    faithfulness_bleu: bool = False
    objective: str = ""
    parse: str | None = None
    stanza_dir: Path | None = None
    lang: str = "en"
    download: bool = False
    frequencies: Path | None = None
    frequency_corpus: Path | None = None
    keep_special: bool = False
    detail: bool = False
    report: bool = False
    examples: int | None = None
    mhr_pickles: bool = False
    mhr_rows: Literal["corpus", "batch", "generate"] = "corpus"
    mhr_batch_size: int | None = None
    mhr_max_tokens: int | None = None
    attention: Literal["auto", "dense", "streamed"] = "auto"
    analysis_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("--attention", self.attention, "auto", "dense", "streamed")
        _one_of("--mhr-rows", self.mhr_rows, "corpus", "batch", "generate")
        if self.mhr_rows != "corpus" and not self.mhr_pickles:
            raise ConfigError(f"--mhr-rows {self.mhr_rows} is about --mhr-pickles; give that too")
        for name, size in (("--mhr-batch-size", self.mhr_batch_size), ("--mhr-max-tokens", self.mhr_max_tokens)):
            if size is not None and size < 1:
                raise ConfigError(f"{name} {size}: at least 1 is needed")
            if size is not None and self.mhr_rows == "corpus":
                raise ConfigError(f"{name} is about batches; give --mhr-rows batch or generate too")
        if self.examples is not None and self.examples < 0:
            raise ConfigError(f"--examples {self.examples}: at least 0 is needed")
        if self.faithfulness_bleu and not self.faithfulness:
            raise ConfigError("--faithfulness-bleu is about --faithfulness; give that too")
        if self.faithfulness and (self.faithfulness_steps < 2 or self.faithfulness_seeds < 1):
            raise ConfigError("--faithfulness-steps must be at least 2 and --faithfulness-seeds at least 1")
        if self.frequencies and self.frequency_corpus:
            raise ConfigError("--frequencies and --frequency-corpus both say how frequent tokens are; give one")

    @property
    def examples_kept(self) -> int:
        """How many sentences' attention a run keeps."""
        return self.examples if self.examples is not None else EXAMPLES * self.report

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values, those of analyses beside the others."""
        values = plain_options(self)
        del values["analysis_options"]
        return values | {name: plain_value(value) for name, value in self.analysis_options.items()}


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(AnalyzeOptions, TextFiles, PromptFiles, CheckpointOptions):
    """The options of `headscope analyze`; the text is `source`, or `clean`."""

    out: Path
    figures: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parse is not None and (self.source2 is not None or self.pairs):
            raise ConfigError(f"--parse {self.parse}: parses are of one text a line; leave out --source2 and --pairs")
        self.check_prompts(source=self.source, source2=self.source2, pairs=self.pairs, labels=self.labels)
        has_text = self.source is not None or self.labels is not None or self.clean is not None
        if not has_text and (self.parse is None or self.parse == "stanza"):
            raise ConfigError(
                "no text: give --source FILE (one sentence a line) or --parse FILE.conllu, which has text"
            )

    @property
    def text(self) -> TextFiles:
        """The files of the text."""
        if self.clean is not None:
            return TextFiles(source=self.clean, target=self.target)
        names = [entry.name for entry in fields(TextFiles)]
        return TextFiles(**{name: getattr(self, name) for name in names})


METRICS = ("bleu", "chrf", "perplexity", "loss", "accuracy", "macro-f1", "cosine", "token-cosine", "l2", "token-l2")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TextOptions):
    """How a model is scored, whatever the checkpoint and the text.

    `metrics` empty: all that fit the model (with `each_head` those that need no translation); of models that predict
    something without those that compare states with the intact model's. `text` says what BLEU
    and chrF compare: "raw" (detokenised, as it is) or "tokenised-lowercase"; `hiding` is what an encoder-only
    model is asked for: "each" token in turn, or a "random" 15 % at once. `beam` and the like: None is as the
    checkpoint says. `heads` are those that `each_head` switches off, one at a time.
    """

    metrics: tuple[str, ...] = ()
    text: Literal["raw", "tokenised-lowercase"] = "raw"
    hiding: Literal["each", "random"] = "each"
    each_head: bool = False
    heads: str | None = None
    beam: int | None = None
    lenpen: float | None = None
    max_len_a: float | None = None
    max_len_b: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("--text", self.text, "raw", "tokenised-lowercase")
        _one_of("--hiding", self.hiding, "each", "random")
        if strange := [name for name in self.metrics if name not in METRICS]:
            raise ConfigError(f"--metrics {strange[0]!r} is not known; available: {', '.join(METRICS)}")
        if self.heads and not self.each_head:
            raise ConfigError("--heads is for the table of --each-head; give --each-head too")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EvaluateOptions, TextFiles, CheckpointOptions):
    """The options of `headscope evaluate`.

    `against` is the checkpoint that states are compared with; default: the one that `pruning.json` beside the
    checkpoint names, else the checkpoint itself without `mask`.
    """

    against: str | None = None
    per_sentence: Path | None = None
    out: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None and self.labels is None:
            raise ConfigError("no text: give --source FILE (one sentence a line)")
        if self.each_head and self.per_sentence:
            raise ConfigError("--per-sentence and --each-head are two runs; give one of them")
        if self.out and not self.each_head:
            raise ConfigError("--out is for the table of --each-head; give --each-head too")


def _one_of(option: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} {value!r} is not known; choose {', '.join(allowed[:-1])} or {allowed[-1]}")


def plain_options(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON values."""
    return {field.name: plain_value(getattr(config, field.name)) for field in fields(config)}


def plain_value(value: Any) -> Any:
    """The value of an option as JSON has it: tuples as lists, paths as text."""
    if isinstance(value, tuple):
        return [plain_value(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
