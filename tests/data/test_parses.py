"""Parses of CoNLL-U files and of stanza."""

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.assets import captions, trained_model
from headscope.data import stanza_parses
from headscope.data.parses import Parse, Relation, Token, read_conllu
from headscope.data.stanza_parses import PROCESSORS, parse_with_stanza
from headscope.errors import DataError


def row(
    number: str, form: str = "a", head: str = "0", relation: str = "root", *, misc: str = "_", deps: str = "_"
) -> str:
    return "\t".join([number, form, form, "X", "_", "_", head, relation, deps, misc])


def span_row(number: str, form: str, misc: str = "_") -> str:
    return "\t".join([number, form, *"_______", misc])


SENTENCE = [
    "# newdoc id = x",
    "# sent_id = 1",
    "# text = I don't  know (it).",
    row("1", "I", "4", "nsubj:pass"),
    span_row("2-3", "don't"),
    row("2", "do", "4", "aux"),
    row("3", "n't", "2", "advmod"),
    row("4", "know", "0", "root"),
    row("5", "(", "6", "punct", misc="SpaceAfter=No"),
    row("6", "it", "4", "obj", misc="SpaceAfter=No", deps="4:obj|4.1:obj"),
    row("6.1", "seen", "_", "_", deps="4:conj"),
    row("7", ")", "6", "punct", misc="SpaceAfter=No"),
    row("8", ".", "4", "punct"),
]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*lines: str, name: str = "x.conllu") -> Path:
        path = tmp_path / name
        content = "".join(f"{line}\n" for line in lines).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


def texts(parse: Parse) -> list[str]:
    return [parse.text[token.start : token.end] for token in parse.tokens]


@pytest.mark.parametrize("name", ["x.conllu", "x.conllu.gz"])
def test_sentence_with_multiword_token_and_empty_node(write: Write, name: str) -> None:
    (parse,) = read_conllu(write(*SENTENCE, "", name=name))
    assert parse.text == "I don't  know (it)."
    assert texts(parse) == ["I", "don't", "know", "(", "it", ")", "."]
    assert parse.relations == (
        Relation("nsubj", 2, 0),
        Relation("aux", 2, 1),  # n't -> do lies within don't and does not count
        Relation("punct", 4, 3),
        Relation("obj", 2, 4),
        Relation("punct", 4, 5),
        Relation("punct", 2, 6),
    )


def test_windows_lines_byte_order_mark_and_gzip_without_suffix(tmp_path: Path) -> None:
    content = "\ufeff" + "\r\n".join([*SENTENCE, "", row("1", "Ende"), ""])
    (tmp_path / "plain").write_bytes(content.encode())
    (tmp_path / "zipped").write_bytes(gzip.compress(content.encode()))
    first, second = list(read_conllu(tmp_path / "plain")), list(read_conllu(tmp_path / "zipped"))
    assert first == second and [parse.text for parse in first] == ["I don't  know (it).", "Ende"]


BROKEN = [
    (["a sentence"], 1, "1.*10"),
    ([row("1"), row("2", "b", "1") + "\t_"], 2, "11.*10"),
    ([row("1"), row("3")], 2, "id '3'.*2"),
    ([row("1"), row("1")], 2, "id '1'.*2"),
    ([row("0")], 1, "id '0'.*1"),
    ([row("x")], 1, "id 'x'"),
    ([row("_")], 1, "id '_'"),
    ([row("1"), row("2.1")], 2, r"id '2\.1'"),
    ([row("1"), span_row("3-4", "b")], 2, "3-4.*2"),
    ([span_row("1-2", "ab"), row("1"), span_row("2-3", "b")], 3, "2-3.*2"),
    ([span_row("2-1", "ab")], 1, "id '2-1'"),
    ([span_row("1-3", "ab"), row("1"), row("2", head="1")], 1, "3.*2 words"),
    ([span_row("1-2", "ab")], 1, "2.*0 words"),
    ([row("1", head="two")], 1, "head 'two'"),
    ([row("1", head="_")], 1, "head '_'"),
    ([row("1", head="-1")], 1, "head '-1'"),
    ([row("1"), row("2", head="3")], 2, "head 3.*1 to 2"),
    ([row("1"), row("2", head="2")], 2, "head 2"),
    ([row("1"), row("2", head="1", relation="_")], 2, "word 2.*8"),
    ([row("1", "")], 1, "id 1.*2"),
    (["# text = ab", row("1", "a"), row("2", "c", "1")], 3, "'c'.*'b'"),
    (["# text = a b", row("1", "a")], 2, "# text.*' b'"),
    (["# text = x", "", "# text = y"], 3, "CoNLL-U"),
    ([], 1, "CoNLL-U"),
]


