"""CoNLL-U files read and refused line by line; stanza's parses, their cache, and missing models."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from headscope.errors import DataError
from headscope.syntax import Parse, Relation, Token, parse_with_stanza, read_conllu


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


@pytest.mark.parametrize("end", [[], [""], ["", " ", ""]])
def test_text_rebuilt_from_forms(write: Write, end: list[str]) -> None:
    rows = [line for line in SENTENCE if not line.startswith("#")]
    parses = list(read_conllu(write("", *rows, "", "# text_en = no text", row("1", "Ja", misc="x=y"), *end)))
    assert [parse.text for parse in parses] == ["I don't know (it) .".replace(") ", ")"), "Ja"]
    assert parses[1] == Parse("Ja", (Token(0, 2),), ())


def test_windows_lines_byte_order_mark_and_gzip_without_suffix(tmp_path: Path) -> None:
    content = "\ufeff" + "\r\n".join([*SENTENCE, "", row("1", "Ende"), ""])
    (tmp_path / "plain").write_bytes(content.encode())
    (tmp_path / "zipped").write_bytes(gzip.compress(content.encode()))
    first, second = list(read_conllu(tmp_path / "plain")), list(read_conllu(str(tmp_path / "zipped")))
    assert first == second and [parse.text for parse in first] == ["I don't  know (it).", "Ende"]


def test_a_form_with_a_space(write: Write) -> None:
    lines = ["# text = 10 000 Mann", row("1", "10 000", "2", "nummod"), row("2", "Mann")]
    (parse,) = read_conllu(write(*lines))
    assert texts(parse) == ["10 000", "Mann"]


BROKEN = [
    (["a sentence"], 1, "1 column; a row has 10, separated by tabs"),
    ([row("1"), row("2", "b", "1") + "\t_"], 2, "11 columns; a row has 10"),
    ([row("1"), row("3")], 2, "id 3 where 2 was due; ids are 1, 2, 3"),
    ([row("1"), row("1")], 2, "id 1 where 2 was due"),
    ([row("0")], 1, "id 0 where 1 was due"),
    ([row("x")], 1, "id 'x'; ids are 1, 2, 3 .* ranges such as 3-4 .* empty nodes such as 8.1"),
    ([row("_")], 1, "id '_'; ids are"),
    ([row("1"), row("2.1")], 2, "id '2.1'; ids are"),
    ([row("1"), span_row("3-4", "b")], 2, "range 3-4 where 2 was due"),
    ([span_row("1-2", "ab"), row("1"), span_row("2-3", "b")], 3, "range 2-3 where 2 was due"),
    ([span_row("2-1", "ab")], 1, "id '2-1'; ids are"),
    ([span_row("1-3", "ab"), row("1"), row("2", head="1")], 1, "the range ends at 3 .* has 2 words; ids"),
    ([span_row("1-2", "ab")], 1, "the range ends at 2 but the sentence has 0 words"),
    ([row("1", head="two")], 1, "head 'two' of word 1 is not a number; a head is a word"),
    ([row("1", head="_")], 1, "head '_' of word 1 is not a number"),
    ([row("1", head="-1")], 1, "head '-1' of word 1 is not a number"),
    ([row("1"), row("2", head="3")], 2, r"head 3 is outside the sentence; .* \(1 to 2\), or 0 for the root"),
    ([row("1"), row("2", head="2")], 2, "head 2 is the word itself; a head is another word"),
    ([row("1"), row("2", head="1", relation="_")], 2, "word 2 has no relation; column 8"),
    ([row("1", "")], 1, "id 1 has no form; column 2 is the word as written"),
    (
        ["# text = ab", row("1", "a"), row("2", "c", "1")],
        3,
        "form 'c' is not what `# text` has there .'b'.; ",
    ),
    (["# text = a b", row("1", "a")], 2, "`# text` goes on after the last form .' b'.; the text holds"),
    (["# text = x", "", "# text = y"], 3, "no sentence in the file; give a CoNLL-U file with at least one"),
    ([], 1, "no sentence in the file"),
]


@pytest.mark.parametrize(("lines", "number", "message"), BROKEN)
@pytest.mark.parametrize("good", [0, 1])
def test_broken_lines(write: Write, lines: list[str], number: int, message: str, good: int) -> None:
    before = [*SENTENCE, ""] * good
    path = write(*before, *lines)
    if good and message.startswith("no sentence"):
        assert len(list(read_conllu(path))) == 1
        return
    place = re.escape(f"{path}:{len(before) + number}: ")
    with pytest.raises(DataError, match=f"^{place}{message}") as caught:
        list(read_conllu(path))
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_the_sentences_before_a_broken_line_are_read(write: Write) -> None:
    parses = read_conllu(write(*SENTENCE, "", row("2")))
    assert next(parses).text.startswith("I don't")
    with pytest.raises(DataError, match=":15: id 2 where 1 was due"):
        next(parses)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.conllu"
    path.write_bytes(row("1", "so").encode() + b"\n" + row("2", "früh", "1").encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"latin\.conllu:2: byte 5 of the line is not UTF-8; .* are UTF-8$"):
        list(read_conllu(path))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none\.conllu: No such file or directory; give a readable CoNLL-U file"
    ):
        list(read_conllu(tmp_path / "none.conllu"))
    with pytest.raises(DataError, match=r"Is a directory; give a readable CoNLL-U file, plain or \.gz"):
        list(read_conllu(tmp_path))


def test_broken_gzip(write: Write) -> None:
    lines = [line for n in range(499) for line in (f"# sent_id = {hash(str(n))}", *SENTENCE, "")]
    path = write(*lines, name="x.conllu.gz")
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[-6] ^= 1  # the checksum
    for content in (whole[: len(whole) // 2], bytes(spoilt), b"not gzip"):
        path.write_bytes(content)
        with pytest.raises(
            DataError, match=r"x\.conllu\.gz:\d+: the gzip data are truncated or corrupt .*; get"
        ):
            list(read_conllu(path))


def test_memory_is_flat(write: Write) -> None:
    path = write(*[*SENTENCE, ""] * 997)
    assert len(list(read_conllu(path))) == 997  # imports and caches are filled
    peaks = []
    for count in (97, 997):
        tracemalloc.start()
        assert sum(1 for _, _ in zip(range(count), read_conllu(path), strict=False)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] + 10_000


def test_every_shared_treebank_reads(shared: Path) -> None:
    path = shared / "data" / "ud" / "de_gsd-ud-dev.conllu.gz"  # zum, im: multiword tokens
    parses = list(read_conllu(path))
    assert (len(parses), sum(len(parse.tokens) for parse in parses)) == (799, 12316)
    english = list(read_conllu(shared / "data" / "ud" / "en_pud-ud-test.conllu.gz"))
    assert (len(english), sum(len(parse.tokens) for parse in english)) == (1000, 21051)


def test_neither_torch_nor_stanza_nor_conllu_is_imported() -> None:
    code = (
        "import sys, headscope.syntax; sys.exit(any(m in sys.modules for m in ('torch', 'stanza', 'conllu')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# stanza

LINES = [
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
def parsed(resources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Parse], Path]:
    cache = tmp_path_factory.mktemp("cache")
    return list(parse_with_stanza(iter(LINES), resources=resources, cache_dir=cache, batch=3)), cache


def test_stanza_gives_one_parse_per_line(parsed: tuple[list[Parse], Path]) -> None:
    parses, _ = parsed
    assert [parse.text for parse in parses] == LINES
    found = {
        (r.relation, texts(parses[0])[r.head], texts(parses[0])[r.dependent]) for r in parses[0].relations
    }
    expected = {("nsubj", "chased", "dog"), ("obj", "chased", "cat"), ("amod", "dog", "old")}
    assert expected | {("advmod", "chased", "quickly")} <= found
    assert parses[1] == Parse("", (), ()) and parses[4] == Parse(" ", (), ())


def test_stanza_line_of_two_sentences_is_a_forest(parsed: tuple[list[Parse], Path]) -> None:
    parse = parsed[0][2]
    assert texts(parse)[:7] == ["I", "don't", "know", ".", "She", "can't", "—"] and texts(parse)[-2] == "😀"
    assert Relation("nsubj", 2, 0) in parse.relations
    assert all(r.head != r.dependent and (r.head < 4) == (r.dependent < 4) for r in parse.relations)
    assert max(r.dependent for r in parse.relations) > 4


def test_stanza_long_tokens_stay_and_long_lines_are_left_alone(parsed: tuple[list[Parse], Path]) -> None:
    assert texts(parsed[0][3]) == LINES[3].split()
    assert parsed[0][5] == Parse(LINES[5], (), ())


def test_second_run_reads_the_cache(
    parsed: tuple[list[Parse], Path], resources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses, cache = parsed
    (file,) = cache.iterdir()
    assert file.suffix == ".jsonl"
    monkeypatch.setattr("stanza.Pipeline", None)  # loading a model would fail
    assert list(parse_with_stanza(LINES, resources=resources, cache_dir=cache)) == parses


def test_cached_run_does_not_even_import_stanza(parsed: tuple[list[Parse], Path], resources: Path) -> None:
    code = (
        "import sys; from headscope.syntax import parse_with_stanza as parse; lines = eval(sys.argv[1])\n"
        "found = list(parse(lines, resources=sys.argv[2], cache_dir=sys.argv[3]))\n"
        "sys.exit(len(found) != len(lines) or 'stanza' in sys.modules or 'torch' in sys.modules)"
    )
    arguments = [repr(LINES), str(resources), str(parsed[1])]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == 0


class Fake:
    """Stands for stanza's pipeline: whitespace tokens, each the dependent of the first."""

    built = 0

    def __init__(self, *_: object, **options: object) -> None:
        Fake.built += 1
        self.options = options

    def bulk_process(self, documents: list) -> list:
        import stanza

        return [self.parse(stanza, document.text) for document in documents]

    def parse(self, stanza, text: str) -> object:
        rows, end = [], 0
        for n, form in enumerate(text.split(), start=1):
            start = text.index(form, end)
            end = start + len(form)
            rows.append(
                {
                    "id": n,
                    "text": form,
                    "head": min(n - 1, 1),
                    "deprel": "dep:x",
                    "misc": f"start_char={start}|end_char={end}",
                }
            )
        return stanza.Document([rows] if rows else [], text=text)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr("stanza.Pipeline", Fake)
    Fake.built = 0
    return Fake


