"""Which end of a ranking goes: declared by each criterion and column, told to the user, asked for where it is open."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headscope.attribution.objectives.base import OBJECTIVES, choose_objective
from headscope.cli.main import app
from headscope.data.corpus import Corpus, open_corpus
from headscope.engine.plan import analyze
from headscope.errors import ConfigError, HeadscopeError
from headscope.formats.base import Checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import all_heads
from headscope.pruning.ranking import criterion as criterion_module
from headscope.pruning.ranking.criterion import MeasuredColumn, ScoringContext, criterion_named, rankable_names
from headscope.results.study import Study
from tests.makers.studies import run_options
from tests.oracles import checkpoints, circuit, gated_heads, speakers, tiny

pytestmark = pytest.mark.slow

ONE_SIDED = {"direct_logit", "massive", "massive_chance", "full_attention"}
NEEDLE = {"needle": "w20 w21 w22", "needle_answer": "w21 w22", "needle_question": "w20", "needle_steps": 3}
STREAMING = {"streaming_steps": 2, "streaming_lengths": (9, 9), "passkeys": 1, "passkey_length": 2}
GATING = {"chg_fits": 2, "chg_steps": 2, "chg_batch": 4}
OPTIONS = {**NEEDLE, **STREAMING, **GATING, "haystack_lengths": (15,), "massive_magnitude": 1.0, "massive_ratio": 2.0}
MIXINGS = {"gate": "hard-concrete.v1", "expert": "experts.v1"}


@cache
def model_of(name: str, one_sided: bool) -> tuple[Checkpoint, Corpus]:
    """A model with the parts that a criterion or analysis needs, and a text for it."""
    mixing = MIXINGS.get(name.rstrip("s").partition("_")[0])
    if name in ("retrieval", "successor"):
        return circuit.checkpoint(), open_corpus([" ".join(circuit.WORDS[n : n + 5]) for n in range(7)])
    if name == "head_gates":
        return gated_heads.checkpoint("qwen"), speakers.corpus("llama")
    if mixing is None:
        kind = "gpt2" if one_sided else "native-pre"
        return speakers.checkpoint(kind), speakers.corpus(kind)
    torch.manual_seed(2)
    texts = ("a b c", "d a", "b b e f")
    return checkpoints.small(self_mixing=mixing), open_corpus(texts, target=[text[::-1] for text in texts])


@pytest.fixture(scope="module")
def cached_analyses() -> Iterator[None]:
    """An analysis that has several columns runs once for all of them, with each seed."""
    studies: dict[Any, tuple[Study, Checkpoint]] = {}

    def analyze_once(checkpoint: Checkpoint, *arguments: Any, analyses: list[Any], options: Any, **extra: Any) -> Study:
        key = (id(checkpoint), options.seed, *(cls.name for cls in analyses))
        if key not in studies:  # with the checkpoint, whose id no other gets then
            studies[key] = analyze(checkpoint, *arguments, analyses=analyses, options=options, **extra), checkpoint
        return studies[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criterion_module, "analyze", analyze_once)
        yield


@pytest.mark.usefixtures("cached_analyses")
@pytest.mark.parametrize("name", rankable_names())
def test_every_name_that_is_listed_runs_and_has_a_direction_or_asks_for_one(name: str, tmp_path: Path) -> None:
    criterion = criterion_named(name)
    analysis = criterion.analysis if isinstance(criterion, MeasuredColumn) else name
    checkpoint, corpus = model_of(analysis, name in ONE_SIDED)
    ranks = torch.tensor([17 * number % speakers.V * 13 for number in range(speakers.V)])  # some tokens are rare
    settings: dict[str, Any] = {**OPTIONS, "sequences": tmp_path / "words"}
    settings["sequences"].write_text(" ".join(circuit.WORDS), encoding="utf-8")
    if analysis == "alignment":
        settings["alignments"] = tmp_path / "links"
        pairs = [(sentence.source.split(), (sentence.target or "").split()) for sentence in corpus.read()]
        links = [" ".join(f"{n}-{n}" for n, _ in enumerate(zip(*pair))) for pair in pairs]  # noqa: B905
        settings["alignments"].write_text("\n".join(links) + "\n", encoding="utf-8")
    options = run_options(shapley_samples=2, ig_steps=2, ranks=ranks if name.startswith("rarest") else None, **settings)
    scores = criterion.scores(ScoringContext(checkpoint, corpus, options=options))
    assert set(scores) <= set(all_heads(checkpoint.layout)) and np.isfinite(list(scores.values())).any()
    if criterion.keep:
        assert criterion.why and criterion.direction() == criterion.direction(criterion.keep)
        opposite = criterion.direction("lowest" if criterion.keep == "highest" else "highest")
        assert opposite.keep != criterion.keep and opposite.apply(scores) != criterion.direction().apply(scores)
    else:
        with pytest.raises(ConfigError, match=f"^--by {name}.*--keep-lowest"):
            criterion.direction()
        assert criterion.direction("lowest").apply({head: 2.0 for head in scores}) == {head: -2.0 for head in scores}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directions")
    NATIVE.save(checkpoints.small(), path / "model")
    (path / "a").write_text("a b c\nb c\nd e f g\na\n", encoding="utf-8")
    (path / "b").write_text("a b\nb c a\nd e f g d\na b\n", encoding="utf-8")
    return path


def run_rank(folder: Path, out: Path, *options: str) -> tuple[int, str]:
    texts = ["--source", str(folder / "a"), "--target", str(folder / "b"), "--device", "cpu"]
    result = CliRunner().invoke(app, ["prune", "rank", str(folder / "model"), *texts, *options, "--out", str(out)])
    return result.exit_code, str(result.exception) if isinstance(result.exception, ConfigError) else result.output


def test_the_command_says_which_end_goes_and_asks_where_that_is_open(folder: Path, tmp_path: Path) -> None:
    code, output = run_rank(folder, tmp_path / "entropy", "--by", "entropy", "--keep", "5")
    assert code == 0 and "by entropy: removes the highest first, as they spread their attention most" in output
    record = json.loads((tmp_path / "entropy" / "pruning.json").read_text())["ranking"]
    assert record["keep"] == "lowest" and record["direction"].startswith("by entropy: removes the highest first")
    _, message = run_rank(folder, tmp_path / "x", "--by", "sink", "--keep", "5")
    assert message.startswith("--by sink has no agreed direction: give --keep-lowest") and not (tmp_path / "x").exists()
    removed = {}
    for end, opposite in (("lowest", "highest"), ("highest", "lowest")):
        code, output = run_rank(folder, tmp_path / end, "--by", "sink", "--keep", "8", f"--keep-{end}")
        assert code == 0 and f"by sink: removes the {opposite} first, as asked" in output
        removed[end] = (tmp_path / end / "removed.txt").read_text().split()
        assert f"by:sink-{end}|" in json.loads((tmp_path / end / "pruning.json").read_text())["signature"]
    assert len(removed["lowest"]) == 8 and not set(removed["lowest"]) & set(removed["highest"])
    _, message = run_rank(folder, tmp_path / "x", "--by", "sink", "--keep", "5", "--keep-lowest", "--keep-highest")
    assert message == "--keep-highest and --keep-lowest exclude each other; give one"


# Which scores of heads follow from the seed: what does not say so gives the same for two seeds.


SLOW = {"causal_head_gating", "streaming", "retrieval", "copy_suppression"}  # minutes here; tested by what they say
SMALL_RUN = run_options(shapley_samples=1, ig_steps=2, explained_steps=1, explained_rows=31)


def texts(kind: str, words: str | list[str]) -> Corpus:
    draws = random.Random(1)
    pairs = [(" ".join(draws.choices(words, k=5)), " ".join(draws.choices(words[:7], k=4))) for _ in range(2)]
    source, target = zip(*pairs, strict=True)
    return open_corpus(source, target=target if kind == "small" else None)


@pytest.mark.usefixtures("cached_analyses")
@pytest.mark.parametrize("kind", ["small", "bert"])
def test_scores_that_are_not_drawn_are_equal_for_two_seeds(kind: str) -> None:
    checkpoint: Checkpoint = checkpoints.small() if kind == "small" else checkpoints.huggingface(kind)
    corpus = texts(kind, "abcdefghijk" if kind == "small" else tiny.WORDS)
    objective = OBJECTIVES.get(choose_objective("", checkpoint, has_target=corpus.has_target))()
    random_names, count = set(), 0
    for name in rankable_names():
        criterion = criterion_named(name)
        if isinstance(criterion, MeasuredColumn) and criterion.analysis in SLOW:
            continue
        try:
            contexts = (ScoringContext(checkpoint, corpus, options=replace(SMALL_RUN, seed=seed)) for seed in (1, 2))
            first, second = map(criterion.scores, contexts)
        except HeadscopeError:  # it is for other models
            continue
        count += 1
        heads = sorted(first)
        if not np.array_equal([first[h] for h in heads], [second[h] for h in heads], equal_nan=True):
            random_names.add(name)
            assert criterion.draws(checkpoint, objective), name
    assert count > 20 and "random" in random_names
    assert {"small": "shapley", "bert": "gradient"}[kind] in random_names
