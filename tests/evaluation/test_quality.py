"""Evaluation against sacreBLEU called directly, against slow loops, and against the numbers of the MHR fork."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from torch.utils._python_dispatch import TorchDispatchMode

from headscope.attribution.objectives import base as objectives
from headscope.bootstrap import Bootstrap
from headscope.config import Companions
from headscope.config.commands import EvaluateConfig
from headscope.data.corpus import open_corpus
from headscope.data.encoded import IGNORED, Batch, pad_side
from headscope.errors import ConfigError, DataError
from headscope.evaluation import likelihood as scoring
from headscope.evaluation import opened
from headscope.evaluation.before_after import make_quality_task, quality_change
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood, token_sums
from headscope.evaluation.quality import Evaluation, text_score
from headscope.evaluation.run import _measure, loss_columns, run_each_head, run_evaluation
from headscope.evaluation.translation import RAW, TOKENISED, TextMode, text_mode
from headscope.formats.base import open_checkpoint
from headscope.heads import HeadId, Site, all_heads
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.moments import text_batches
from tests.makers.shared import write_lines
from tests.oracles import checkpoints, speakers, tiny
from tests.oracles.checkpoints import SOURCES, TARGETS

HYPOTHESES = ["The cat sat on a mat.", "A dog runs, quickly!", "nothing"]
REFERENCES = ["The cat sat on the mat.", "The dog ran quickly!", "Nothing at all"]
TEXTS = ["ah bi ck", "aj", "bl ci ak bh cj", "unseen ah"]

Evaluate = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Evaluate:
    """Evaluate a checkpoint of this process on lines of text."""

    def evaluate(checkpoint: Any, source: list[str], target: list[str] | None = None, **options: Any) -> Any:
        monkeypatch.setattr(opened, "open_configured", lambda *_, **__: checkpoint)
        config = EvaluateConfig(
            checkpoint="memory",
            source=write_lines(tmp_path / "source", source),
            target=None if target is None else write_lines(tmp_path / "target", target),
            **{"bootstrap": 20, **options},
        )
        return run_each_head(config) if config.each_head else run_evaluation(config)

    return evaluate


def value(evaluation: Evaluation, metric: str) -> float:
    (score,) = [entry for entry in evaluation.scores if entry.metric == metric]
    return score.value


@pytest.mark.parametrize(
    ("mode", "tokenizer", "lower"),
    [
        (RAW, "13a", False),
        (TOKENISED, "none", True),
        *((TextMode(tokenize=n), n, False) for n in ("zh", "char", "intl")),
    ],
)
def test_bleu_and_chrf_are_sacrebleus(mode: TextMode, tokenizer: str, lower: bool) -> None:
    hypotheses, references = [*HYPOTHESES, "我今天在學校看書。"], [*REFERENCES, "我今天去學校看書。"]
    bleu, chrf = (text_score(name, hypotheses, references, text=mode) for name in ("bleu", "chrf"))
    theirs = BLEU(tokenize=tokenizer, lowercase=lower), CHRF(lowercase=lower)
    expected = [metric.corpus_score(hypotheses, [references]).score for metric in theirs]
    assert [bleu.value, chrf.value] == expected
    assert [bleu.signature, chrf.signature] == [str(metric.get_signature()) for metric in theirs]
    assert ("lower-case" in bleu.name) is lower and ("lower-case" in chrf.name) is lower


@pytest.mark.parametrize(
    "language", ["zh", "zho_Hans", "zh_CN", "jpn_Jpan", "ja_XX", "ko", "tha_Thai", "jav_Latn", "de"]
)
def test_bleus_tokenizer_is_that_of_the_language(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in sacreBLEU for its test sets, for any spelling of a language code."""
    code = {"zho": "zh", "jpn": "ja"}.get(language[:3], language[:2] if language != "jav_Latn" else "jv")
    monkeypatch.setattr(model := checkpoints.small(), "writes", language)
    if code == "th":
        assert text_mode(model) == (TextMode(tokenize="char"), [])
    elif code in ("ja", "ko"):
        mode, notes = text_mode(model)  # MeCab is not installed here
        assert mode.tokenize == "char" and f"sacrebleu[{code}]" in notes[0] and BLEU._TOKENIZER_MAP[code] in notes[0]
        with pytest.raises(ConfigError, match=rf"^--bleu-tokenize {code}-mecab: .*sacrebleu\[{code}\]"):
            text_mode(model, tokenize=f"{code}-mecab")
    else:
        assert text_mode(model) == (TextMode(tokenize=BLEU._TOKENIZER_MAP.get(code, "13a")), [])
    assert text_mode(model, tokenize="intl")[0].tokenize == "intl"
    with pytest.raises(ConfigError, match=r"^--bleu-tokenize"):
        text_mode(model, "tokenised-lowercase", "zh")


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_intervals_are_percentiles_of_resampled_corpora(name: str) -> None:
    hypotheses, references = HYPOTHESES * 5, REFERENCES * 5
    bootstrap = Bootstrap(seed=3, replicates=50)
    score = text_score(name, hypotheses, references, bootstrap=bootstrap)
    theirs, resamples = BLEU() if name == "bleu" else CHRF(), []
    for times in bootstrap.draws(15).int().tolist():
        indices = [number for number, count in enumerate(times) for _ in range(count)]
        corpora = [[texts[number] for number in indices] for texts in (hypotheses, references)]
        resamples.append(theirs.corpus_score(corpora[0], [corpora[1]]).score)
    assert [score.low, score.high] == pytest.approx(np.quantile(resamples, [0.025, 0.975]))
    assert score.low < score.value < score.high


