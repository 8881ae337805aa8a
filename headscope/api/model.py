"""`Model`: analysis, ranking, removal, evaluation and translation; `SmallModel`, a copy without some heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from headscope.api.analysis import study_of
from headscope.api.evaluation import ScoredModel
from headscope.api.options import PathName, Report, in_python
from headscope.api.ranking import Ranking, ranking_of
from headscope.api.removal import save_shrunk, shrunk_copy, shrunk_model
from headscope.api.selection import Heads
from headscope.api.texts import Text, prompts_or_texts, texts_in, texts_of
from headscope.config import Companions
from headscope.engine.overview import checkpoint_overview
from headscope.errors import ConfigError
from headscope.evaluation.opened import Intact, load_intact
from headscope.files.output_checks import inputs_of
from headscope.formats.base import Checkpoint
from headscope.formats.convert import Converted
from headscope.formats.size import size
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.pruning.engines.base import EngineOptions
from headscope.pruning.engines.convert import converted
from headscope.pruning.options.refit import Refit
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.savings import Timing, timings
from headscope.pruning.removal.verify import Verification
from headscope.results.removal import Removal
from headscope.results.study import Study


class Model(ScoredModel):
    """A model whose heads can be measured, ranked, removed, captured and gated; `headscope.load` opens one.

    Every method leaves the model as it was: weights, device, mode (train or eval), hooks, attention implementation,
    which parameters need gradients. Nothing is written unless an output is given.

    `options` of a method are those of its command by their names, with underscores: ConfigError for an unknown one,
    with the nearest.
    """

    @in_python
    def analyze(
        self,
        text: Text | None = None,
        *,
        only: str | Iterable[str] | None = None,
        importance: bool | Literal["none", "cheap", "all"] = "none",
        parse: PathName | None = None,
        mask: Heads | None = None,
        out: PathName | None = None,
        figures: bool = True,
        force: bool = False,
        progress: Report = False,
        **options: Any,
    ) -> Study:
        """Measure every head on a text: what `headscope analyze` does.

        text: a file's path (one sentence a line, `.gz` too), a list of sentences, a list of pairs (sentence,
            translation), or a pair (source, target) of two texts. Files are read line by line and never held.
        only: names of analyses or groups of them; default: all that are cheap and fit.
        importance: measure also how much the model relies on each head: True (or "cheap") by what takes a few passes,
            "all" also by what takes heads out one by one.
        parse: "stanza", or a CoNLL-U file with the parses of the sentences (or with the text, where there is none).
        mask: heads that are masked.
        out: a folder to write the files of the run into, with `figures`; it must be empty unless `force` is given.
        progress: True shows a bar; a function is called as `progress(what, done, total)`.
        options: those of `headscope.config.AnalyzeOptions` (`skip`, `also`, `max_sentences`, `seed`, …), all that
            analyses declare (`relations`, `rules`, …), and more text: `target` (translations, without which the encoder
            alone is measured), `second` (the other texts of pairs), `labels` (what a classifier should say: a file, or
            a class for each sentence); or `clean`, `corrupt` and `answer`: prompts, the same prompts with another
            answer (as many subwords each), and the answers to the clean ones, alone or in pairs with a wrong one.

        Ctrl-C ends the work; the study then covers what was done (`complete` is False, `left_out` names the rest).
        ConfigError, DataError and CheckpointError, each with one line, for whatever the caller can fix.
        """
        if isinstance(importance, bool):
            importance = "cheap" if importance else "none"
        texts = prompts_or_texts(options, text)
        settings = {**options, "only": only, "importance": importance, "parse": parse, "mask": mask}
        where: dict[str, Any] = {"out": out, "figures": figures, "force": force, "progress": progress}
        return study_of(self.checkpoint, texts, settings, gates=self.gates, **where)

    @in_python
    def rank(
        self,
        text: Text | None = None,
        *,
        by: str,
        study: Study | None = None,
        parse: PathName | None = None,
        protect: Heads | None = None,
        progress: Report = False,
        **options: Any,
    ) -> Ranking:
        """Rank heads by a criterion: what `headscope prune rank --by` does.

        by: a criterion ("gradient", "lrp", "confidence", "magnitude", "random", …), a column of `study.heads`, or a CSV
            file with site,layer,head and scores, of which `column` names one.
        text, parse: what it is measured on; see `analyze`. Criteria about parameters need none.
        study: take the column of this study instead of measuring.
        protect: heads that never go.
        options: `target`, `second`, `labels` of the text, `max_sentences` (500), and those of
            `headscope.pruning.options.rank.RankConfig` that say how heads are scored: `sites`, `keep_lowest` and
            `keep_highest` (where the criterion has no agreed direction, see `Ranking.direction`), `steps` (how often
            heads are scored anew, each time that `Ranking.lowest` is asked), `allocate`, `objective`, `damping`,
            `max_length`, `batch_tokens`, `seed`.

        ConfigError for an unknown criterion, with the nearest one.
        """
        texts, settings = texts_in(options, text), {**options, "by": by, "protect": protect}
        shown: dict[str, Any] = {"gates": lambda: self.gates, "progress": progress}
        return ranking_of(self.checkpoint, texts, settings, parse=parse, study=study, **shown)

    @in_python
    def remove(
        self,
        heads: Heads | None = None,
        *,
        keep_only: Heads | None = None,
        merge_kv: int | Iterable[int] | None = None,
        text: Text | None = None,
        refit: Refit | None = None,
        valid: Text | None = None,
        export: str | Iterable[str] | None = None,
        **options: Any,
    ) -> SmallModel:
        """A smaller and faster copy without some heads, with the outputs of this model with these heads masked.

        heads: names, or the result of `Ranking.lowest`.
        keep_only: instead, the heads that stay, of the sites that they are of.
        merge_kv: instead, all heads stay, and the key/value heads of every layer (of each, by a number for each) become
            so many, each the mean of several: of neighbours, or, with `merge_by`, of neighbours by these scores of
            heads (a mapping or a file). With `allocate="measured"` the number is a mean, and each layer keeps as many
            as cost least on `text`.
        text: what both models are compared on, its first `max_sentences` (32); default: a sample that ships.
        refit: `hs.Refit(method="least-squares")` refits what is left of the output projections, in closed form, on
            `text`; method "mean" moves the mean of the removed heads into the bias. The copy then has the outputs of
            the refitted masked model, and its `compensation` says what that is worth on text that was held out.
        valid: that text; default: the last fifth of `text`. `hs.Texts(…, labels=…)` has what belongs to it.
        export: how the copy will be saved, where it must be built accordingly: "masked" keeps all sizes and sets the
            output of the heads to zero (for models whose heads cannot be removed one by one); "native" is a plain
            class; with "gguf" a refit adds no bias that llama.cpp could not read.
        options: `target`, `second`, `labels` of the text, and `merge_by`, `allocate`, `max_sentences`, `metric`,
            `margin`, `bleu_tokenize` and `pad` of `headscope.pruning.options.remove.RemoveConfig`.

        ConfigError for heads that cannot be removed (such as part of a key/value group), CheckpointError where the
        outputs differ.
        """
        if self.gates:
            raise ConfigError("heads are gated now; remove them outside of the block")
        which: dict[str, Any] = {"heads": heads, "keep_only": keep_only, "merge_kv": merge_kv, "export": export}
        texts, held_out = texts_in(options, text), texts_of(valid)
        shrunk = shrunk_copy(self.checkpoint, {**options, **which}, text=texts, held_out=held_out, refit=refit)
        return SmallModel(shrunk, companions=self._companions, whole=self.checkpoint)

    @in_python
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

        text: what heads are ranked and the others refitted on; see `analyze`.
        valid: text that the copy is judged on and that nothing else sees; default: the last fifth of `text`.
        protect: heads that stay.
        options: `target`, `second`, `labels` of the text, and those of
            `headscope.pruning.options.shrink.ShrinkConfig`: `keep` or `keep_fraction` (how many heads stay) or
            `max_drop` ("0.5", "1%": the smallest copy that is not worse by more, at 95 %; the default, 1%), `by`,
            `allocate`, `sites`, `compensate`, `check` (a file with the second text), `metric`, `export`, …

        `quality` of the copy is on `valid`, `elsewhere` on the second text. ConfigError where no size is as good.
        """
        if self.gates:
            raise ConfigError("heads are gated now; shrink the model outside of the block")
        texts, judged = texts_in(options, text), texts_of(valid)
        settings = {**options, "protect": protect}
        shrunk = shrunk_model(self.checkpoint, texts, judged, settings, progress=progress)
        return SmallModel(shrunk, companions=self._companions, whole=self.checkpoint)

    @in_python
    def overview(self) -> dict[str, Any]:
        """Format, architecture, attention by site, parameters by part, tokenizer, fitting analyses.

        What `headscope show --json` prints. CheckpointError where the model's heads cannot be seen.
        """
        return checkpoint_overview(self.checkpoint)

    @in_python
    def convert(
        self,
        folder: PathName,
        *,
        to: str,
        quantize: str = "none",
        force: bool = False,
        push_to: str | None = None,
        public: bool = False,
    ) -> Converted:
        """Write the model in another format, or for an engine: what `headscope convert` does.

        folder: must be empty, unless `force` allows to replace an earlier conversion in it.
        to: "native" or "huggingface" (fairseq, MHR, story-of-heads and native Transformers), "gguf" (Llama-like models
            of transformers, also with heads removed) or "onnx", or a format of another package.
        quantize, push_to, public: as in `SmallModel.save`.

        ConfigError for a model that is of no such format, CheckpointError where the format cannot express it, or where
        what was written and read again gives other logits; then nothing is left behind.
        """
        engine, inputs = EngineOptions(quantize=quantize), inputs_of(self._companions)
        more: dict[str, Any] = {"inputs": inputs, "force": force, "push_to": push_to, "public": public}
        return converted(self.checkpoint, Path(folder), to=to, options=engine, **more)