def test_key_of_the_cache(fake: type[Fake], resources: Path, tmp_path: Path) -> None:
    def run(lines: list[str], **options: object) -> list[Parse]:
        return list(parse_with_stanza(lines, **{"resources": resources, "cache_dir": tmp_path, **options}))

    first = run(["a b", "c"])
    assert first[0] == Parse("a b", (Token(0, 1), Token(2, 3)), (Relation("dep", 0, 1),))
    assert run(["a b", "c"], batch=1) == first and fake.built == 1
    run(["a", "b c"])
    run(["a b", "c", ""])
    assert fake.built == 3 and len(list(tmp_path.iterdir())) == 3
    run(["a b", "c"], lang="english")  # the same models under another name
    assert fake.built == 3


def test_other_models_are_another_key(fake: type[Fake], resources: Path, tmp_path: Path) -> None:
    copy, cache = tmp_path / "models", tmp_path / "cache"
    shutil.copytree(resources, copy, copy_function=shutil.copyfile)
    listing = json.loads((copy / "resources.json").read_text())
    list(parse_with_stanza(["a"], resources=copy, cache_dir=cache))
    listing["en"]["depparse"]["ewt"]["md5"] = "0" * 32
    (copy / "resources.json").chmod(0o644)
    (copy / "resources.json").write_text(json.dumps(listing))
    list(parse_with_stanza(["a"], resources=copy, cache_dir=cache))
    assert fake.built == 2 and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "spoil", [lambda c: c[:-9], lambda c: c.replace(b"0", b"1", 1), lambda c: b"", lambda c: b"\xff" * 9]
)
def test_corrupt_cache_is_rebuilt(
    fake: type[Fake], resources: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    lines = ["a b c", "d"]
    first = list(parse_with_stanza(lines, resources=resources, cache_dir=tmp_path))
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(spoil(good))
    assert list(parse_with_stanza(lines, resources=resources, cache_dir=tmp_path)) == first
    assert fake.built == 2 and file.read_bytes() == good


def test_unfinished_run_leaves_no_file(fake: type[Fake], resources: Path, tmp_path: Path) -> None:
    parses = parse_with_stanza(["a", "b", "c"], resources=resources, cache_dir=tmp_path, batch=1)
    next(parses)
    assert [file.suffix for file in tmp_path.iterdir()] == [".tmp"]
    parses.close()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_done_without(
    fake: type[Fake], resources: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    parses = parse_with_stanza(["a", "b"], resources=resources, cache_dir=tmp_path / "file" / "cache")
    assert [parse.text for parse in parses] == ["a", "b"]


def test_default_cache_and_resources(
    fake: type[Fake], resources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(resources))
    assert len(list(parse_with_stanza(["a"]))) == 1
    assert len(list((tmp_path / "headscope" / "parses").iterdir())) == 1


def test_tokens_that_do_not_lie_in_the_line(
    fake: type[Fake], resources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "parse", lambda self, stanza, text: Fake.parse_elsewhere(stanza))
    monkeypatch.setattr(
        fake,
        "parse_elsewhere",
        lambda stanza: stanza.Document(
            [[{"id": 1, "text": "x", "head": 0, "deprel": "root", "misc": "start_char=0|end_char=1"}]],
            text="x",
        ),
        raising=False,
    )
    assert list(parse_with_stanza(["abc"], resources=resources, cache_dir=tmp_path)) == [Parse("abc", (), ())]


def spoilt(resources: Path, folder: Path, what: str) -> Path:
    """A copy of the models with something wrong."""
    copy = folder / "models"
    shutil.copytree(resources, copy, copy_function=shutil.copyfile)
    listing = json.loads((copy / "resources.json").read_text())
    if what == "no mwt":
        for entry in (listing["en"], *listing["en"]["packages"].values()):
            del entry["mwt"]
        shutil.rmtree(copy / "en" / "mwt")
    elif what == "no depparse":
        del listing["en"]["packages"]["default"]["depparse"]
    elif what == "no file":
        (copy / "en" / "depparse" / "ewt.pt").unlink()
    elif what == "no dependency":
        listing["en"]["pos"]["ewt"]["dependencies"] = [{"model": "pretrain", "package": "vectors"}]
    elif what == "truncated":
        path = copy / "en" / "depparse" / "ewt.pt"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
    (copy / "resources.json").unlink()
    (copy / "resources.json").write_text("{" if what == "no json" else json.dumps(listing))
    return copy


HINT = r"; name the directory of a stanza download with --stanza-dir DIR, or fetch it with --download$"
MISSING = [
    ("no json", "no stanza models: .*models/resources.json is not a stanza resources file"),
    ("no depparse", "stanza has no depparse model for language 'en' in .*models"),
    ("no file", "stanza's depparse model for language 'en' is missing: looked for .*/en/depparse/ewt.pt"),
    ("no dependency", "stanza's pretrain model .* looked for .*/en/pretrain/vectors.pt"),
]


@pytest.mark.parametrize(("what", "message"), MISSING)
def test_missing_models(resources: Path, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(DataError, match=message + HINT) as caught:
        parse_with_stanza(["a"], resources=spoilt(resources, tmp_path, what), cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_directory_and_language(resources: Path, tmp_path: Path) -> None:
    looked = re.escape(f"cannot read {tmp_path / 'none' / 'resources.json'} (No such file or directory)")
    with pytest.raises(DataError, match=f"no stanza models: {looked}{HINT}"):
        parse_with_stanza(["a"], resources=tmp_path / "none")
    with pytest.raises(DataError, match=rf"no stanza models for language 'de' in .* \(it lists en\){HINT}"):
        parse_with_stanza(["a"], lang="de", resources=resources)


def test_truncated_model(resources: Path, tmp_path: Path) -> None:
    message = (
        r"stanza cannot load its 'en' models from .*models \(.*\); fetch them again, or .* --stanza-dir DIR$"
    )
    with pytest.raises(DataError, match=message):
        parse_with_stanza(["a"], resources=spoilt(resources, tmp_path, "truncated"), cache_dir=tmp_path)


def test_language_without_multiword_tokens(resources: Path, tmp_path: Path) -> None:
    copy = spoilt(resources, tmp_path, "no mwt")
    (parse,) = parse_with_stanza(["The dog sleeps."], resources=copy, cache_dir=tmp_path)
    assert texts(parse) == ["The", "dog", "sleeps", "."] and Relation("nsubj", 2, 1) in parse.relations


def test_download_only_when_asked(
    fake: type[Fake], resources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(lang: str, *, model_dir: str, processors: str, verbose: bool) -> None:
        assert (lang, processors, verbose) == ("en", "tokenize,pos,lemma,depparse", False)
        shutil.copytree(resources, model_dir, copy_function=shutil.copyfile)

    monkeypatch.setattr("stanza.download", fetch)
    folder = tmp_path / "new"
    with pytest.raises(DataError, match="--download"):
        parse_with_stanza(["a"], resources=folder, cache_dir=tmp_path)
    assert len(list(parse_with_stanza(["a"], resources=folder, cache_dir=tmp_path, download=True))) == 1
    assert len(list(parse_with_stanza(["b"], resources=folder, cache_dir=tmp_path))) == 1


def test_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nreally")

    monkeypatch.setattr("stanza.download", fetch)
    with pytest.raises(DataError, match=r"cannot download stanza's 'en' models to .* \(no network\); name"):
        parse_with_stanza(["a"], resources=tmp_path, download=True)