def slow_native(checkpoint: Any, source: str, target: Any) -> tuple[float, int, int]:
    """Σ -log p, hits and tokens of one sentence, prefix by prefix."""
    model, words = checkpoint.model, checkpoint.target
    tokens = [*words.encode(source if target is None else target), words.end]
    memory = None
    if target is not None:
        memory = model.encode(torch.tensor([[*checkpoint.source.encode(source), checkpoint.source.end]]))
    nll, right = 0.0, 0
    for position, token in enumerate(tokens):
        states = model.decode(torch.tensor([[words.start, *tokens[:position]]]), memory)
        log_p = model.logits(states)[0, -1].log_softmax(-1)
        nll -= float(log_p[token])
        right += int(log_p.argmax()) == token
    return nll, right, len(tokens)


@pytest.mark.parametrize("decoder_only", [False, True])
@pytest.mark.parametrize("tokens", [1, 20, 1000])
@torch.no_grad()
def test_perplexity_and_accuracy_are_those_of_a_slow_loop(run: Evaluate, decoder_only: bool, tokens: int) -> None:
    checkpoint = checkpoints.small(decoder_only=decoder_only)
    targets = None if decoder_only else TARGETS
    slow = [slow_native(checkpoint, text, targets and targets[n]) for n, text in enumerate(SOURCES)]
    result = run(checkpoint, SOURCES, targets, metrics=("perplexity", "accuracy"), batch_tokens=tokens)
    assert result.sentences["tokens"].tolist() == [count for *_, count in slow]
    assert result.sentences["nll"].tolist() == pytest.approx([nll for nll, *_ in slow], abs=1e-9)
    nll, right, count = (sum(column) for column in zip(*slow, strict=True))
    assert (result.tokens, result.nll) == (count, pytest.approx(nll))
    assert value(result, "perplexity") == pytest.approx(math.exp(nll / count))
    assert value(result, "accuracy") == pytest.approx(right / count)


@torch.no_grad()
def test_masked_token_perplexity_hides_each_token_once(run: Evaluate) -> None:
    checkpoint = checkpoints.huggingface("bert")
    nll, count = 0.0, 0
    for text in TEXTS:
        ids = checkpoint.tokenizer(text, return_tensors="pt").input_ids
        for position in range(1, ids.shape[1] - 1):
            hidden = ids.clone()
            hidden[0, position] = tiny.MASK
            nll -= float(checkpoint.model(hidden).logits[0, position].log_softmax(-1)[ids[0, position]])
            count += 1
    for tokens in (7, 1000):
        result = run(checkpoint, TEXTS, batch_tokens=tokens)
        assert (result.tokens, result.nll) == (count, pytest.approx(nll, abs=1e-9))
        assert [score.name for score in result.scores] == ["masked-token perplexity", "token accuracy"]


