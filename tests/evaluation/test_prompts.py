"""Prompts in pairs with answers: which id is read where, and what cannot be read."""

from typing import Any

import pytest

from headscope.data.batching import Omissions, batches
from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import IGNORED, Batch
from headscope.errors import DataError
from headscope.evaluation.prompts import join_answer, with_answers
from headscope.formats.base import Checkpoint
from tests.makers import wrappers
from tests.oracles import classifiers, prompts, speakers, tiny


def corpus(*lines: str) -> Corpus:
    return open_corpus(lines)


def read(model: Checkpoint, text: Corpus, *, tokens: int = 101, limit: int = 60, labels: bool = False) -> list[Batch]:
    return list(batches(text, model, tokens=tokens, limit=limit, omissions=Omissions(), labels=labels))


def row(batch: Batch, number: int, side: Any) -> list[int]:
    ids: list[int] = side.ids[number][side.real[number]].tolist()
    return ids


@pytest.mark.parametrize(
    ("kind", "has_prefix"),
    [
        (kind, has_prefix)
        for kind, speaker in speakers.SPEAKERS.items()
        for has_prefix in ((True, False) if speaker.two_sided else (False,))
    ],
)
def test_ids_are_those_of_the_words(kind: str, has_prefix: bool) -> None:
    expected, count = prompts.prompts(kind, prefix=has_prefix), 0
    for batch in read(speakers.checkpoint(kind), prompts.corpus(kind, prefix=has_prefix)):
        for index, number in enumerate(batch.indices.tolist()):
            contrasts, prompt = batch.contrasts, expected[number]
            assert contrasts is not None
            assert row(batch, index, batch.source) == prompt.clean
            assert row(batch, index, contrasts.corrupt) == prompt.corrupt
            assert prompt.target is None or row(batch, index, batch.target) == prompt.target
            assert contrasts.positions[index] == prompt.position and contrasts.answers[index] == prompt.answer
            assert contrasts.wrong[index] == (IGNORED if prompt.wrong is None else prompt.wrong)
            count += 1
    assert count == prompts.COUNT


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_labels_end_with_the_answer(kind: str) -> None:
    expected = prompts.prompts(kind)
    for batch in read(speakers.checkpoint(kind), prompts.corpus(kind), labels=True):
        assert batch.labels is not None
        for index, number in enumerate(batch.indices.tolist()):
            prompt = expected[number]
            text = prompt.clean if prompt.target is None else prompt.target
            labels = batch.labels[index]
            assert labels[labels != IGNORED].tolist() == [*text[1:], prompt.answer]


def test_corrupted_changes_places_and_rows_keep_what_belongs_to_them() -> None:
    for batch in read(speakers.checkpoint("gpt2"), prompts.corpus("gpt2"), tokens=1000):
        other = batch.corrupted_batch
        assert other.contrasts is not None and batch.contrasts is not None
        assert other.source is batch.contrasts.corrupt and other.contrasts.corrupt is batch.source
        part = batch.rows(batch.indices.argsort()[:1])
        assert part.contrasts is not None and len(part.contrasts.answers) == 1
        assert part.contrasts.corrupt.ids.shape == part.source.ids.shape


def test_classes_are_answers() -> None:
    kind = "bert"
    checkpoint = wrappers.hugging_face(classifiers.model(kind), classifiers.tokenizer(kind))
    text = with_answers(checkpoint, corpus("ah bi", "ci"), ["ah bj", "cj"], ["good\tbad", "2"])
    (first, second) = [sentence.contrast for sentence in text]
    assert first is not None and second is not None
    assert (first.answer, first.wrong, first.position, first.length) == (2, 0, 0, 4)
    assert (second.answer, second.wrong) == (4, None)
    with pytest.raises(DataError, match=r"^answer:1: .*'best'.*0 \(bad\)"):
        with_answers(checkpoint, corpus("ah bi"), ["ah bj"], ["best"])
    with pytest.raises(DataError, match="class"):
        with_answers(checkpoint, corpus("ah bi"), ["ah bj"], ["good\tgood"])


@pytest.mark.parametrize(
    ("before", "answer", "text"),
    [
        ("gave to", "Mary", "gave to Mary"),
        ("gave to", " Mary", "gave to Mary"),
        ("2+2=", "4", "2+2=4"),
        ("Answer:", " A", "Answer: A"),
        ("京都は日本の", "都市", "京都は日本の都市"),
        ("", "Haus", "Haus"),
    ],
)
def test_words_are_kept_apart(before: str, answer: str, text: str) -> None:
    assert join_answer(before, answer) == text


def test_a_special_token_at_the_end_of_a_prompt_stays_where_the_user_wrote_it() -> None:
    """Only the tokens that the tokenizer appends to every text are cut off."""
    model = speakers.SPEAKERS["gpt2"].make
    assert model is not None
    checkpoint = speakers.wrap_model(model, speakers.Speaker(model, (tiny.START,), (tiny.END,)))
    (first,) = with_answers(checkpoint, corpus("ah bi"), ["ah bj"], ["ci"])
    assert first.contrast is not None and (first.contrast.length, first.contrast.position) == (3, 2)
    (second,) = with_answers(checkpoint, corpus("ah bi [SEP]"), ["ah bj [SEP]"], [" ci"])
    assert second.contrast is not None and (second.contrast.length, second.contrast.position) == (4, 3)
    (batch,) = read(checkpoint, with_answers(checkpoint, corpus("ah bi [SEP]"), ["ah bj [SEP]"], [" ci"]))
    assert row(batch, 0, batch.source)[-1] == tiny.END


@pytest.mark.parametrize(
    ("clean", "corrupt", "answers", "message"),
    [
        (["ah bi", "ci"], ["ah bj", "ci ah"], ["ci", "di"], "corrupt:2: 3.*sentences:2.*2"),
        (["ah bi"], ["ah bj", "ci"], ["ci"], "lines.*1.*2"),
        (["ah bi"], ["ah bj"], ["ci", "di"], "lines.*1.*2"),
        (["ah bi"], ["ah bj"], ["ci\tdi\tei"], "answer:1:"),
        (["ah bi"], ["ah bj"], ["ci\t"], "answer:1:"),
        (["ah bi"], ["ah bj"], ["cia\tcib"], "answer:1:.*'ci'"),
        (["ah bi"], ["ah bj"], ["ŵ"], "answer:1:.*'ŵ'"),
    ],
)
def test_what_cannot_be_read(clean: list[str], corrupt: list[str], answers: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        with_answers(speakers.checkpoint("gpt2"), globals()["corpus"](*clean), corrupt, answers)
