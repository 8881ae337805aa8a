"""`Model`: analysis, ranking, removal, evaluation, translation; `SmallModel`, a copy without some heads.

A method makes the config of its command, and calls the function of the command with the open model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import ref

from headscope.api.arguments import (
    PathName,
    Report,
    Text,
    path_or_lines,
    progress_of,
    public_methods,
    refit_texts,
    text_options,
)
from headscope.api.open_model import OpenModel
from headscope.config.analyze import configured_analysis
from headscope.config.commands import ConvertConfig, EvaluateConfig
from headscope.config.option import make_config
from headscope.engine.overview import checkpoint_overview
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError
from headscope.evaluation.opened import Intact, find_intact, load_intact, open_evaluation
from headscope.evaluation.quality import Evaluation
from headscope.evaluation.run import EachHead, run_each_head, run_evaluation
from headscope.export.convert import convert
from headscope.files.folders import NOWHERE
from headscope.files.output_checks import inputs_of
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.model.taps import Heads, head_ids_of
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.removal import RemoveConfig, ShrinkConfig
from headscope.pruning.options.shared import Refit
from headscope.pruning.ranking.rank_run import rank_open_model
from headscope.pruning.removal.record import Shrunk, shrunk_record
from headscope.pruning.removal.remove import removed_copy, save_shrunk
from headscope.pruning.removal.verify import Timing, timings
from headscope.pruning.shrink import open_shrink, small_model
from headscope.results.overview import Conversion, Overview
from headscope.results.ranking import Ranking
from headscope.results.removal import Removal
from headscope.results.study import Study

if TYPE_CHECKING:
    import pandas as pd

S = TypeVar("S", Evaluation, EachHead)
PROMPTS = {"clean", "corrupt", "answer"}


@public_methods
class Model(OpenModel):
    """A model whose heads can be measured, ranked, removed, captured and gated; `headscope.load` opens one.

    Every method leaves the model as it was, and writes nothing unless an output is given. `options` of a method are
    those of its command by their names, with underscores; ConfigError for an unknown one, with the nearest.
    """

    def analyze(
        self,
        text: Text | None = None,
        *,
        only: str | Iterable[str] | None = None,
        importance: bool | Literal["none", "cheap", "all"] = "none",
        parse: PathName | None = None,
        mask: Heads | None = None,
        out: PathName | None = None,
        progress: Report = False,
        **options: Any,
    ) -> Study:
        """Measure every head on a text: what `headscope analyze` does.

        text: a file's path (one sentence a line, `.gz` too), a list of sentences or of pairs (sentence, translation),
            or a pair (source, target) of two texts.
        only: names of analyses or groups of them; default: all that are cheap and fit.
        importance: how much the model relies on each head: True or "cheap" in a few passes, "all" by all measures.
        parse: "stanza", or a CoNLL-U file. mask: heads that are off.
        out: a folder to write the run into; it must be empty unless `force` is given.
        progress: True shows a bar; a function is called as `progress(what, done, total)`.
        options: those of `headscope.AnalyzeConfig` and of analyses (`relations`, `rules`, …), `target`, `second` (the
            other texts of pairs), `labels` (a file, or a class a sentence); or `clean`, `corrupt` and `answer`.

        After Ctrl-C the study has what was done (`complete` is False). HeadscopeError for what the caller can fix.
        """
        if isinstance(importance, bool):
            importance = "cheap" if importance else "none"
        prompts = {name: path_or_lines(options.pop(name), name) for name in PROMPTS & options.keys()}
        values = {**self._option_values(text, options, mask=mask), **prompts}
        values |= {"only": only, "importance": importance, "parse": parse, "out": NOWHERE if out is None else out}
        config, gates = configured_analysis(self._load_options | values), {"gates": self.gates} if self.gates else {}
        return run_analysis(config, checkpoint=self.checkpoint, about=gates, progress=progress_of(progress))

    def rank(
        self,
        text: Text | None = None,
        *,
        by: str,
        study: Study | None = None,
        protect: Heads | None = None,
        progress: Report = False,
        **options: Any,
    ) -> Ranking:
        """Rank heads by a criterion: what `headscope prune rank --by` does.

        by: a criterion ("obs", "magnitude", …), a column of `study.heads`, or a CSV file with site,layer,head,score.
        text: what it is measured on; see `analyze`. Criteria about parameters need none.
        study: take the column of this study instead of measuring. protect: heads that never go.
        options: `target`, `second`, `labels` of the text, and those of `headscope.RankConfig`: `sites`, `keep_lowest`,
            `steps` (how often heads are scored anew, each time `Ranking.lowest` is asked), `allocate`, `objective`, …
        """
        values = {"out": NOWHERE, "keep": 1, **self._option_values(text, options, protect=protect), "by": by}
        if study is not None:
            values["run"] = getattr(study, "folder", None) or NOWHERE
        config = self._options(RankConfig, values, what="rank")
        return rank_open_model(
            self.checkpoint, config, study=study, gates=lambda: self.gates, progress=progress_of(progress)
        )

    def remove(
        self,
        heads: Heads | None = None,
        *,
        keep_only: Heads | None = None,
        merge_kv: int | Iterable[int] | None = None,
        merge_by: PathName | Mapping[Any, float] | None = None,
        text: Text | None = None,
        refit: Refit | None = None,
        valid: Text | None = None,
        **options: Any,
    ) -> SmallModel:
        """A smaller and faster copy without some heads, with the outputs of this model with these heads masked.

        heads: names, or the result of `Ranking.lowest`. keep_only: instead, the heads that stay, of their sites.
        merge_kv: instead, the number of key/value heads to leave in every layer (or a number for each layer). Each is
            the mean of neighbours, or of heads with neighbouring scores `merge_by` (a number by head, or a file).
        text: what both models are compared on; default: a sample that ships.
        refit: `hs.Refit(method="least-squares")` refits the remaining output projections on `text`; the copy's
            `compensation` has the gain on the text `valid` (default: the last fifth of `text`).
        options: `target`, `second`, `labels` of the text, and those of `headscope.RemoveConfig`: `export`, `metric`, …

        ConfigError for heads that cannot be removed, CheckpointError where the outputs differ.
        """
        texts, checkpoint = refit_texts(options, refit), self._ungated_checkpoint()
        values = {"out": NOWHERE, **self._option_values(text, options, valid, heads=heads, keep_only=keep_only)}
        values["merge_kv"], scores = merge_kv, None
        if isinstance(merge_by, Mapping):
            if not merge_kv:
                raise ConfigError("merge_by requires merge_kv")
            scores = {HeadId.parse(str(head), checkpoint.layout): float(score) for head, score in merge_by.items()}
        else:
            values["merge_by"] = merge_by
        config = self._options(RemoveConfig, values, what="remove")
        with eval_mode(checkpoint.model):
            shrunk = removed_copy(config, checkpoint, scores=scores, refit_texts=texts)
        return SmallModel(shrunk, config, whole=checkpoint)

    def shrink(
        self,
        text: Text | None = None,
        *,
        valid: Text | None = None,
        protect: Heads | None = None,
        progress: Report = False,
        **options: Any,
    ) -> SmallModel:
        """The whole way to a smaller copy: rank, allocate, refit, remove, verify, measure: `headscope prune shrink`.

        text: what heads are ranked and the others refitted on; see `analyze`. protect: heads that stay.
        valid: text that the copy is judged on and that nothing else sees; default: the last fifth of `text`.
        options: `target`, `second`, `labels` of the text, and those of `headscope.ShrinkConfig`: `keep` or
            `keep_fraction`, or `max_drop` ("0.5", "1%": the smallest copy that is not worse by more), `by`, `check`, …

        `quality` of the copy is on `valid`, `elsewhere` on the second text. ConfigError where no size is as good.
        """
        checkpoint = self._ungated_checkpoint()
        values = self._option_values(text, options, valid, protect=protect)
        with TemporaryDirectory() as folder, eval_mode(checkpoint.model):  # for the sizes that are tried
            config = self._options(ShrinkConfig, {**values, "out": folder}, what="shrink")
            setup = open_shrink(config, config.out, checkpoint=checkpoint)
            return SmallModel(small_model(setup, progress=progress_of(progress)), config, whole=checkpoint)

    def evaluate(
        self,
        text: Text | None = None,
        *,
        metrics: str | Iterable[str] = (),
        tokenised: bool = False,
        mask: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Any,
    ) -> Evaluation:
        """Score the model on a text: what `headscope evaluate` does; `["bleu"].value` of the result is a score.

        text: see `analyze`; models that translate need the `target`, classifiers `labels`.
        metrics: names (`headscope list metrics`); default: all that fit the model.
        tokenised: BLEU and chrF of tokenised text, whatever its case. mask: heads that are off meanwhile.
        against: the intact model, open or its path, of metrics that compare; default: what heads were removed from.
        options: `target`, `second`, `labels`, and those of `headscope.EvaluateConfig` (`beam`, `max_sentences`, …).
        """
        shared: dict[str, Any] = {"mask": mask, "against": against, "progress": progress}
        return self._score(run_evaluation, text, metrics=metrics, tokenised=tokenised, **shared, **options)

    def evaluate_heads(self, text: Text | None = None, *, heads: Heads | None = None, **options: Any) -> pd.DataFrame:
        """Score the model with each of `heads` (default: all) off by itself: `headscope evaluate --each-head`.

        The first row is the model as it is; then come the heads whose loss harms most.
        """
        scores = self._score(run_each_head, text, heads=heads, each_head=True, **options)
        scores.table.attrs["signature"] = str(scores.signature)
        return scores.table

    def _score(
        self,
        run: Callable[..., S],
        text: Text | None,
        *,
        tokenised: bool = False,
        mask: Heads | None = None,
        heads: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Any,
    ) -> S:
        values = self._option_values(text, options, mask=mask, heads=heads)
        values |= {"text": "tokenised-lowercase"} if tokenised else {}
        intact = against.checkpoint if isinstance(against, OpenModel) else None
        values |= {"against": against} if intact is None else {}
        config = self._options(EvaluateConfig, values, what="evaluate")
        comparison: dict[str, Any] = {"against": intact, "find": self._intact, "has_gates": bool(self.gates)}
        setup = open_evaluation(config, checkpoint=self.checkpoint, **comparison)
        result = run(config, setup=setup, progress=progress_of(progress))
        result.signature = result.signature.with_entries(gates=self.gates) if self.gates else result.signature
        return result

    def overview(self) -> Overview:
        """An overview of the model, its heads, possible savings and measures: `headscope show`."""
        return Overview(checkpoint_overview(self.checkpoint))

    def convert(self, folder: PathName, *, to: str, **options: Any) -> Conversion:
        """Write the model in another format, or for an engine: what `headscope convert` does.

        folder: must be empty, unless `force` is given. to: "native", "huggingface", "fairseq", "gguf", "onnx", …
        options: `force`, `quantize`, `hub_name` and `hub_public`, as in `SmallModel.save`.

        ConfigError and CheckpointError where the format cannot express it; then nothing is left behind.
        """
        config = self._options(ConvertConfig, {**options, "out": folder, "to": to}, what="convert")
        return convert(
            self.checkpoint,
            config.out,
            to=config.to,
            quantize=config.quantize,
            inputs=inputs_of(self._companions.companion_values()),
            force=config.force,
            push_to=config.hub_name,
            public=config.hub_public,
        )

    def _option_values(
        self, text: Text | None, options: dict[str, Any], valid: Text | None = None, **selections: Heads | None
    ) -> dict[str, Any]:
        """The options of a method's command: those given, the files or lines of its texts, and the names of heads."""
        texts = {**text_options(text, options), **text_options(valid, {}, prefix="valid_")}
        heads = {
            name: ",".join(map(str, head_ids_of(selection, self.layout, name=name))) or None
            for name, selection in selections.items()
            if selection is not None
        }
        return {**texts, **options, **heads}

    def _ungated_checkpoint(self) -> Checkpoint:
        """The checkpoint; ConfigError while gates are active."""
        if self.gates:
            raise ConfigError("heads are gated now; remove them outside of the block")
        return self.checkpoint

    def _intact(self, config: EvaluateConfig) -> Intact:
        return find_intact(config)


