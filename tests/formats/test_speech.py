"""Whisper-like models: recordings named line by line, features of them, and the times of words."""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from transformers.utils.generic import ModelOutput

import headscope as hs
from headscope.config.analyze import AnalyzeConfig
from headscope.config.commands import TranslateOptions
from headscope.data.corpus import open_corpus
from headscope.data.encoded import IGNORED, Batch, Encoded, pad_side
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError, DataError
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.speech import SpeechCheckpoint, token_times
from headscope.heads import HeadId, Site
from headscope.model.taps import capture
from headscope.pruning.closed_form.anchors import anchor_sources
from tests.makers import decoders
from tests.makers.shared import write_lines
from tests.makers.speech import SIZES, whisper

POSITIONS, BINS = SIZES["max_source_positions"], SIZES["num_mel_bins"]
TRANSCRIPTS = ["a child sings", "two men stand", "the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Whisper with a tokenizer, an extractor, features of three recordings, and transcripts."""
    path = tmp_path_factory.mktemp("speech")
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = whisper(vocab_size=decoders.VOCABULARY, suppress_tokens=None, begin_suppress_tokens=None, **ids)
    model.generation_config.alignment_heads = [[0, 1], [1, 2]]
    model.save_pretrained(path)
    tokenizer = decoders.byte_level()
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=special
    )
    tokenizer.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=1, n_fft=400).save_pretrained(path)
    noise = np.random.default_rng(1)
    names = [path / f"{number}.npy" for number in range(3)]
    for name, length in zip(names, (100, 11, 18), strict=True):
        np.save(name, noise.normal(size=(BINS, length)).astype(np.float32))
    write_lines(path / "recordings", map(str, names))
    write_lines(path / "transcripts", TRANSCRIPTS)
    return path


@pytest.fixture(scope="module")
def speech(folder: Path) -> SpeechCheckpoint:
    checkpoint = open_checkpoint(str(folder), device="cpu")
    assert isinstance(checkpoint, SpeechCheckpoint)
    return checkpoint


def test_positions_stand_for_subwords_and_those_behind_the_end_are_special(
    speech: SpeechCheckpoint, folder: Path
) -> None:
    names = [str(folder / "1.npy"), str(folder / "0.npy")]
    short, long = speech.encode(names, side="source", limit=5)
    assert [len(short.ids), sum(short.special), sum(long.special)] == [POSITIONS, POSITIONS - 6, 0]
    assert not set(short.ids) & set(long.ids) and min(short.ids) >= speech.vocabulary
    assert speech.subwords(short.ids[:2], side="source") == ["0.00s", "0.02s"]
    inputs, labels = speech.encode(["a child"], side="target", limit=20)[0], speech.labels(["a child"], limit=20)[0]
    assert inputs.ids[0] == 1 and labels[-1] == 2 and inputs.ids[1:] == labels[:-1]
    assert speech.labels(["a child"], limit=3) == [[*labels[:2], IGNORED]], "after the cut, no token is known"


@pytest.mark.slow
def test_cross_heads_are_measured_on_transcripts(folder: Path, tmp_path: Path) -> None:
    """Without labelled heads, alignment_heads of the model stay; with `force` they become all of the upper half."""

    def read_heads() -> Any:
        settings: Any = transformers.GenerationConfig.from_pretrained(folder)
        return settings.alignment_heads

    before = read_heads()
    config = AnalyzeConfig(
        checkpoint=str(folder), source=folder / "recordings", target=folder / "transcripts", out=tmp_path / "run",
        only=("alignment", "entropy"), figures=False, write_alignment=folder, alignment_heads=2, bootstrap=20,
    )  # fmt: skip
    run = run_analysis(config)
    assert read_heads() == before and "keeps its alignment_heads" in run.record["alignment_heads"]
    run = run_analysis(replace(config, force=True))
    cross = run.heads[run.heads["site"] == "cross"]
    assert len(cross) == 6 and cross["alignment_score"].between(0, 1).all() and cross["entropy"].notna().all()
    assert read_heads() == [[1, 0], [1, 1], [1, 2]]
    assert "(all of the upper half: no head is labelled aligned:predicted" in str(run.answers())
    study = hs.load(folder).analyze(
        folder / "recordings", target=folder / "transcripts", only="alignment", bootstrap=20
    )
    assert "keeps" in study.write_alignment(folder) and "upper half" in study.write_alignment(folder, force=True)