def test_hiding_a_random_share_depends_on_the_seed_and_not_on_the_batch(run: Evaluate) -> None:
    checkpoint, texts = checkpoints.huggingface("bert"), [" ".join(tiny.WORDS[:20]), *TEXTS]
    first, second, other = (
        run(checkpoint, texts, hiding="random", batch_tokens=tokens, seed=seed)
        for tokens, seed in ((30, 1), (1000, 1), (1000, 2))
    )
    assert first.sentences["tokens"].tolist() == [3, 1, 1, 1, 1]
    assert first.nll == pytest.approx(second.nll) and second.nll != pytest.approx(other.nll)
    assert "hide:random" in str(first.signature)


def test_what_a_length_limit_cuts_off_is_not_counted_and_is_told(run: Evaluate) -> None:
    checkpoint = checkpoints.small()
    full = run(checkpoint, ["a b"], ["a b c d e f"], metrics=("perplexity",))
    short = run(checkpoint, ["a b"], ["a b c d e f"], metrics=("perplexity",), max_length=4)
    assert (full.tokens, short.tokens) == (7, 4)
    assert "cut off at the length limit: 1" in short.remarks[0]
    with pytest.raises(DataError, match=r"source:1: 7.*4"):
        run(checkpoint, ["a b"], ["a b c d e f"], metrics=("perplexity",), max_length=4, long="refuse")


def test_token_sums_leave_out_what_is_ignored_and_widen_half_precision() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float16)
    labels = torch.tensor([[1, IGNORED, 6], [IGNORED] * 3])
    nll, right, count, _ = token_sums(logits, labels)
    log_p = logits.float().log_softmax(-1)
    assert nll.tolist() == pytest.approx([-float(log_p[0, 0, 1] + log_p[0, 2, 6]), 0.0], abs=1e-5)
    assert count.tolist() == [2, 0] and right[1] == 0


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_labels_are_counted_in_pieces_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(5)
    logits, labels = torch.randn(3, 7, 5, generator=draws), torch.randint(0, 5, (3, 7), generator=draws)
    labels[1, 2:] = IGNORED
    full_sums = token_sums(logits, labels, 5)
    monkeypatch.setattr("headscope.evaluation.likelihood.POSITIONS", 2)
    piecewise_sums = token_sums(logits, labels, 5)
    real = labels != IGNORED
    assert full_sums[3][..., 2].sum(dim=0).tolist() == labels[real].bincount(minlength=5).tolist()
    for expected, part in zip(full_sums, piecewise_sums, strict=True):
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("loss", [token_sums, objectives.negative_log_likelihood])
def test_losses_copy_the_logits_of_a_few_positions_at_a_time(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 7, 101, dtype=torch.float64)
    labels = torch.randint(101, (5, 7)).masked_fill(torch.arange(7) >= torch.tensor([[7], [3], [5], [2], [7]]), IGNORED)
    expected = loss(logits, labels)
    for module in (scoring, objectives):
        monkeypatch.setattr(module, "CELLS", 3 * 101 + 1)
    with LargestTensor() as largest:
        piecewise = loss(logits, labels)
    assert largest.numbers == 3 * 101
    torch.testing.assert_close(piecewise, expected, rtol=1e-12, atol=0)
    leaf, factors = logits.clone().requires_grad_(), torch.randn(5, dtype=torch.float64)
    loss(leaf, labels)[0].mul(factors).sum().backward()
    real = labels != IGNORED
    by_loss = (real * factors[:, None])[..., None]
    gradient = logits.softmax(-1).sub(torch.nn.functional.one_hot(labels * real, 101)).mul(by_loss)
    torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize(("kind", "positions"), [("native", 10), ("bert", 12)])
