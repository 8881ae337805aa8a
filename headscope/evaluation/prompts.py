"""Pairs of clean and corrupt prompts, and the ids and positions of their answers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from headscope.data.corpus import Contrast, Corpus, Sentence
from headscope.data.encoded import UNCUT, Encoded, SideName
from headscope.data.labels import label_number
from headscope.errors import CheckpointError, ConfigError, DataError, flag, restate
from headscope.evaluation.opened import refuse_unread_target
from headscope.files.reading import Lines, in_step, read_lines, text_name
from headscope.formats.base import Checkpoint


def with_answers(checkpoint: Checkpoint, clean: Corpus, corrupt: Lines, answers: Lines) -> Corpus:
    """A corpus of prompts with their corrupt versions and answers, line by line.

    A line of `answers` has the right answer and, after a tab, a wrong one if there is any. Causal models continue the
    prompt with the answer; encoder–decoders read the prompt and write the answer, after `target` if the corpus has one;
    masked language models write it in place of the mask; classifiers answer with a class. Of an answer of several
    subwords the first is read. DataError, with the line, if a prompt and its corrupt version differ in their number of
    subwords, if both answers begin alike, or if the model cannot give an answer. ConfigError for models without
    predictions.
    """
    if checkpoint.predicts not in ("classes", "words"):
        raise ConfigError(f"{flag.clean}: a model of type {checkpoint.model_type!r} has no answers; take another model")
    refuse_unread_target(checkpoint, clean)
    texts = {"corrupt": corrupt, "answer": answers}
    text_names = [text_name(text) if isinstance(text, (str, Path)) else kind for kind, text in texts.items()]
    names = (clean.name, text_names[0], text_names[1])
    contrasts: list[Contrast] = []

    def lines() -> Iterator[tuple[tuple[Sentence, str], str]]:
        pairs = in_step(clean.read(), read_lines(corrupt), names[:2])
        return in_step(pairs, read_lines(answers), (names[0], names[2]))

    for (sentence, other), line in lines():
        if len(contrasts) < clean.count:
            contrasts.append(_contrast(checkpoint, sentence, other, line, names))

    def prompts() -> Iterator[Sentence]:
        for ((sentence, _), line), contrast in zip(lines(), contrasts, strict=False):
            yield sentence._replace(
                target=join_answer(sentence.target or "", _answers(line)[0]) if checkpoint.needs_target else None,
                contrast=contrast,
            )

    return clean.with_field("contrast", prompts, has_contrast=True, has_target=checkpoint.needs_target)


def _contrast(
    checkpoint: Checkpoint, sentence: Sentence, corrupt: str, line: str, names: tuple[str, str, str]
) -> Contrast:
    number = sentence.number + 1
    with restate(DataError, f"{names[2]}:{number}: {{why}}", DataError):
        answer, *wrong = [_find_answer(checkpoint, sentence, text) for text in _answers(line)]
    if wrong and wrong[0].answer == answer.answer:
        problem = "both answers are the same class"
        if checkpoint.predicts == "words":
            begin = checkpoint.subwords([answer.answer], side="target")[0]
            problem = f"both answers begin with {begin!r}, which is all that is read; give answers that differ there"
        raise DataError(f"{names[2]}:{number}: {problem}")
    n_closing = len(_encode(checkpoint, sentence.source).ids) - answer.length
    corrupt_length = len(_encode(checkpoint, corrupt).ids) - n_closing
    if corrupt_length != answer.length:
        raise DataError(
            f"{names[1]}:{number}: {corrupt_length} subwords, and {names[0]}:{number} has {answer.length}; give as many"
        )
    longer = any(read.longer for read in (answer, *wrong))
    return answer._replace(corrupt=corrupt, wrong=wrong[0].answer if wrong else None, longer=longer)


def _answers(line: str) -> list[str]:
    answers = [answer.rstrip() for answer in line.split("\t")]
    if len(answers) > 2 or not all(answers):
        raise DataError("a line is an answer, or two with one tab between: the right one and a wrong one")
    return answers


def join_answer(before: str, answer: str) -> str:
    """A text and its continuation, with a space between if both would otherwise run together into one word."""
    ends = (before[-1:], answer[:1])
    apart = all(end.isalnum() and unicodedata.east_asian_width(end) not in "WF" for end in ends)
    return f"{before} {answer}" if apart else before + answer


def _encode(checkpoint: Checkpoint, text: str, side: SideName = "source") -> Encoded:
    return checkpoint.encode([text], side=side, limit=UNCUT)[0]


def _find_answer(checkpoint: Checkpoint, sentence: Sentence, answer: str) -> Contrast:
    """The position and id of an answer, as a `Contrast`; DataError (without the line) if there is none."""
    if checkpoint.predicts == "classes":
        number = label_number(answer, checkpoint.label_names)
        return Contrast("", len(_encode(checkpoint, sentence.source).ids), 0, number)
    if checkpoint.two_sided:
        return _find_translated(checkpoint, sentence, answer)
    return (_find_continued if checkpoint.decodes else _find_filled)(checkpoint, sentence, answer)


def _find_continued(checkpoint: Checkpoint, sentence: Sentence, answer: str) -> Contrast:
    prompt, full = (_encode(checkpoint, text) for text in (sentence.source, join_answer(sentence.source, answer)))
    backwards = zip(reversed(prompt.ids[1:]), reversed(full.ids), reversed(prompt.special), strict=False)
    # the special ids that both texts end with
    ending = sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1] and ids[2], backwards))
    length, last = len(prompt.ids) - ending, len(full.ids) - ending
    _refuse_other_start(prompt.ids[:length], full.ids[:last], answer)
    if last == length + 1 and full.unknown > prompt.unknown:
        raise DataError(f"the vocabulary has no {answer!r}")
    return Contrast("", length, length - 1, full.ids[length], longer=last > length + 1)


def _find_translated(checkpoint: Checkpoint, sentence: Sentence, answer: str) -> Contrast:
    text = join_answer(sentence.target or "", answer)
    inputs, (label_ids,) = _encode(checkpoint, text, "target"), checkpoint.labels([text], limit=UNCUT)
    special = {number for number, is_special in zip(inputs.ids, inputs.special, strict=True) if is_special}
    position = next((index for index, number in enumerate(label_ids) if number not in special), len(label_ids))
    if sentence.target is not None:
        start_ids = _encode(checkpoint, sentence.target, "target").without_end().ids
        _refuse_other_start(start_ids, inputs.ids, answer)
        position = len(start_ids) - 1
    if position >= len(inputs.ids) or position >= len(label_ids):
        raise DataError(f"the vocabulary makes nothing of {answer!r}")
    longer = not all(inputs.special[position + 2 :])
    length = len(_encode(checkpoint, sentence.source).ids)
    return Contrast("", length, position, label_ids[position], longer=longer)


def _find_filled(checkpoint: Checkpoint, sentence: Sentence, answer: str) -> Contrast:
    with restate(ConfigError, f"{flag.clean}: {{why}}", CheckpointError):
        mask = checkpoint.mask_id()
    prompt, token = _encode(checkpoint, sentence.source), checkpoint.subwords([mask], side="source")[0]
    if prompt.ids.count(mask) != 1 or sentence.source.count(token) != 1:
        raise DataError(f"its prompt has {prompt.ids.count(mask)} masks; write {token} once, where the answer belongs")
    full, position = _encode(checkpoint, sentence.source.replace(token, answer)), prompt.ids.index(mask)
    _refuse_other_start(prompt.ids[:position], full.ids, answer)
    length = len(prompt.ids)
    return Contrast("", length, position, full.ids[position], longer=len(full.ids) > length)


def _refuse_other_start(before: list[int], full: list[int], answer: str) -> None:
    if full[: len(before)] != before or len(full) <= len(before):
        raise DataError(f"with {answer!r} its prompt has other subwords; a space between them belongs to the answer")
