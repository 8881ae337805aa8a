"""Translation of streams: order, windows, empty lines, what is written, and what the MHR fork wrote."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope as hs
from headscope.cli import main
from headscope.config.commands import TranslateOptions
from headscope.data.encoded import Batch, pad_side
from headscope.evaluation.translation import translate_lines
from headscope.formats.native import NATIVE
from headscope.model.mixing.experts import Experts, experts_of, one_expert
from tests.makers.sweeps import make_words, validate
from tests.oracles import checkpoints, native
from tests.oracles.checkpoints import SOURCES
from tests.oracles.experts import perturb_gates

TEXTS = ["ah bi ck", "aj", "bl ci ak bh cj", "ah"]
Result = tuple[int, str, str]


def best(checkpoint: Any, lines: list[str], *, tokens: int = 1000, window: int = 512, **options: Any) -> list[str]:
    translations = translate_lines(checkpoint, lines, options=TranslateOptions(**options), tokens=tokens, window=window)
    return [beam[0].text for beam in translations]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", "bart"])
def test_batches_and_windows_change_nothing_and_order_is_kept(kind: str) -> None:
    checkpoint: Any = checkpoints.small() if kind == "native" else checkpoints.huggingface(kind)
    lines = SOURCES if kind == "native" else TEXTS
    options = {"beam": 3, "max_len_b": 8}
    single = [best(checkpoint, [line], **options)[0] for line in lines]
    assert len(set(single)) > 1
    for tokens, window in ((1, 2), (17, 3), (1000, 512)):
        assert best(checkpoint, lines, tokens=tokens, window=window, **options) == single
    assert best(checkpoint, lines[::-1], **options) == single[::-1]


def test_the_checkpoints_own_search_is_used_and_options_override_it() -> None:
    checkpoint = checkpoints.small()
    translations = checkpoint.translate(SOURCES)
    assert best(checkpoint, SOURCES) == [checkpoint.target.decode(beam[0].ids) for beam in translations]  # type: ignore[union-attr]
    facts = checkpoint.search_facts(TranslateOptions(beam=2, lenpen=0.5, max_len_a=2.0, max_len_b=3))
    assert facts == {"search": "fairseq", "beam": "2", "lenpen": "0.5", "tgt-len": "0n+1..2n+3"}
    (candidates,) = translate_lines(checkpoint, SOURCES[:1], options=TranslateOptions(nbest=3), tokens=9)
    assert len(candidates) == 3 and candidates[0].score >= candidates[1].score >= candidates[2].score
    assert all(len(text.split()) <= 2 for text in best(checkpoint, SOURCES, max_len_b=2))


@torch.no_grad()
def test_hugging_face_scores_are_log_probabilities_by_length() -> None:
    checkpoint = checkpoints.huggingface("bart")
    options = TranslateOptions(beam=3, nbest=2, scores=True, lenpen=0.5, max_len_b=6)
    translations = checkpoint.translations(TEXTS, options)
    source = pad_side(checkpoint.encode(TEXTS, side="source", limit=50))
    search = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "max_new_tokens": 6}
    search |= {"output_scores": True, "return_dict_in_generate": True}
    theirs = checkpoint.model.generate(source.ids, attention_mask=source.real.long(), **search)
    texts = checkpoint.tokenizer.batch_decode(theirs.sequences, skip_special_tokens=True)
    assert [entry.text for line in translations for entry in line] == texts
    scores = [entry.score for line in translations for entry in line]
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-6)
    assert checkpoint.logits(Batch(torch.arange(4), 0, source, source)).shape[-1] == 53


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `headscope translate` on bytes: exit status, stdout, stderr."""

    def call(text: bytes, *arguments: object) -> Result:
        capfd.readouterr()
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # whatever the locale, UTF-8 comes out
        monkeypatch.setattr(sys, "argv", ["headscope", "translate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="ascii"))
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(sys, "stdout", out)
            main.run()
        assert isinstance(out.buffer, io.BytesIO)
        return int(stop.value.code or 0), out.buffer.getvalue().decode(), capfd.readouterr().err

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    NATIVE.save(checkpoints.small(), tmp_path / "model")
    return tmp_path / "model"


def test_the_command_translates_lines(run: Callable[..., Result], model: Path) -> None:
    checkpoint = checkpoints.small()
    text = "\n".join([SOURCES[0], "", SOURCES[1]]).encode()
    first, second = best(checkpoint, SOURCES[:2])
    assert run(text, model) == (0, f"{first}\n\n{second}\n", "")
    greedy = best(checkpoint, SOURCES[:2], beam=1)
    assert run(text, model, "--greedy", "--window", 1)[1] == f"{greedy[0]}\n\n{greedy[1]}\n"
    _, output, _ = run(text, model, "--nbest", 2, "--scores", "--keep-bpe")
    rows = [line.split("\t") for line in output.splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "1", "2", "2"]
    assert rows[0][2] == first and float(rows[0][1]) >= float(rows[1][1]) and rows[2][1:] == ["0.0000", ""]
    nothing = "there is nothing on stdin to translate: headscope translate CKPT < text > translation\n"
    assert run(b"", model) == (0, "", nothing)


# One expert at test time, as `evaluate` and `translate` have it, against a plain model without the head it lacks.


MIXING: dict[str, Any] = {"self_mixing": "experts.v1", "cross_mixing": "experts.v1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same weights as a plain model, as experts without gates and with gates that differ."""
    folder = tmp_path_factory.mktemp("experts")
    plain = checkpoints.small()
    words = make_words(folder, plain)
    words_by_name = {"plain": words}
    options_by_name: dict[str, dict[str, Any]] = {"uniform": {"mixing_options": {"uniform": True}}, "gated": {}}
    for name, options in options_by_name.items():
        checkpoint = checkpoints.small()
        checkpoint.model = native.model(**MIXING, **options).to(plain.dtype)
        missing = checkpoint.model.load_state_dict(plain.model.state_dict(), strict=False)
        assert not missing.unexpected_keys
        perturb_gates(checkpoint.model)
        checkpoint.model.load_state_dict(plain.model.state_dict(), strict=False)
        NATIVE.save(checkpoint, folder / name)
        words_by_name[name] = {**words, "checkpoint": str(folder / name)}
    return words_by_name


def without_a_head(words: dict[str, Any], head: int, folder: Path) -> dict[str, Any]:
    """Scores of the plain model with this head off in every layer and the others scaled by h / (h − 1)."""
    checkpoint: Any = hs.load(words["checkpoint"]).checkpoint
    with torch.no_grad():
        for _, _, _, module in checkpoint.model.attention_modules():
            if module.heads > 1:
                module.output.weight.mul_(module.heads / (module.heads - 1))
    NATIVE.save(checkpoint, folder / "scaled")
    mask = ",".join(f"{site}.{layer}.{head}" for (site, layer), heads in checkpoint.layout.items() if heads > head)
    return validate({**words, "checkpoint": str(folder / "scaled")}, mask=mask)


@pytest.mark.slow
def test_an_expert_is_the_model_without_its_head(models: dict[str, Any], tmp_path: Path) -> None:
    expected = without_a_head(models["plain"], 1, tmp_path)
    for name in ("uniform", "gated"):
        assert validate(models[name], expert="1") == pytest.approx(expected, rel=1e-5)
    assert validate(models["uniform"])["perplexity"] == pytest.approx(validate(models["plain"])["perplexity"])


@pytest.mark.slow
def test_a_drawn_expert_follows_from_the_seed_and_is_the_same_for_all_sentences(models: dict[str, Any]) -> None:
    perplexities = [validate(models["uniform"], expert="random", seed=seed)["perplexity"] for seed in (1, 1, 2)]
    assert perplexities[0] == perplexities[1] != perplexities[2]
    model = hs.load(models["uniform"]["checkpoint"]).checkpoint.model
    with one_expert(model, "random", seed=1):
        modes = [mixture.mode for mixture in experts_of(model)]
    assert all(isinstance(mode, int) for mode in modes) and len(set(modes)) > 1
    assert {mixture.mode for mixture in experts_of(model)} == {"soft"}


@pytest.mark.slow
def test_the_top_expert_has_the_largest_responsibility(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    soft, top = (validate(models["gated"], expert=expert)["perplexity"] for expert in (None, "top"))
    assert soft != top
    real = Experts.log_gates
    monkeypatch.setattr(Experts, "log_gates", lambda self, queries: (real(self, queries) * 1e9).log_softmax(-1))
    sharp = validate(models["gated"])["perplexity"]
    assert sharp == pytest.approx(top, rel=1e-5)
