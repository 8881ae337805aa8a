"""`Model`: analysis, ranking, removal, evaluation and translation; `SmallModel`, a copy without some heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

from headscope.api.analysis import study_of
from headscope.api.evaluation import ScoredModel
from headscope.api.options import AnalyzeMore, FileMore, PathName, Report, ShrinkMore, in_python, wrong_type
from headscope.api.ranking import Ranking, ranking_of
from headscope.api.removal import (
    HeadScores,
    going,
    merge_of,
    save_shrunk,
    shrunk_copy,
    shrunk_model,
    times_of,
)
from headscope.api.selection import Heads
from headscope.api.texts import AnswerList, LabelList, Text, prompt_texts, texts_of
from headscope.config import Companions
from headscope.config.inputs import BleuTokenizer
from headscope.engine.overview import checkpoint_overview
from headscope.errors import ConfigError, check_one_given
from headscope.evaluation.opened import Intact, load_intact
from headscope.files.output_checks import inputs_of
from headscope.formats.base import Checkpoint
from headscope.formats.convert import Converted
from headscope.formats.size import size
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.pruning.engines.base import EngineOptions
from headscope.pruning.engines.convert import converted
from headscope.pruning.options.rank import Allocation
from headscope.pruning.options.refit import DAMPING, Refit
from headscope.pruning.options.remove import MergeAllocation
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.savings import Timing
from headscope.pruning.removal.verify import Verification
from headscope.results.removal import Removal
from headscope.results.study import Study

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Model(ScoredModel):
    """A model whose heads can be measured, ranked, removed, captured and gated; `headscope.load` opens one.

    Every method leaves the model as it was: weights, device, mode (train or eval), hooks, attention implementation,
    which parameters need gradients. Nothing is written unless an output is given.
    """

    @in_python
    def analyze(
        self,
        text: Text | None = None,
        *,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        clean: Text | None = None,
        corrupt: Text | None = None,
        answer: AnswerList | None = None,
        parse: PathName | None = None,
        only: str | Iterable[str] | None = None,
        importance: bool | Literal["none", "cheap", "all"] = "none",
        mask: Heads | None = None,
        out: PathName | None = None,
        figures: bool = True,
        force: bool = False,
        progress: Report = False,
        **options: Unpack[AnalyzeMore],
    ) -> Study:
        """Measure every head on a text: what `headscope analyze` does.

        text: a file's path (one sentence a line, `.gz` too), a list of sentences, a list of pairs (sentence,
            translation), or a pair (source, target) of two texts. Files are read line by line and never held.
        target: the translations, for decoders with an encoder; without them the encoder alone is measured.
        second: the other texts of pairs that an encoder reads together.
        labels: what a classifier should say, which importances then explain: a file as `--labels` takes it, or the
            class of every sentence, by name or number.
        clean, corrupt, answer: instead of a text, prompts, the same prompts with another answer (as many subwords
            each), and the answers to the clean ones, alone or in pairs with a wrong one: which heads the model needs to
            say them. A decoder with an encoder says them after `target`.
        parse: "stanza", or a CoNLL-U file with the parses of the sentences (or with the text, where there is none).
        only: names of analyses or groups of them; default: all that are cheap and fit. `skip` and `also` are further
            options, as are all that `headscope.config.AnalyzeOptions` lists (`max_sentences`, `seed`, `objective`, …)
            and all that analyses declare (`relations`, `rules`, …).
        importance: measure also how much the model relies on each head: True (or "cheap") by what takes a few passes,
            "all" also by what takes heads out one by one.
        mask: heads that are masked.
        out: a folder to write the files of the run into, with `figures`; it must be empty unless `force` is given.
        progress: True shows a bar; a function is called as `progress(what, done, total)`.

        Ctrl-C ends the work; the study then covers what was done (`complete` is False, `left_out` names the rest).
        ConfigError, DataError and CheckpointError, each with one line, for whatever the caller can fix.
        """
        settings = {**options, "only": () if only is None else only, "importance": importance, "parse": parse}
        if isinstance(importance, bool):
            settings["importance"] = "cheap" if importance else "none"
        if clean is corrupt is answer is None:
            texts = texts_of(text, target, second=second, labels=labels)
        elif any(other is not None for other in (text, second, labels)):
            raise ConfigError("clean has the text and answer what is right; leave out text, second and labels")
        else:
            texts = prompt_texts(clean, corrupt, answer, target=target)
        return study_of(
            self.checkpoint,
            texts,
            settings,
            mask=mask,
            gates=self.gates,
            out=out,
            figures=figures,
            force=force,
            progress=progress,
        )

    @in_python
    def rank(
        self,
        *,
        by: str,
        text: Text | None = None,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        parse: PathName | None = None,
        study: Study | None = None,
        column: str | None = None,
        sites: str | Iterable[str] = (),
        protect: Heads | None = None,
        keep_lowest: bool = False,
        keep_highest: bool = False,
        steps: int = 1,
        allocate: Allocation = "global",
        objective: str = "",
        damping: float = DAMPING,
        max_sentences: int = 500,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        seed: int = 1,
        progress: Report = False,
    ) -> Ranking:
        """Rank heads by a criterion: what `headscope prune rank --by` does.

        by: a criterion ("gradient", "lrp", "confidence", "magnitude", "random", …), a column of `study.heads`, or a CSV
            file with site,layer,head and scores, of which `column` names one.
        text, target, second, labels, parse: what it is measured on, of which the first `max_sentences` are read; see
            `analyze`. Criteria about parameters need none.
        study: take the column of this study instead of measuring.
        sites: only heads of these sites may go; default: all. Heads to `protect` never go.
        keep_lowest, keep_highest: which heads stay; default: as is agreed for the criterion, which `Ranking.direction`
            says. Columns without an agreed direction (`sink`, `distance`, …) need one of them.
        steps: how often heads are scored anew while some are taken out, each time that `Ranking.lowest` is asked.
        allocate: how many heads each layer keeps: "global", "per-layer", "uniform", "per-group" (as many of each
            group), or "measured", as the loss says once what is left is refitted.
        objective: what heads are judged by, a name of `--objective`; default: what fits the model.
        damping: ridge of criteria and allocations that refit, a share of the mean second moment.
        max_length, batch_tokens: subwords of a sentence, positions of a batch.
        seed: of criteria that draw random numbers.

        ConfigError for an unknown criterion, with the nearest one.
        """
        options = {
            **{"by": by, "column": column, "sites": sites, "keep_lowest": keep_lowest, "keep_highest": keep_highest},
            **{"steps": steps, "allocate": allocate, "objective": objective, "damping": damping, "seed": seed},
            **{"score_sentences": max_sentences, "max_length": max_length, "batch_tokens": batch_tokens},
        }
        return ranking_of(
            self.checkpoint,
            texts_of(text, target, second=second, labels=labels),
            options,
            protect=protect,
            parse=parse,
            study=study,
            gates=lambda: self.gates,
            progress=progress,
        )

    @in_python
    def remove(
        self,
        heads: Heads | None = None,
        *,
        keep_only: Heads | None = None,
        merge_kv: int | Iterable[int] | None = None,
        merge_by: HeadScores | None = None,
        allocate: MergeAllocation = "uniform",
        text: Text | None = None,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        max_sentences: int = 32,
        refit: Refit | None = None,
        valid: Text | None = None,
        metric: str = "",
        margin: str | None = None,
        bleu_tokenize: BleuTokenizer | None = None,
        export: str | Iterable[str] | None = None,
        pad: bool = False,
    ) -> SmallModel:
        """A smaller and faster copy without some heads, with the outputs of this model with these heads masked.

        heads: names, or the result of `Ranking.lowest`.
        keep_only: instead, the heads that stay, of the sites that they are of.
        merge_kv: instead, all heads stay, and the key/value heads of every layer (of each, by a number for each) become
            so many, each the mean of several: of neighbours, or, with `merge_by`, of neighbours by these scores of
            heads (a mapping or a file). With `allocate="measured"` the number is a mean, and each layer keeps as many
            as cost least on `text`.
        text, target, second, labels: what both models are compared on, its first `max_sentences`; see `analyze`.
            Default: a sample that ships with headscope.
        refit: `hs.Refit(method="least-squares")` refits what is left of the output projections, in closed form, on
            `text`; method "mean" moves the mean of the removed heads into the bias. The copy then has the outputs of
            the refitted masked model, and its `compensation` says what that is worth on text that was held out.
        valid: that text; default: the last fifth of `text`. `hs.Texts(…, labels=…)` has what belongs to it.
        metric, margin: what it is measured by before and after, and the loss that counts as none ("0.5", "1%"), as
            `quality` of the result says; default: accuracy of labels, perplexity, or the cosine of states, and 1%.
        bleu_tokenize: how BLEU splits text, as sacreBLEU calls it; default: as the language that is written needs.
        export: how the copy will be saved, where it must be built accordingly: "masked" keeps all sizes and sets the
            output of the heads to zero (for models whose heads cannot be removed one by one); "native" is a plain
            class; with "gguf" a refit adds no bias that llama.cpp could not read.
        pad: with export "native", fill every layer up with heads of zeros to as many as the layer that keeps most.

        ConfigError for heads that cannot be removed (such as part of a key/value group), CheckpointError where the
        outputs differ.
        """
        if self.gates:
            raise ConfigError("heads are gated now; remove them outside of the block")
        check_one_given({"heads, those that go": heads, "merge_kv": merge_kv, "keep_only": keep_only})
        if refit is not None and not isinstance(refit, Refit):
            raise wrong_type("refit", refit, "hs.Refit(method='least-squares')")
        done = shrunk_copy(
            self.checkpoint,
            going(self.checkpoint, heads, keep_only=keep_only),
            merge=merge_of(self.checkpoint, merge_kv, merge_by, allocate=allocate, has_text=text is not None),
            export=export,
            text=texts_of(text, target, second=second, labels=labels),
            max_sentences=max_sentences,
            calibration=refit or Refit(method="none"),
            held_out=texts_of(valid),
            metric=metric,
            margin=margin,
            bleu_tokenize=bleu_tokenize,
            pad=pad,
        )
        return SmallModel(done, companions=self._companions, whole=self.checkpoint)

    @in_python
    def shrink(
        self,
        *,
        text: Text | None = None,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        valid: Text | None = None,
        protect: Heads | None = None,
        progress: Report = False,
        **options: Unpack[ShrinkMore],
    ) -> SmallModel:
        """The whole way to a smaller copy: rank, allocate, refit, remove, verify, measure: `headscope prune shrink`.

        text, target, second, labels: what heads are ranked and the others refitted on; see `analyze`.
        valid: text that the copy is judged on and that nothing else sees; default: the last fifth of `text`.
        protect: heads that stay.
        options: `keep` or `keep_fraction` (how many heads stay) or `max_drop` ("0.5", "1%": the smallest copy that is
            not worse by more, at 95 %; the default, 1%), `by`, `allocate`, `sites`, `compensate`, `check` (a file with
            the second text), `metric`, `export` and others of `headscope.pruning.options.ShrinkConfig`.

        `quality` of the copy is on `valid`, `elsewhere` on the second text. ConfigError where no size is as good.
        """
        if self.gates:
            raise ConfigError("heads are gated now; shrink the model outside of the block")
        texts, judged = texts_of(text, target, second=second, labels=labels), texts_of(valid)
        done = shrunk_model(self.checkpoint, texts, judged, options, protect=protect, progress=progress)
        return SmallModel(done, companions=self._companions, whole=self.checkpoint)

    @in_python
    def overview(self) -> dict[str, Any]:
        """Format, architecture, attention by site, parameters by part, tokenizer, fitting analyses.

        What `headscope show --json` prints. CheckpointError where the model's heads cannot be seen.
        """
        return checkpoint_overview(self.checkpoint)

    @in_python
    def convert(
        self, folder: PathName, *, to: str, quantize: str = "none", force: bool = False, **more: Unpack[FileMore]
    ) -> Converted:
        """Write the model in another format, or for an engine: what `headscope convert` does.

        folder: must be empty, unless `force` allows to replace an earlier conversion in it.
        to: "native" or "huggingface" (fairseq, MHR, story-of-heads and native Transformers), "gguf" (Llama-like models
            of transformers, also with heads removed) or "onnx", or a format of another package.
        quantize: "q8_0" stores the matrices of a GGUF file in 8 bits.
        more: `push_to` and `public`, as in `SmallModel.save`.

        ConfigError for a model that is of no such format, CheckpointError where the format cannot express it, or where
        what was written and read again gives other logits; then nothing is left behind.
        """
        hub, inputs = dict[str, Any](more), inputs_of(self._companions)
        options = EngineOptions(quantize=quantize)
        return converted(self.checkpoint, Path(folder), to=to, options=options, inputs=inputs, force=force, **hub)


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
        return None if self._shrunk.compensated is None else self._shrunk.compensated.record()

    @property
    def quality(self) -> dict[str, Any] | None:
        """A metric before and after on held-out text, and the test of non-inferiority; None without text."""
        return None if self._shrunk.quality is None else self._shrunk.quality.record()

    @property
    def elsewhere(self) -> dict[str, Any] | None:
        """The same on a second text, of another kind, which `Model.shrink` measures; else None."""
        return None if self._shrunk.elsewhere is None else self._shrunk.elsewhere.record()

    @cached_property
    def sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Parameters, heads, bytes, floating point operations and cache, "before" and "after"."""
        with eval_mode(self.model):
            after = size(self._shrunk.checkpoint, self._shrunk.data.feeds)
        return {"before": asdict(self._shrunk.before), "after": asdict(after)}

    @in_python
    def times(self, *, rounds: int = 5, batch: int = 64) -> list[Timing]:
        """Median seconds of the whole model and of this one, in turns: one sentence, `batch` of them, beam search."""
        return times_of(self._shrunk, self._whole(), rounds=rounds, batch=batch)

    @in_python
    def save(
        self,
        folder: PathName,
        *,
        export: str | Iterable[str] | None = None,
        onnx: bool = False,
        quantize: str = "none",
        force: bool = False,
        **more: Unpack[FileMore],
    ) -> Removal:
        """Write the checkpoint, open what was written, and compare it with the model in memory.

        folder: must be empty, unless `force` allows to replace an earlier removal in it.
        export: as `headscope prune remove --export`. Hugging Face models have "self-contained" (default), which opens
            with headscope and, with `trust_remote_code=True`, without it, and "native", the plain class where that can
            say so. Other models keep their own format. "gguf" besides ("native,gguf") writes `model.gguf` (llama.cpp).
        onnx: write `model.onnx` besides.
        quantize: "q8_0" stores the matrices of `model.gguf` in 8 bits.
        more: with `push_to="user/name"` the complete folder is pushed to the model hub, with its card. A new repository
            is private unless `public` is given; the token is that of `hf auth login`, or HF_TOKEN.

        OutputError where the folder cannot be used or pushed, ConfigError where the export cannot hold the model,
        CheckpointError where the saved model has other outputs; then nothing is left behind.
        """
        hub, companions = dict[str, Any](more), self._companions
        options = EngineOptions(quantize=quantize)
        return save_shrunk(
            self._shrunk, folder, companions=companions, export=export, onnx=onnx, options=options, force=force, **hub
        )