@pytest.mark.parametrize(("lines", "number", "message"), BROKEN)
@pytest.mark.parametrize("good", [0, 1])
def test_broken_lines(write: Write, lines: list[str], number: int, message: str, good: int) -> None:
    before = [*SENTENCE, ""] * good
    path = write(*before, *lines)
    if good and message == "CoNLL-U":
        assert len(list(read_conllu(path))) == 1
        return
    location = re.escape(f"{path}:{len(before) + number}: ")
    with pytest.raises(DataError, match=f"^{location}.*{message}") as error:
        list(read_conllu(path))
    assert "\n" not in str(error.value) and "; " in str(error.value)


@pytest.mark.slow
def test_every_shared_treebank_reads(shared: Path) -> None:
    path = shared / "data" / "ud" / "de_gsd-ud-dev.conllu.gz"  # zum, im: multiword tokens
    parses = list(read_conllu(path))
    assert (len(parses), sum(len(parse.tokens) for parse in parses)) == (799, 12316)
    english = list(read_conllu(shared / "data" / "ud" / "en_pud-ud-test.conllu.gz"))
    assert (len(english), sum(len(parse.tokens) for parse in english)) == (1000, 21051)


# Parses of the translations: what decoders read has words, tags and relations too.


LINES = 24


def test_decoder_heads_are_tested_on_the_relations_of_the_target() -> None:
    parses = list(islice(read_conllu(captions("de.conllu")), LINES))
    counts = Counter(relation.relation for parse in parses for relation in parse.relations)
    text: dict[str, Any] = {"target": captions("de"), "target_parse": captions("de.conllu"), "max_sentences": LINES}
    study = hs.load(trained_model()).analyze(captions("en"), **text, only="syntactic", bootstrap=20)
    table = study.table("syntactic")
    assert set(table["site"]) == {"decoder-self"}
    rows = table[(table["layer"] == 1) & (table["head"] == 6)].to_dict("records")
    head: dict[str, Any] = {str(row["label"]): row for row in rows}
    assert not study.record["data"]["unaligned"]
    for name in ("nsubj", "obj", "amod"):
        assert head[f"{name}>"]["count"] == head[f"{name}<"]["count"] == counts[name]
    # in German the object follows its verb here, and a decoder sees what is before it alone
    assert head["obj<"]["accuracy"] > 0.5 > head["obj>"]["accuracy"]
    assert "parse:captions.de.conllu" in str(study.signature)


@pytest.mark.parametrize("end", [[], [""], ["", " ", ""]])
def test_text_rebuilt_from_forms(write: Write, end: list[str]) -> None:
    rows = [line for line in SENTENCE if not line.startswith("#")]
    parses = list(read_conllu(write("", *rows, "", "# text_en = no text", row("1", "Ja", misc="x=y"), *end)))
    assert [parse.text for parse in parses] == ["I don't know (it) .".replace(") ", ")"), "Ja"]
    assert parses[1] == Parse("Ja", (Token(0, 2),), ())


# stanza.

SENTENCES = [
    "The tired old dog quickly chased a black cat.",
    "",
    "  I don't know.  She can't — “naïve” café 😀!",
    "see http://example.org/" + "b" * 400,
    " ",
    "word " * 1001,
    "He sleeps.",
]


@pytest.fixture(scope="module")
def resources(shared: Path) -> Path:
    folder = shared / "stanza_resources"
    if not folder.is_dir():
        pytest.skip("no stanza models in the shared data")
    return folder


@pytest.fixture(scope="module")
def stanza_run(resources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Parse], Path]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stanza_parses, "BATCH", 3)
        return list(parse_with_stanza(iter(SENTENCES), resources=resources, cache_dir=cache)), cache


@pytest.mark.slow
def test_stanza_gives_one_parse_per_line(stanza_run: tuple[list[Parse], Path]) -> None:
    parses, _ = stanza_run
    assert [parse.text for parse in parses] == SENTENCES
    relations = {(r.relation, texts(parses[0])[r.head], texts(parses[0])[r.dependent]) for r in parses[0].relations}
    expected = {("nsubj", "chased", "dog"), ("obj", "chased", "cat"), ("amod", "dog", "old")}
    assert expected | {("advmod", "chased", "quickly")} <= relations
    assert parses[1] == Parse("", (), ()) and parses[4] == Parse(" ", (), ())


