"""The training engine: its arithmetic, its batches, its schedules, and what it leaves on disk."""

import csv
import json
import math
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headscope.config import plain_options
from headscope.config.commands import TranslateOptions
from headscope.config.option import make_config
from headscope.data.corpus import open_corpus
from headscope.data.encoded import IGNORED
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import ConfigError, flag
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import read_lines
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, final_states
from headscope.results.training import Training
from headscope.training import losses, prepare, train_loop
from headscope.training.architecture import INITIAL
from headscope.training.checkpoints import Progress, average
from headscope.training.config import TrainConfig, TrainingPosition, rate
from headscope.training.prepare import TokenizedTexts, TrainingPairs, collate, epoch_plan, normaliser, without_labels
from headscope.training.run_state import TrainingRun
from headscope.training.trainer import make_run, train
from headscope.training.variant import Variant
from headscope.training.variants.widths import Baseline
from tests.makers.modules import ROOT
from tests.makers.ranks import run_all
from tests.makers.sweeps import scores
from tests.oracles import lessons
from tests.oracles.smoothing import smoothed_loss


def small(folder: Path, **more: Any) -> TrainConfig:
    """A run of seconds on the texts of the fixture."""
    texts = {f"{part}{side}": folder / f"{part}{side}" for part in ("", "valid_") for side in ("source", "target")}
    sizes = {"vocab_size": 60, "d_model": 16, "d_ffn": 24, "heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    course = {"max_tokens": 150, "updates": 6, "log_every": 2, "bleu_every": 0, "beam": 2}
    return make_config(TrainConfig, {"out": folder / "run", **texts, **sizes, **course, **more})


def baseline() -> Baseline:
    return Baseline(Baseline.Options())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of an invented language, each translated by spelling it backwards."""
    folder, chance = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(chance.choices("abdegiklmnorstu", k=chance.randint(2, 6))) for _ in range(40)]
    for part, count in (("", 150), ("valid_", 20)):
        lines = [chance.choices(words, k=chance.randint(2, 9)) for _ in range(count)]
        for side, step in (("source", 1), ("target", -1)):
            content = "".join(" ".join(word[::step] for word in line) + "\n" for line in lines)
            (folder / f"{part}{side}").write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def training(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run that learns: three epochs, with everything switched on."""
    more = {"updates": None, "max_epochs": 3, "average": 2, "bleu_every": 1, "bleu_sentences": 4}
    out = tmp_path_factory.mktemp("trained") / "run"
    config = small(texts, out=out, lr=0.02, warmup=10, norm="pre", **more)
    return train(config, baseline(), command=["train", "baseline"])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cells", [1, 40, 10**9])
def test_the_criterion_and_its_gradients_are_those_of_loops(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, cells: int
) -> None:
    monkeypatch.setattr(losses, "CELLS", cells)
    noise = torch.Generator().manual_seed(3)
    states, weight = (torch.randn(n, 5, dtype=torch.float64, generator=noise) for n in (7, 11))
    bias, labels = torch.randn(11, dtype=torch.float64, generator=noise), torch.randint(11, (7,), generator=noise)
    expected = smoothed_loss(states.tolist(), weight.tolist(), bias.tolist(), labels.tolist(), smoothing)
    sums = losses.smoothed_cross_entropy(states, weight, bias, labels, smoothing=smoothing)
    assert [x.item() for x in sums] == pytest.approx(list(expected), rel=1e-12)

    def criterion(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return losses.smoothed_cross_entropy(states, weight, bias, labels, smoothing=smoothing)[0]

    inputs = [x.requires_grad_() for x in (states, weight, bias)]
    assert torch.autograd.gradcheck(criterion, inputs)


def test_training_minimises_the_mean_over_target_tokens_of_all_micro_batches(texts: Path, tmp_path: Path) -> None:
    run = make_run(small(texts, out=tmp_path, precision="float64", dropout=0.0), baseline())
    groups = epoch_plan(run.data.train, tokens=150, seed=1, epoch=1)
    parts = [collate(run.data.train, group) for group in (groups[0], groups[3], groups[5])]
    run.criterion.train()
    sums = run.gradients(parts)
    gradients = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    run.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        logits = run.model.logits(final_states(run.model, part))
        assert part.labels is not None
        total = total + nn.functional.cross_entropy(
            logits.flatten(0, 1), part.labels.flatten(), ignore_index=IGNORED, label_smoothing=0.1, reduction="sum"
        )
    assert sums.tokens == sum(part.predictions for part in parts)
    assert sums.loss == pytest.approx(total.item(), rel=1e-12)
    (total / sums.tokens).backward()
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_seed_decides_about_weights_draws_and_dropout(texts: Path, tmp_path: Path) -> None:
    draws = []
    for index, seed in enumerate((1, 1, 2)):
        run = make_run(small(texts, out=tmp_path / str(index), seed=seed), baseline())
        weight = next(p for p in run.model.parameters() if p.ndim == 2)
        draws.append((weight.tolist(), torch.rand(3, generator=run.generator).tolist(), torch.rand(3).tolist()))
    for first, again, other in zip(*draws, strict=True):
        assert first == again != other


def pairs(count: int) -> TrainingPairs:
    chance = random.Random(count)
    source, target = (
        TokenizedTexts.of([[chance.randint(4, 30) for _ in range(chance.randint(1, 13))] for _ in range(count)])
        for _ in range(2)
    )
    vocabulary = Vocabulary(tuple(map(str, range(31))), Splitter("words"), start=1, end=2, prefix=(3,))
    return TrainingPairs(source, target, np.arange(count), vocabulary, vocabulary)


@pytest.mark.parametrize("tokens", [1, 37, 101, 10**6])
def test_every_epoch_has_every_sentence_once_and_no_batch_is_too_large(tokens: int) -> None:
    corpus = pairs(211)
    longest = np.maximum(*corpus.lengths())
    plans = [epoch_plan(corpus, tokens=tokens, seed=5, epoch=epoch) for epoch in (1, 2, 1)]
    for groups in plans:
        assert sorted(np.concatenate(groups).tolist()) == list(range(211))
        assert all(len(group) == 1 or len(group) * longest[group].max() <= tokens for group in groups)
    assert all(np.array_equal(*pair) for pair in zip(plans[0], plans[2], strict=True))
    assert [group.tolist() for group in plans[0]] != [group.tolist() for group in plans[1]]


def test_a_batch_holds_inputs_labels_and_masks() -> None:
    vocabulary = Vocabulary(tuple("abcdefghij"), Splitter("words"), start=1, end=2, pad=0)
    corpus = TrainingPairs(
        TokenizedTexts.of([[7, 8], [9]]), TokenizedTexts.of([[5], [5, 6, 4]]), np.array([0, 3]), vocabulary, vocabulary
    )
    batch = collate(corpus, np.array([0, 1]))
    assert batch.target is not None and batch.labels is not None
    assert batch.source.ids.tolist() == [[7, 8, 2], [9, 2, 0]]
    assert batch.source.real.tolist() == [[True] * 3, [True, True, False]]
    assert batch.source.special.tolist() == [[False, False, True], [False, True, False]]
    assert batch.target.ids.tolist() == [[1, 5, 0, 0], [1, 5, 6, 4]]
    assert batch.labels.tolist() == [[5, 2, IGNORED, IGNORED], [5, 6, 4, 2]]
    assert batch.indices.tolist() == [0, 3] and batch.predictions == 6
    empty = without_labels(batch)
    assert empty.predictions == 0 and len(empty.indices) == 0 and empty.source is batch.source


@pytest.mark.parametrize(
    "schedule, update, expected",
    [
        ("inverse-sqrt", 0, 1e-7 + (0.01 - 1e-7) / 100),
        ("inverse-sqrt", 99, 0.01),
        ("inverse-sqrt", 399, 0.005),
        ("cosine", 99, 0.01),
        ("cosine", 549, 0.001 + 0.009 / 2),
        ("cosine", 999, 0.001),
        ("constant", 5000, 0.01),
    ],
)
def test_learning_rates(texts: Path, schedule: Any, update: int, expected: float) -> None:
    lowest = {"min_lr": 0.001} if schedule == "cosine" else {}
    config = small(texts, schedule=schedule, lr=0.01, warmup=100, updates=1000, **lowest)
    assert rate(config, TrainingPosition(update=update, updates_planned=1000)) == pytest.approx(expected)


def test_weights_of_the_last_or_the_best_are_kept() -> None:
    values = [5.0, 2.0, 3.0, 1.0, 4.0]
    last, best = Progress(), Progress()
    for update, value in enumerate(values):
        last.keep(value, update, count=2, best=False)
        best.keep(value, update, count=2, best=True)
    assert last.kept == [3, 4] and best.kept == [1, 3]
    assert Progress.from_plain(best.plain()) == best


@pytest.mark.slow
def test_a_run_learns_and_its_checkpoints_open_with_their_tokenizers(training: Training, texts: Path) -> None:
    lines = rows(training.folder)
    valid = [float(row["valid_nll"]) for row in lines if row["valid_nll"]]
    assert len(valid) == 3 and valid[-1] < valid[0] - 0.1
    assert training.reason == "epochs" and training.nll == pytest.approx(valid[-1], abs=1e-4)
    assert training.bleu is not None and training.best == pytest.approx(min(valid), abs=1e-4)
    sources = list(read_lines(texts / "valid_source"))[:2]
    for name in ("last", "best", "averaged"):
        checkpoint = open_checkpoint(str(training.folder / name), device="cpu")
        options = TranslateOptions(max_len_a=1.0, max_len_b=3)
        assert len(list(translate_lines(checkpoint, sources, options=options, tokens=100))) == 2


def test_averages_are_summed_in_double_precision_and_keep_what_is_no_number_of_floats() -> None:
    states = [{"weight": torch.tensor([value]), "updates": torch.tensor(n)} for n, value in enumerate((1e8, 1.0, -1e8))]
    mean = average(states)
    assert mean["weight"].dtype == torch.float32 and float(mean["weight"]) == pytest.approx(1 / 3)
    assert int(mean["updates"]) == 2


def test_the_numbers_of_the_log_are_means_per_target_token(training: Training) -> None:
    lines = [row for row in rows(training.folder) if row["loss"]]
    counts = np.diff([0, *(int(row["tokens"]) for row in lines)])
    assert all(counts > 0) and lines[-1]["epoch"] == "3" and int(lines[-1]["sentences"]) == 450
    assert 0 < float(lines[-1]["nll"]) < math.log(60) + 0.5
    updates = [int(row["update"]) for row in rows(training.folder)]
    assert updates == sorted(set(updates))


def test_tokens_per_second_leave_out_validations(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, update, validate = [0.0], TrainingRun.update, train_loop.validate

    def taking(seconds: float, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            clock[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(TrainingRun, "update", taking(1.0, update))
    monkeypatch.setattr(train_loop, "validate", taking(100.0, validate))
    run = train(small(texts, out=tmp_path / "run", log_every=1, validate_every=2), baseline())
    tokens = [0, *(int(row["tokens"]) for row in rows(run.folder))]
    speeds = [float(row["tokens_per_second"]) for row in rows(run.folder)]
    assert speeds == [after - before for before, after in pairwise(tokens)]


def test_run_json_says_what_was_done(training: Training) -> None:
    about = json.loads((training.folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "done" and about["result"]["reason"] == "epochs" and about["variant"] == "baseline"
    assert about["signature"].startswith("m:train.baseline|") and about["config"]["lr"] == 0.02
    assert about["parameters"]["total"] == training.parameters and about["data"]["sentences"] == 150
    assert plain_options(TrainConfig(**_with_types(about["config"]))) == about["config"]


def _with_types(values: dict[str, Any]) -> dict[str, Any]:
    """JSON's values as the config has them."""
    paths = {"out", "source", "target", "valid_source", "valid_target"}
    return {
        name: Path(value) if name in paths else tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def test_validation_is_what_the_checkpoint_says_of_the_text(training: Training, texts: Path) -> None:
    files = {side: texts / f"valid_{side}" for side in ("source", "target")}
    metrics = scores(training.folder / "last", **files, metrics=("perplexity",), device="cpu")
    assert training.nll is not None and metrics["perplexity"] == pytest.approx(math.exp(training.nll), rel=1e-5)


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_stays_as_it_is_and_can_be_prolonged(texts: Path, tmp_path: Path) -> None:
    config = small(texts, out=tmp_path / "run")
    first = train(config, baseline())
    assert first.nll is not None
    before = (config.out / "last" / "model.safetensors").read_bytes()
    assert train(config, baseline(), resume=True) == first
    assert (config.out / "last" / "model.safetensors").read_bytes() == before
    longer = replace(config, updates=9)
    assert train(longer, baseline(), resume=True).update == 9
    reference = train(replace(longer, out=tmp_path / "whole"), baseline())
    assert (reference.folder / "last" / "model.safetensors").read_bytes() == (
        config.out / "last" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks processes")
def test_killed_and_resumed_is_the_same_and_two_processes_are_as_one(tmp_path: Path) -> None:
    study = [ROOT / "benchmarks" / "resume.py", "--moments", "1", "--sentences", "20"]
    ((status, out, error),) = run_all(tmp_path / "study", study, [{}])
    assert status == 0, out + error
    result = json.loads(out.splitlines()[-1])
    assert result["killed"] >= 1 and result["different"] == [] and result["processes"] < 1e-5


def test_language_models_learn_lines_or_blocks(texts: Path, tmp_path: Path) -> None:
    more = {"target": None, "valid_target": None, "kind": "lm"}
    remarks: list[str] = []
    lines = train(small(texts, out=tmp_path / "lines", **more), baseline(), remark=remarks.append)
    checkpoint = open_checkpoint(str(lines.folder / "best"), device="cpu")
    assert not checkpoint.two_sided and lines.nll is not None
    assert remarks[0] == "a language model has a decoder only: --encoder-layers has no effect"
    config = small(texts, out=tmp_path / "blocks", block=13, **more)
    run = make_run(config, baseline())
    first = collate(run.data.train, np.array([0, 1]))
    assert first.target is None and first.labels is not None and first.labels.shape == (2, 13)
    assert first.source.ids[1, 0] == run.data.target.start
    stream = torch.cat([first.labels[0], first.labels[1]]).tolist()
    vocab = run.data.target
    ids = [number for line in list(read_lines(texts / "source"))[:9] for number in [*vocab.encode(line), vocab.end]]
    assert stream == ids[:26]
    assert train(config, baseline(), resume=True).update == 6


@pytest.mark.slow
def test_training_starts_from_a_checkpoint(training: Training, texts: Path, tmp_path: Path) -> None:
    more = {"init": str(training.folder / "best"), "lr": 1e-9, "warmup": 0, "updates": 1}
    outcome = train(small(texts, out=tmp_path / "run", **more), baseline())
    assert outcome.nll == pytest.approx(training.best, abs=1e-4)
    mine, theirs = (
        open_checkpoint(str(path), device="cpu") for path in (tmp_path / "run" / "last", training.folder / "best")
    )
    assert isinstance(mine, TransformerCheckpoint) and isinstance(theirs, TransformerCheckpoint)
    assert mine.target == theirs.target
    with pytest.raises(ConfigError, match="--kind translation"):
        make_run(small(texts, kind="lm", target=None, valid_target=None, **more), baseline())
    for name, value in (("encoder_layers", 5), ("tie_output", False), ("vocabulary", "separate")):
        with pytest.raises(ConfigError, match=f"{flag(name)} (1|True|joint), not {value}; leave it out"):
            make_run(small(texts, **{**more, name: value}), baseline())
    with pytest.raises(ConfigError, match="own vocabularies; leave out --tokenizer-kind"):
        make_run(small(texts, tokenizer_kind="unigram", **more), baseline())
    with pytest.raises(ConfigError, match=r"own weights.*leave out --initial"):
        make_run(small(texts, initial="glorot", **more), baseline())


@pytest.mark.slow
def test_pieces_that_the_vocabulary_lacks_are_counted_and_warned_of(texts: Path, tmp_path: Path) -> None:
    remarks: list[str] = []
    foreign = tmp_path / "source"
    foreign.write_text("жжж\n" * 150, encoding="utf-8")
    train(small(texts, out=tmp_path / "first"), baseline(), remark=remarks.append)
    assert remarks == []
    common = {"out": tmp_path / "foreign", "init": str(tmp_path / "first" / "last"), "valid_source": None}
    train(small(texts, source=foreign, valid_target=None, **common), baseline(), remark=remarks.append)
    assert len(remarks) == 2 and "of the source's subwords are unknown to the vocabulary; is it tokenised" in remarks[0]
    counts = json.loads((tmp_path / "foreign" / "run.json").read_text())["data"]["unknown_pieces"]
    assert counts["source"] == {"pieces": 300, "unknown": 150, "share": 0.5} and counts["target"]["unknown"] == 0


def test_every_epoch_has_an_order_of_its_own(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def record(*args: Any, **options: Any) -> Any:
        plans.append([group.tolist() for group in epoch_plan(*args, **options)])
        return epoch_plan(*args, **options)

    monkeypatch.setattr(train_loop, "epoch_plan", record)
    train(small(texts, out=tmp_path, updates=None, max_epochs=2), baseline())
    assert len(plans) == 2 and plans[0] != plans[1]


def test_early_stopping_counts_validations_without_a_better_one(texts: Path, tmp_path: Path) -> None:
    more = {"validate_every": 1, "patience": 2, "lr": 1e-12, "warmup": 0, "updates": 50}
    outcome = train(small(texts, out=tmp_path, **more), baseline())
    assert outcome.reason == "patience" and outcome.update == outcome.best_update + 2
    with pytest.raises(ConfigError, match="--patience"):
        make_run(small(texts, valid_source=None, valid_target=None, patience=2, out=tmp_path / "x"), baseline())


@pytest.mark.parametrize("more", [{}, {"kind": "lm", "target": None, "valid_target": None, "block": 7}])
def test_lines_are_those_of_the_file_where_a_share_of_it_is_read(
    texts: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    data = make_run(small(texts, out=tmp_path / "run", fraction=0.3, **more), baseline()).data
    share = [sentence.number for sentence in open_corpus(texts / "source").share(0.3, seed=1)]
    numbers = data.train.numbers.tolist()
    assert max(share) > 100 and (set(numbers) <= set(share) and len(numbers) > 20 if more else numbers == share)


class Counts(Variant):
    """Writes down every call."""

    name, summary = "counts", "Counts."

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.calls: list[str] = []

    def before_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        self.calls.append(f"epoch {position.epoch}")

    def before_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        self.calls.append(f"update {position.update}")

    def after_update(self, run: TrainingRun, position: TrainingPosition) -> None:
        self.calls.append(f"done {position.update}")

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        self.calls.append(f"end {position.epoch}")

    def history(self, run: TrainingRun) -> dict[str, float]:
        return {"calls": float(len(self.calls))}


@pytest.mark.slow
def test_variants_are_called_in_order_and_write_columns(texts: Path, tmp_path: Path) -> None:
    variant = Counts(Counts.Options())
    config = small(texts, out=tmp_path / "run", max_tokens=1000, updates=None, max_epochs=2)
    train(config, variant)
    count = variant.calls.index("end 1") // 2
    first = [call for n in range(count) for call in (f"update {n}", f"done {n + 1}")]
    second = [call for n in range(count, 2 * count) for call in (f"update {n}", f"done {n + 1}")]
    assert count > 1 and variant.calls == ["epoch 1", *first, "end 1", "epoch 2", *second, "end 2"]
    assert float(rows(config.out)[-1]["calls"]) == len(variant.calls) - 1


@pytest.mark.parametrize("language, count", [("en", 5239), ("de", 5158)])
def test_moses_makes_the_text_that_multi30k_has(shared: Path, language: str, count: int) -> None:
    pytest.importorskip("sacremoses")
    split = normaliser("moses-lowercase", language)
    lines = [split(line) for line in read_lines(shared / "data" / "multi30k" / f"test_2017_mscoco.{language}.gz")]
    # the number of tokens of the repository's own lower-cased, tokenised file of this split
    assert sum(len(line.split()) for line in lines) == count
    assert all(line == line.lower() for line in lines)


def test_many_texts_have_the_ids_that_each_has_alone(texts: Path) -> None:
    lines = [*read_lines(texts / "source"), "an Ünknown ẞ word", "x"]
    for kind in ("bpe", "unigram"):
        vocab = prepare.learn_vocabulary(lines[:100], size=60, kind=kind, normalise="lowercase")
        assert prepare.encode_texts(vocab, lines) == [vocab.encode(line) for line in lines]
        assert len(vocab) == 60 and vocab.decode(vocab.encode("Abdeg")) == "abdeg"
    plain = Vocabulary(("<s>", "</s>", "<unk>", "a", "b"), Splitter("words"), start=0, end=1, unknown=2)
    assert prepare.encode_texts(plain, ["a c b"]) == [[3, 2, 4]]


# How new weights are drawn, against fairseq's rules written out.


def bounds(name: str, weight: torch.Tensor, initial: str) -> float:
    """The largest value that fairseq draws for a weight or bias of a linear layer."""
    outputs, inputs = weight.shape
    if initial == "fairseq" and "ffn" in name:
        return 1 / math.sqrt(inputs)
    gain = 1 / math.sqrt(2) if name.endswith(("query", "key", "value")) else 1.0
    return gain * math.sqrt(6 / (inputs + outputs))


@pytest.mark.parametrize("initial", sorted(INITIAL))
def test_linear_layers_are_drawn_as_fairseq_draws_them(initial: str, tmp_path: Path) -> None:
    run = lessons.begin(tmp_path, "baseline", shared={"initial": initial, "d_model": 48, "d_ffn": 67})
    layers = {name: module for name, module in run.model.named_modules() if isinstance(module, nn.Linear)}
    linears = [(name, layer) for name, layer in layers.items() if "layers" in name]
    assert len(linears) == 3 * 2 + 3 * 4 + 2 * 4  # feed-forward, self-attention, cross-attention
    for name, layer in linears:
        bound = bounds(name, layer.weight, initial)
        assert 0.97 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6), name
        has_bias = initial == "fairseq" and ("ffn" in name or name.endswith(("query", "key", "value")))
        limit = layer.in_features**-0.5 if has_bias else 0.0
        assert 0.8 * limit <= float(layer.bias.detach().abs().max()) <= limit * (1 + 1e-6), name


def test_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    first = lessons.run_variant(tmp_path / "a", updates=1)
    shared = {"init": str(first.folder / "last"), "initial": "fairseq"}
    again = lessons.begin(tmp_path / "b", "baseline", shared=shared)
    theirs = open_checkpoint(str(first.folder / "last"), device="cpu", dtype="float64").model.state_dict()
    for key, value in again.model.state_dict().items():
        torch.testing.assert_close(value.double(), theirs[key], rtol=0, atol=1e-6)


def test_a_smaller_share_is_part_of_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}\n" for n in range(40)), encoding="utf-8")
    corpus = open_corpus(tmp_path / "text")
    parts = {share: [line.source for line in corpus.share(share, seed=1)] for share in (0.01, 0.25, 0.5, 1.0)}
    assert [len(lines) for lines in parts.values()] == [1, 10, 20, 40]
    assert set(parts[0.01]) < set(parts[0.25]) < set(parts[0.5]) < set(parts[1.0])
    assert parts[1.0] == [line.source for line in corpus] and parts[0.5] == sorted(parts[0.5], key=parts[1.0].index)
    other = corpus.share(0.5, seed=2)
    assert [line.source for line in other] != parts[0.5] and other.digest != corpus.share(0.5, seed=1).digest
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="--fraction"):
            make_config(TrainConfig, {"source": tmp_path / "text", "target": tmp_path / "text", "fraction": share})
