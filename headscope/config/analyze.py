"""The options of `headscope analyze`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config.declarations import analysis_options
from headscope.config.inputs import CheckpointOptions, TextFiles, TextOptions, data_option, model_option, output_option
from headscope.config.option import TextLines, make_config, option, plain_options
from headscope.errors import ConfigError, flag, raise_first

analyses_option, mhr_option = (partial(option, panel=panel) for panel in ("Analyses", "Files of the MHR fork"))
"""`option` under the heading of that name."""
PAGE_EXAMPLES = 12
"""Default of --page-examples with --report."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(TextOptions):
    """Options of measuring heads, without those of the checkpoint and the text.

    `only`, `skip` and `also` name analyses or groups of them. `analysis_options` are values of the options that
    analyses declare (`Analysis.Options`), by name. `headscope.config.declarations.checked_options` checks them.
    """

    only: tuple[str, ...] = analyses_option(
        (), "Run only these analyses, comma-separated; `headscope show CKPT` lists them.", metavar="NAMES", common=True
    )
    skip: tuple[str, ...] = analyses_option((), "Leave these analyses out.", metavar="NAMES")
    also: tuple[str, ...] = analyses_option((), "Run these beside the default ones.", metavar="NAMES", common=True)
    importance: Literal["none", "cheap", "all"] = analyses_option(
        "none",
        "Add how much the model needs heads and roles: cheap, in a few passes; all, by every measure on all text.",
        metavar="[cheap|all]",
        common=True,
    )
    faithfulness: bool = analyses_option(
        False, "Test rankings: remove heads in each order. Adds --importance unless --only.", common=True
    )
    faithfulness_steps: int = analyses_option(
        10, "Number of removals in each order.", minimum=2, maximum=10_000, needs="faithfulness", flagless=True
    )
    faithfulness_seeds: int = analyses_option(
        5, "Number of random orders to compare with.", minimum=1, maximum=1000, needs="faithfulness", flagless=True
    )
    faithfulness_bleu: bool = analyses_option(False, "Translate at every step.", needs="faithfulness", flagless=True)
    objective: str = analyses_option("", "What importances explain (`headscope list objectives`); default: what fits.")
    parse: str | None = data_option(
        None,
        "Dependency parses: stanza, or a CoNLL-U file (.gz too), whose text is analysed without --source.",
        metavar="stanza|FILE",
        common=True,
    )
    target_parse: Path | None = data_option(None, "Parses of the translations: a CoNLL-U file.", needs="target")
    template: str | None = data_option(
        None,
        "Decoder language models: one text of a line and its translation, such as "
        r'"English: {source}\nGerman: {target}"; or a file that has it.',
        metavar="TEXT|FILE",
    )
    examples: int = data_option(0, "Pairs before that one, filled in alike.", minimum=0, maximum=100, needs="template")
    stanza_dir: Path | None = data_option(
        None, "Folder of stanza's models; default: its own.", metavar="DIR", needs="parse=stanza", flagless=True
    )
    lang: str = data_option("en", "Language of the source, for stanza.", needs="parse=stanza", flagless=True)
    download: bool = data_option(False, "Let stanza fetch its models.", needs="parse=stanza")
    frequencies: Path | None = analyses_option(
        None, "How frequent tokens are: token and count a line.", flagless=True, excludes="frequency_corpus"
    )
    frequency_corpus: Path | None = analyses_option(
        None, "Text to count tokens over; default: the source itself.", flagless=True
    )
    keep_special: bool = analyses_option(
        False, "Count special tokens (start, end) as queries and keys too.", flagless=True, excludes="exclude_sinks"
    )
    queries: Literal["all", "first", "last"] = analyses_option(
        "all", "Queries that count: all, or the first ([CLS]) or last position of each text."
    )
    exclude_sinks: bool = analyses_option(
        False, "Leave out the first token of every text as special tokens are: what heads do beyond attention sinks."
    )
    detail: bool = output_option(False, "Also write every sentence's values.", flagless=True)
    report: bool = output_option(False, "Also write report.html: everything in one page, for a browser.", common=True)
    page_examples: int | None = output_option(
        None, "Keep attention on N short sentences; default: 12 with --report.", minimum=0, maximum=1000, flagless=True
    )
    mhr_pickles: bool = mhr_option(
        False, "Also write pickles/mhr: confidences, cosine, L2 and alphas as the MHR fork writes them."
    )
    mhr_rows: Literal["corpus", "batch", "generate"] = mhr_option(
        "corpus", "A row: the corpus, a batch, or (decoders) the last step.", needs="mhr_pickles", flagless=True
    )
    mhr_batch_size: int | None = mhr_option(
        None,
        "Sentences in a batch, for such rows; default: 32.",
        minimum=1,
        needs="mhr_rows=batch|generate",
        flagless=True,
    )
    mhr_max_tokens: int | None = mhr_option(
        None,
        "Token positions in such a batch; both limits hold.",
        minimum=1,
        needs="mhr_rows=batch|generate",
        flagless=True,
    )
    attention: Literal["auto", "dense", "streamed"] = model_option(
        "auto", "Make matrices of weights, or only what analyses need of them; auto streams beyond 1024 tokens."
    )
    analysis_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conllu_file(self) -> Path | None:
        """The CoNLL-U file with the parses; None for stanza or no parses."""
        return Path(self.parse) if self.parse is not None and self.parse != "stanza" else None

    @property
    def examples_kept(self) -> int:
        """The number of sentences whose attention weights a run keeps."""
        return self.page_examples if self.page_examples is not None else PAGE_EXAMPLES * self.report

    def settings(self) -> dict[str, Any]:
        """The options and those of analyses, as plain JSON values by name."""
        values = plain_options(self)
        return values | values.pop("analysis_options")


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(AnalyzeOptions, TextFiles, CheckpointOptions):
    """The options of `headscope analyze`; the text is `source`, or `clean`."""

    source: TextLines | None = data_option(
        None, "Text, one sentence a line (.gz too); - reads stdin and writes a page.", metavar="FILE|-", common=True
    )
    target: TextLines | None = data_option(
        None, "Translations, for encoder-decoder models; - beside --source -.", metavar="FILE|-", common=True
    )
    clean: TextLines | None = data_option(None, "Prompts, one a line, in the place of --source.")
    corrupt: TextLines | None = data_option(None, "The same prompts with another answer, as many subwords each.")
    answer: TextLines | None = data_option(
        None, "What the model should say to each clean prompt, and after a tab what it should not."
    )
    out: Path = output_option(help="Directory for the results.", metavar="DIR", is_output=True)
    figures: bool = output_option(True, "Draw the standard figures.")
    write_alignment: Path | None = output_option(
        None,
        "Name the cross heads that align in the settings of this folder of transformers or CTranslate2.",
        metavar="MODEL",
        identity=False,
        is_output=True,
    )
    alignment_heads: int = output_option(
        6, "Most heads that --write-alignment names.", minimum=1, identity=False, needs="write_alignment", flagless=True
    )
    force: bool = output_option(
        False, "Replace an earlier run in the output, and alignment heads that are named.", identity=False, common=True
    )

    def __post_init__(self) -> None:
        missing = [flag(name) for name in ("clean", "corrupt", "answer") if getattr(self, name) is None]
        texts = [flag(name) for name in ("source", "source2", "pairs", "labels") if getattr(self, name)]
        has_text = self.source is not None or self.labels is not None or self.clean is not None
        text = f"give {flag.source} FILE (one sentence a line) or {flag.parse} FILE.conllu, which has text"
        problems = {
            f"{flag.parse} is of one text a line; leave out {flag.source2} and {flag.pairs}": self.parse is not None
            and (self.source2 is not None or self.pairs),
            f"prompts belong together; give {' and '.join(missing)} too": 0 < len(missing) < 3,
            f"{flag.clean} replaces other text; leave out {' and '.join(texts)}": texts and not missing,
            f"no text: {text}": not has_text and self.conllu_file is None,
        }
        raise_first(ConfigError, problems)

    @property
    def text(self) -> TextFiles:
        """The text: `clean` and its translations if it was given, else the text of the other options."""
        return self if self.clean is None else TextFiles(source=self.clean, target=self.target)


def configured_analysis(values: Mapping[str, Any]) -> AnalyzeConfig:
    """The config of `analyze` from values by name, in which options of analyses may stand beside its own."""
    names, command_values = analysis_options(), dict(values)
    of_analyses = dict(command_values.pop("analysis_options", {}))
    of_analyses |= {name: command_values.pop(name) for name in names if name in values}
    command_values["analysis_options"] = of_analyses
    return make_config(AnalyzeConfig, command_values, what="analyze", extra_names=names)