def write_times(folder: Path, *, ends: bool) -> Path:
    """Words of the three recordings, two positions each and the last one longer; with `ends` all but the first one."""
    rows = ["recording,begin,word" + ",end" * ends]
    for name, text in zip((folder / "recordings").read_text().split(), TRANSCRIPTS, strict=True):
        for number, word in enumerate(text.upper().split()):
            begin = 0.04 * number
            rows.append(f"{name},{begin:.2f},{word}!" + f",{begin + 0.02 if number else ''}" * ends)
    (folder / "words.csv").write_text("\n".join(rows), encoding="utf-8")
    return folder / "words.csv"


@pytest.mark.parametrize("ends", [False, True])
def test_cross_heads_look_at_when_words_are_said(speech: SpeechCheckpoint, folder: Path, ends: bool) -> None:
    """Shares of each relation and the lag, by a plain loop over recordings, heads and subwords."""
    study = hs.load(folder).analyze(
        folder / "recordings", target=folder / "transcripts", only="alignment", bootstrap=20,
        word_times=write_times(folder, ends=ends),
    )  # fmt: skip
    hits: dict[tuple[str, int, int], list[float]] = {}
    for name, text, length in zip((folder / "recordings").read_text().split(), TRANSCRIPTS, (50, 6, 9), strict=True):
        source = pad_side(speech.encode([name], side="source", limit=31))
        [target] = speech.encode([text], side="target", limit=31)
        with capture(speech.model) as attention, torch.no_grad():
            speech.forward(Batch(torch.arange(1), 0, source, pad_side([target])))
        ids = [*target.ids, speech.labels([text], limit=31)[0][-1]]
        spans = speech.spans(text, ids, side="target") or []
        words = [None if span is None else text[: span[1]].strip().count(" ") for span in spans]
        for layer, head, t in product(range(2), range(3), range(len(target.ids))):
            argmax = int(attention[HeadId(Site.CROSS, layer, head)]["weights"][0, t, :length].argmax())
            focus = min(argmax // 2, len(text.split()) - 1)
            pause = ends and focus > 0 and argmax > 2 * focus
            for relation, index in (("predicted", t + 1), ("fed", t), ("next", t + 2)):
                if index < len(words) and (word := words[index]) is not None:
                    hits.setdefault((f"aligned_{relation}", layer, head), []).append(focus == word and not pause)
                    if relation == "predicted":
                        hits.setdefault(("aligned_lag", layer, head), []).append(0.02 * (argmax - 2 * word))
    cross = study.heads[study.heads["site"] == "cross"].set_index(["layer", "head"])
    assert len(hits) == 4 * 6 and "aer_predicted" not in cross
    message = study.write_alignment(folder, force=True)
    assert f"largest aligned_predicted is {cross['aligned_predicted'].max():.2f}" in message
    for (column, layer, head), values in hits.items():
        assert cross.loc[(layer, head), column] == pytest.approx(np.mean(values), abs=1e-6), (column, layer, head)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("begin", "start", "no column begin"), ("0.npy", "9.npy", r"0\.npy has no words"),
        ("0.04", "0.09", "do not go back"),
        ("CHILD", "DOG", r"0\.npy: word 2 is 'DOG! SINGS!', its transcript goes on with 'child sings'"),
    ],
)  # fmt: skip
def test_times_that_fit_no_transcript_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    path = write_times(folder, ends=False)
    path.write_text(path.read_text().replace(old, new))
    texts: dict[str, Any] = {"target": folder / "transcripts", "only": "alignment", "word_times": path}
    with pytest.raises(DataError, match=message):
        hs.load(folder).analyze(folder / "recordings", **texts)
    with pytest.raises(ConfigError, match="reads text"):
        hs.load("headscope/assets/en-de").analyze(["A dog."], **texts | {"target": ["Ein Hund."]})