class SmallModel(Model):
    """The result of `Model.remove`: a `Model` that can be saved.

    It is a copy; the original is unchanged. `model` is the torch module (a transformers model if the original is one),
    which may be trained before it is saved.
    """

    def __init__(self, shrunk: Shrunk, *, companions: Companions, whole: Checkpoint) -> None:
        super().__init__(shrunk.checkpoint, companions=companions)
        self._shrunk, self._whole = shrunk, ref(whole)

    def _made_of(self) -> Intact:
        """The model that heads were removed from: as it is open, else from its files."""
        whole = self._whole()
        return Intact(whole) if whole is not None else load_intact(self._shrunk.source, self._opened_as)

    @property
    def removed(self) -> tuple[HeadId, ...]:
        """The removed heads, as numbered in the whole model."""
        return self._shrunk.removal.removed

    @property
    def verified(self) -> Verification:
        """The difference from the whole model with these heads masked."""
        return self._shrunk.verified

    @property
    def compensation(self) -> dict[str, Any] | None:
        """Method, errors of every refitted module, and the performance on held-out text; None without `refit`."""
        return _record(self._shrunk.compensated)

    @property
    def quality(self) -> dict[str, Any] | None:
        """A metric before and after on held-out text, and the test of non-inferiority; None without text."""
        return _record(self._shrunk.quality)

    @property
    def elsewhere(self) -> dict[str, Any] | None:
        """The same on a second text, of another kind, which `Model.shrink` measures; else None."""
        return _record(self._shrunk.elsewhere)

    @cached_property
    def sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Parameters, heads, bytes, floating point operations and cache, "before" and "after"."""
        with eval_mode(self.model):
            after = size(self._shrunk.checkpoint, self._shrunk.data.feeds)
        return {"before": asdict(self._shrunk.before), "after": asdict(after)}

    @in_python
    def times(self, *, rounds: int = 5, batch: int = 64) -> list[Timing]:
        """Median seconds of the whole model and of this one, in turns: one sentence, `batch` of them, beam search."""
        whole, small = self._whole(), self._shrunk
        if whole is None:
            raise ConfigError(
                "the whole model is no longer open, and times are of both; keep it while they are measured"
            )
        if rounds < 1 or batch < 1:
            raise ConfigError(f"rounds {rounds}, batch {batch}: at least 1 is needed")
        with eval_mode(whole.model), eval_mode(small.checkpoint.model):
            return timings(whole, small.checkpoint, small.data, batch=batch, rounds=rounds)

    @in_python
    def save(
        self,
        folder: PathName,
        *,
        export: str | Iterable[str] | None = None,
        onnx: bool = False,
        quantize: str = "none",
        force: bool = False,
        push_to: str | None = None,
        public: bool = False,
    ) -> Removal:
        """Write the checkpoint, open what was written, and compare it with the model in memory.

        folder: must be empty, unless `force` allows to replace an earlier removal in it.
        export: as `headscope prune remove --export`. Hugging Face models have "self-contained" (default), which opens
            with headscope and, with `trust_remote_code=True`, without it, and "native", the plain class where that can
            say so. Other models keep their own format. "gguf" besides ("native,gguf") writes `model.gguf` (llama.cpp).
        onnx: write `model.onnx` besides.
        quantize: "q8_0" stores the matrices of `model.gguf` in 8 bits.
        push_to: "user/name" on the model hub, where the complete folder is pushed with its card. A new repository is
            private unless `public` is given; the token is that of `hf auth login`, or HF_TOKEN.

        OutputError where the folder cannot be used or pushed, ConfigError where the export cannot hold the model,
        CheckpointError where the saved model has other outputs; then nothing is left behind.
        """
        engine = EngineOptions(quantize=quantize)
        more: dict[str, Any] = {"options": engine, "force": force, "push_to": push_to, "public": public}
        return save_shrunk(self._shrunk, folder, companions=self._companions, export=export, onnx=onnx, **more)


def _record(measured: Any) -> dict[str, Any] | None:
    return None if measured is None else measured.record()
