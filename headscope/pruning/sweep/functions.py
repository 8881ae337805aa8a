"""Functions of heads: read from a run of `analyze`, and found in a pruned model as that run found them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from headscope.config import AnalyzeConfig
from headscope.config.declarations import analysis_options, checked_options
from headscope.config.option import restored
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.engine.base import Analysis
from headscope.engine.plan import analyze, chosen_analyses, run_options, with_stanza
from headscope.errors import ConfigError, HeadscopeError
from headscope.files.reading import read_record
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.pruning.scores_file import read_heads


def read_functions(run: Path, checkpoint: Checkpoint) -> pd.DataFrame:
    """The labels of heads in a run of `analyze`; ConfigError where it has none."""
    table = read_heads(run, checkpoint.layout)
    if "functions" not in table:
        raise ConfigError(
            f"--functions {run}: its heads.csv has no column functions; name a run of `headscope analyze`"
        )
    return table.assign(functions=table["functions"].astype(object).fillna(""))  # numbers where no head has any


@dataclass(frozen=True)
class Labeller:
    """The options, the text and the analyses of a run of `analyze`, those of the analyses that label heads."""

    options: AnalyzeConfig
    corpus: Corpus
    analyses: Sequence[type[Analysis]]
    digest: str
    """Of all that shaped the labels of that run."""

    def labels(self, checkpoint: Checkpoint, off: Sequence[HeadId]) -> dict[str, str]:
        """Labels of heads, `positional:-1;rare`, with the heads `off` closed; those that have none are left out."""
        config = self.options
        limit = sentence_limit(checkpoint, config.max_length)
        told, _ = run_options(config, checkpoint, self.corpus, self.analyses, limit)
        with masked(checkpoint.model, off):
            found = analyze(checkpoint, self.corpus, analyses=self.analyses, options=told, replicates=config.bootstrap)
        return {str(head): ";".join(labels) for head, labels in found.labels.items() if labels}


def labeller(run: Path, checkpoint: Checkpoint) -> Labeller:
    """What labels heads as this run did; ConfigError where its options or its text are not there any more."""
    record = read_record(run / "run.json")
    recorded, data = record.get("options"), record.get("data")
    if not isinstance(recorded, dict) or not isinstance(data, dict):
        raise ConfigError(f"--relabel: {run / 'run.json'} has no options of `headscope analyze`; analyse CKPT again")
    own = {name: value for name, value in recorded.items() if name in analysis_options()}
    try:
        config = restored(AnalyzeConfig, {**recorded, "out": run, "analysis_options": checked_options(own)})
        parses = {"parses": config.conllu_file, "target_parses": config.target_parse}
        corpus = open_text(config.text, **parses, max_sentences=config.max_sentences)
        corpus = with_labels(checkpoint, corpus, config.labels)
        analyses = [cls for cls in chosen_analyses(config) if cls.functions]
        if config.parse == "stanza":
            corpus = with_stanza(corpus, config)
    except (HeadscopeError, TypeError) as error:
        raise ConfigError(f"--relabel: the analysis {run} cannot be repeated: {error}") from None
    if corpus.digest != data.get("digest"):
        raise ConfigError(f"--relabel: the text of {run} was changed since, or is another here; analyse CKPT again")
    if not analyses:
        raise ConfigError(f"--relabel: the analyses of {run} label no heads; analyse CKPT without --only")
    return Labeller(config, corpus, analyses, str(record.get("signature")))