def test_second_run_reads_the_cache(
    stanza_run: tuple[list[Parse], Path], resources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses, cache = stanza_run
    (file,) = cache.iterdir()
    assert file.suffix == ".jsonl"
    monkeypatch.setattr("stanza.Pipeline", None)  # loading a model would fail
    assert list(parse_with_stanza(SENTENCES, resources=resources, cache_dir=cache)) == parses


class Fake:
    """Stands for stanza's pipeline: whitespace tokens, each the dependent of the first."""

    processors = PROCESSORS

    def __init__(self, *_: object, **options: object) -> None:
        self.options = options

    def bulk_process(self, documents: list[Any]) -> list[object]:
        import stanza

        return [self.parse(stanza, document.text) for document in documents]

    def parse(self, stanza: Any, text: str) -> object:
        rows, end = [], 0
        for n, form in enumerate(text.split(), start=1):
            start = text.index(form, end)
            end = start + len(form)
            misc = f"start_char={start}|end_char={end}"
            rows.append({"id": n, "text": form, "head": min(n - 1, 1), "deprel": "dep:x", "misc": misc})
        return stanza.Document([rows] if rows else [], text=text)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr("stanza.Pipeline", Fake)
    return Fake


@pytest.mark.parametrize("spoil", [lambda c: c[:-9], lambda c: b"", lambda c: b"\xff" * 9])
def test_a_corrupt_cache_is_named(
    fake: type[Fake], resources: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    lines = ["a b c", "d"]
    list(parse_with_stanza(lines, resources=resources, cache_dir=tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=f"{file} is damaged; delete it"):
        list(parse_with_stanza(lines, resources=resources, cache_dir=tmp_path))


def test_an_error_of_stanza_is_not_taken_for_one_of_the_cache(
    fake: type[Fake], resources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[object]:
        raise OSError("no space left for its files")

    monkeypatch.setattr(fake, "bulk_process", fail)
    with pytest.raises(DataError, match=r"stanza cannot parse the text .*no space left.*; give --parse FILE.conllu"):
        list(parse_with_stanza(["a b"], resources=resources, cache_dir=tmp_path))
    assert not list(tmp_path.iterdir())


def damage_models(resources: Path, folder: Path, defect: str) -> Path:
    """A copy of the models with a defect."""
    copy = folder / "models"
    shutil.copytree(resources, copy, copy_function=shutil.copyfile)
    listing = json.loads((copy / "resources.json").read_text())
    if defect == "no mwt":
        for entry in (listing["en"], *listing["en"]["packages"].values()):
            del entry["mwt"]
        shutil.rmtree(copy / "en" / "mwt")
    elif defect == "no depparse":
        del listing["en"]["packages"]["default"]["depparse"]
    elif defect == "no file":
        (copy / "en" / "depparse" / "ewt.pt").unlink()
    elif defect == "truncated":
        path = copy / "en" / "depparse" / "ewt.pt"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
    (copy / "resources.json").unlink()
    (copy / "resources.json").write_text("{" if defect == "no json" else json.dumps(listing))
    return copy


HINT = r"; name the directory of a stanza download with --stanza-dir DIR, or fetch it with --download$"
MISSING = [
    ("no json", "Expecting property name"),
    ("no depparse", "it has no depparse model"),
    ("no file", "/en/depparse/ewt.pt"),
    ("truncated", "stanza cannot load its 'en' models from .*models"),
]


@pytest.mark.parametrize(("defect", "message"), MISSING)
def test_missing_models(resources: Path, tmp_path: Path, defect: str, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*{HINT}") as error:
        parse_with_stanza(["a"], resources=damage_models(resources, tmp_path, defect), cache_dir=tmp_path)
    assert "\n" not in str(error.value)


def test_download_only_when_asked(
    fake: type[Fake], resources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(lang: str, *, model_dir: str, processors: str, verbose: bool) -> None:
        assert (lang, processors, verbose) == ("en", "tokenize,pos,lemma,depparse", False)
        shutil.copytree(resources, model_dir, copy_function=shutil.copyfile)

    monkeypatch.setattr("stanza.download", fetch)
    folder = tmp_path / "new"
    assert len(list(parse_with_stanza(["a"], resources=folder, cache_dir=tmp_path, download=True))) == 1
    assert len(list(parse_with_stanza(["b"], resources=folder, cache_dir=tmp_path))) == 1