@public_methods
class SmallModel(Model, Removal):
    """The result of `Model.remove` and `shrink`: a `Model`, which is a copy, and the `Removal` that made it."""

    def __init__(self, shrunk: Shrunk, config: RemoveConfig | ShrinkConfig, *, whole: Checkpoint) -> None:
        shrunk = replace(shrunk, checkpoint=shrunk.checkpoint.with_model(copy.deepcopy(shrunk.checkpoint.model)))
        Model.__init__(self, shrunk.checkpoint, companions=config)
        Removal.__init__(self, shrunk_record(shrunk, config), Path(whole.path))
        self._shrunk, self._config, self._whole = shrunk, config, ref(whole)

    def _intact(self, config: EvaluateConfig) -> Intact:
        whole = self._whole()
        return load_intact(self._shrunk.source, self._config) if whole is None else (whole, [])

    def times(self, *, rounds: int = 5, batch: int = 64) -> list[Timing]:
        """Median seconds of the whole and this model, measured alternately: one sentence, a `batch`, beam search."""
        whole, small = self._whole(), self._shrunk
        if whole is None:
            raise ConfigError("times are of both models, and the whole one is no longer open; keep it meanwhile")
        if rounds < 1 or batch < 1:
            raise ConfigError(f"rounds {rounds}, batch {batch}: at least 1 is needed")
        with eval_mode(whole.model), eval_mode(small.checkpoint.model):
            return timings(whole, small.checkpoint, small.data, batch=batch, rounds=rounds)

    def save(self, folder: PathName, **options: Any) -> Removal:
        """Write the checkpoint, open what was written, and compare it with the model in memory.

        folder: must be empty, unless `force` is given.
        options: `force`, `export` ("self-contained", "native", "masked", also "native,gguf"), `quantize`,
            `hub_name="user/name"` and `hub_public`, as of `headscope prune remove`.

        OutputError, ConfigError or CheckpointError where it cannot be written so; then nothing is left behind.
        """
        config = make_config(type(self._config), {**vars(self._config), **options, "out": folder}, what="save")
        return save_shrunk(self._shrunk, config)