def test_an_interrupted_pass_keeps_what_was_done_and_nothing_else(
    run: Evaluate, kind: str, positions: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Complete sentences are kept, in another file; also for an encoder, which reads a sentence once a token."""
    checkpoint: Any = checkpoints.small() if kind == "native" else checkpoints.huggingface(kind)
    texts = (SOURCES, TARGETS) if kind == "native" else (TEXTS,)
    full = run(checkpoint, *texts, batch_tokens=positions, metrics=("perplexity", "accuracy")).sentences
    counts = []

    @contextmanager
    def interrupt(title: str, total: int) -> Iterator[Callable[[int], None]]:
        def step(count: int) -> None:
            counts.append(count)
            if sum(counts):
                raise KeyboardInterrupt

        yield step

    monkeypatch.setattr(_measure, "__kwdefaults__", {**(_measure.__kwdefaults__ or {}), "progress": interrupt})
    table = tmp_path / "table.csv"
    result = run(checkpoint, *texts, batch_tokens=positions, per_sentence=table, metrics=("perplexity", "accuracy"))
    assert not result.complete and f"{sum(counts)} of {len(full)} (interrupted)" in str(result.signature)
    assert 0 < len(result.sentences) == sum(counts) < len(full)
    pd.testing.assert_frame_equal(result.sentences, full.loc[result.sentences.index])
    assert not table.exists() and len(pd.read_csv(f"{table}.partial")) == sum(counts)
    assert result.remarks[-1] == f"{table}.partial has the sentences that were done"
    counts.clear()
    heads = run(checkpoint, *texts, batch_tokens=positions, out=table, each_head=True)
    assert not heads.complete and not table.exists() and "head" in pd.read_csv(f"{table}.partial")


@pytest.mark.parametrize("mixing", [{}, {"self_mixing": "alpha.v1"}])
def test_each_head_gives_what_separate_runs_give(run: Evaluate, mixing: dict[str, Any]) -> None:
    checkpoint = checkpoints.small(**mixing)
    base = "encoder-self.0.1"
    table = run(checkpoint, SOURCES, TARGETS, each_head=True, mask=base, batch_tokens=25).table
    heads = list(all_heads(checkpoint.layout))
    assert len(table) == len(heads) and table["site"][0] == "" and pd.isna(table["layer"][0])
    assert table["nll"][1:].is_monotonic_decreasing
    for row in table.iloc[[0, 1, 5, 9, len(table) - 1]].itertuples():
        mask = base if not row.site else f"{base},{row.site}.{row.layer}.{row.head}"
        single = run(checkpoint, SOURCES, TARGETS, mask=mask, metrics=("perplexity", "accuracy"))
        assert row.nll == pytest.approx(single.nll, abs=1e-9)
        assert row.accuracy == pytest.approx(value(single, "accuracy"))
        assert row.perplexity == pytest.approx(value(single, "perplexity"))


def test_each_head_differences_have_paired_intervals(run: Evaluate) -> None:
    checkpoint = checkpoints.small()
    result = run(checkpoint, SOURCES, TARGETS, each_head=True, heads="cross.0.*")
    assert len(result.table) == 4 and result.complete
    heads = result.table.iloc[1:]
    names = [f"nll_per_token_difference{end}" for end in ("_low", "", "_high")]
    assert (heads[names[0]] <= heads[names[1]]).all() and (heads[names[1]] <= heads[names[2]]).all()
    assert result.table[names].iloc[0].tolist() == [0, 0, 0]


def test_each_head_translates_where_it_is_told_to(run: Evaluate, tmp_path: Path) -> None:
    checkpoint = checkpoints.small()
    out = tmp_path / "heads.csv"
    result = run(checkpoint, SOURCES, TARGETS, each_head=True, heads="cross.1.*", metrics=("chrf",), out=out)
    assert result.by == "chrf" and result.table["chrf"][1:].is_monotonic_increasing
    row = result.table.iloc[1]
    single = run(checkpoint, SOURCES, TARGETS, mask=f"cross.1.{row['head']}", metrics=("chrf",))
    assert row["chrf"] == value(single, "chrf")
    assert list(pd.read_csv(out)) == ["site", "layer", "head", "chrf", "chrf_difference"]


@pytest.mark.slow
def test_the_forks_likelihoods_masks_and_losses_are_reproduced(shared: Path) -> None:
    folder = shared / "oracles" / "mhr"
    data, oracle = folder / "data", folder / "alpha" / "oracle"
    companions = Companions(dicts=data, bpe=data / "codes")
    checkpoint = open_checkpoint(str(oracle.parent / "checkpoint_best.pt"), companions=companions)
    corpus = open_corpus(data / "test.de", target=data / "test.en")
    kinds = {Site.ENCODER_SELF: "enc-enc", Site.DECODER_SELF: "dec-dec", Site.CROSS: "enc-dec"}
    heads = [HeadId(site, layer, (3 * layer + 2) % 8) for site in kinds for layer in (0, 2)]
    result = likelihood(checkpoint, corpus, LikelihoodOptions(4096, 512), masks=[[], *([head] for head in heads)])
    reference = json.loads((oracle / "teacher_forced_reference.json").read_text())
    assert result.counts.tolist() == reference["tokens_per_sentence"]
    assert result.first.tolist() == pytest.approx(reference["nll_per_sentence"], abs=1e-4)
    masks = json.loads((oracle / "mask_reference.json").read_text())
    expected = [masks["masked"][f"{kinds[head.site]}/{head.layer}"][head.head] for head in heads]
    sums = result.nll.total.sum(dim=0).tolist()
    assert sums == pytest.approx([masks["unmasked"], *expected], abs=1e-3)
    columns = loss_columns(result, Bootstrap(seed=1, replicates=10))
    assert columns["nll_per_token"][0] / math.log(2) == pytest.approx(reference["nll_per_token_base2"], abs=1e-6)
    losses = json.loads((oracle / "loss_reference.json").read_text())["no_gamma"]
    assert result.first[:16].sum() == pytest.approx(losses["nll_loss"], abs=1e-3)
    assert result.counts[:16].sum() == losses["sample_size"]
    assert _smoothed_loss(checkpoint, data, count=16) == pytest.approx(losses["loss"], abs=1e-3)


@torch.no_grad()
def _smoothed_loss(checkpoint: Any, data: Path, *, count: int) -> float:
    """Label-smoothed loss (0.1) of the first sentences, from logits and labels."""
    texts = [(data / f"test.{name}").read_text(encoding="utf-8").splitlines()[:count] for name in ("de", "en")]
    source, target = (pad_side(checkpoint.encode(texts[n], side=("source", "target")[n], limit=512)) for n in (0, 1))
    log_p = checkpoint.logits(Batch(torch.arange(count), 0, source, target)).log_softmax(-1)
    total = 0.0
    for row, labels in zip(log_p, checkpoint.labels(texts[1], limit=512), strict=True):
        rows = row[: len(labels)]
        nll = -rows.gather(1, torch.tensor(labels)[:, None]).sum()
        total += float(0.9 * nll - 0.1 / rows.shape[1] * rows.sum())
    return total


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_batches_are_smaller_where_there_are_many_words_to_predict(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind)
    task = make_quality_task(checkpoint, corpus)
    full, full_damage = quality_change(checkpoint, checkpoint, task), DamageMeter(checkpoint, corpus).of_intact
    sizes = list[int]()

    logits = type(checkpoint).logits

    def record_size(self: Any, batch: Batch, *more: Any) -> torch.Tensor:
        sizes.append(batch.positions)
        return logits(self, batch, *more)

    monkeypatch.setattr(type(checkpoint), "logits", record_size)
    longest = max(batch.longest for batch in text_batches(checkpoint, corpus, None))
    monkeypatch.setattr(scoring, "LOGITS", longest * max(checkpoint.vocabularies))
    change = quality_change(checkpoint, checkpoint, make_quality_task(checkpoint, corpus))
    damage = DamageMeter(checkpoint, corpus).of_intact
    assert max(sizes) == longest and len(sizes) > 3
    assert change.before.value == pytest.approx(full.before.value, rel=1e-12)
    assert damage.value == pytest.approx(full_damage.value, rel=1e-12)