@pytest.mark.parametrize("begin", ["<s>", "<s> <en>"], ids=["one", "two"])
def test_what_it_writes_down_is_the_likeliest_token_after_token(folder: Path, begin: str) -> None:
    """After the tokenizer's prefix of a transcript, whose probabilities do not count."""
    checkpoint = open_checkpoint(str(folder), device="cpu")
    special = [("<s>", 1), ("</s>", 2), ("<en>", 5)]
    checkpoint.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{begin} $A </s>", special_tokens=special
    )
    names, first = [str(folder / "1.npy"), str(folder / "0.npy")], len(begin.split())
    translations = checkpoint.translations(names, TranslateOptions(beam=1, max_len_b=6, scores=True, keep_bpe=True))
    for name, [best] in zip(names, translations, strict=True):
        source, ids, score = pad_side(checkpoint.encode([name], side="source", limit=9)), [1, 5][:first], 0.0
        while len(ids) < first + 6 and ids[first:][-1:] != [2]:
            target = pad_side([Encoded(ids, [False] * len(ids))])
            with torch.no_grad():
                last = checkpoint.logits(Batch(torch.arange(1), 0, source, target))[0, -1].log_softmax(-1)
            ids, score = [*ids, int(last.argmax())], score + float(last.max())
        pieces = checkpoint.tokenizer.convert_ids_to_tokens(ids[first:], skip_special_tokens=True)  # type: ignore[attr-defined]
        assert best.text == " ".join(pieces), "what it begins with is no part of it"
        assert best.score == pytest.approx(score / (len(ids) - first), rel=1e-4)


@pytest.mark.slow
def test_it_is_evaluated_and_refitted_beside_transcripts_that_change(folder: Path, tmp_path: Path) -> None:
    """Recordings are unchanged; no text that ships replaces them."""
    text: dict[str, Any] = {"source": folder / "recordings", "target": folder / "transcripts"}
    scores = hs.evaluate(str(folder), text["source"], target=text["target"], bootstrap=20, max_len_b=4)
    assert scores["bleu"].value >= 0 and scores["perplexity"].value > 1
    pair: dict[str, Any] = {
        name: [*4 * path.read_text().splitlines()] for name, path in zip(("text", "target"), text.values(), strict=True)
    }
    small = hs.load(str(folder)).remove("cross.1.*,encoder-self.0.0", **pair, refit=hs.Refit(method="auto"))
    assert "random subwords" in str(small.compensation)
    checkpoint, corpus = hs.load(str(folder)).checkpoint, open_corpus(text["source"], target=text["target"])
    for name, draw in anchor_sources(checkpoint, corpus, ("mixed",)).items():
        lines = list(draw())
        assert {line.source for line in lines} <= {line.source for line in corpus}, name
        assert [line.target for line in lines] != [line.target for line in corpus], name


def test_times_are_those_of_transformers_and_never_go_back(speech: SpeechCheckpoint) -> None:
    weights = torch.rand(2, 7, 11, generator=torch.Generator().manual_seed(0)).softmax(-1)
    output: Any = ModelOutput(
        cross_attentions=[(weights[:1][None], weights[1:][None])], sequences=torch.zeros(1, 8, dtype=torch.long)
    )
    model: Any = speech.model
    theirs = model._extract_token_timestamps(output, [[0, 0], [1, 0]], num_input_ids=0)[0]
    ours = token_times(weights)
    np.testing.assert_allclose(ours[:-1], theirs[: len(ours) - 1], atol=1e-6)
    assert ours == sorted(ours) and ours[-1] == pytest.approx(0.22)


def test_sound_is_read_where_soundfile_is_installed(
    speech: SpeechCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "a.wav"
    with pytest.raises(DataError):
        speech.encode([str(name)], side="source", limit=5)
    name.write_bytes(b"RIFF")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"headscope\[audio\]"):
        speech.encode([str(name)], side="source", limit=5)
    fake: Any = ModuleType("soundfile")
    fake.read = lambda path, **options: (np.sin(np.arange(1600.0))[:, None], 16000)
    monkeypatch.setitem(sys.modules, "soundfile", fake)
    (encoding,) = speech.encode([str(name)], side="source", limit=5)
    assert POSITIONS - sum(encoding.special) == 5, "1600 samples are 10 frames, two for each position"
    fake.read = lambda path, **options: (np.zeros((10, 1)), 8000)
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"8000.*16000"):
        speech.encode([str(tmp_path / "b.wav")], side="source", limit=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.zeros((4, 3)), r"x\.npy"), (np.zeros((BINS, 101)), r"x\.npy"), (np.zeros((BINS, 3), "c8"), "complex64")],
)
def test_features_of_another_size_are_refused(
    speech: SpeechCheckpoint, tmp_path: Path, values: Any, message: str
) -> None:
    np.save(tmp_path / "x.npy", values)
    with pytest.raises(DataError, match=message):
        speech.encode([str(tmp_path / "x.npy")], side="source", limit=5)
