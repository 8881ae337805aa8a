"""stanza's parses, their cache, and what is said where models are missing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headscope.data import stanza_parses
from headscope.data.parses import Parse
from headscope.data.stanza_parses import PROCESSORS, parse_with_stanza
from headscope.errors import DataError

LINES = [
    "The tired old dog quickly chased a black cat.",
    "",
    "  I don't know.  She can't — “naïve” café 😀!",
    "see http://example.org/" + "b" * 400,
    " ",
    "word " * 1001,
    "He sleeps.",
]


def texts(parse: Parse) -> list[str]:
    return [parse.text[token.start : token.end] for token in parse.tokens]


@pytest.fixture(scope="module")
def resources(shared: Path) -> Path:
    folder = shared / "stanza_resources"
    if not folder.is_dir():
        pytest.skip("no stanza models in the shared data")
    return folder


@pytest.fixture(scope="module")
def parsed(resources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Parse], Path]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stanza_parses, "BATCH", 3)
        return list(parse_with_stanza(iter(LINES), resources=resources, cache_dir=cache)), cache


@pytest.mark.slow
def test_stanza_gives_one_parse_per_line(parsed: tuple[list[Parse], Path]) -> None:
    parses, _ = parsed
    assert [parse.text for parse in parses] == LINES
    found = {(r.relation, texts(parses[0])[r.head], texts(parses[0])[r.dependent]) for r in parses[0].relations}
    expected = {("nsubj", "chased", "dog"), ("obj", "chased", "cat"), ("amod", "dog", "old")}
    assert expected | {("advmod", "chased", "quickly")} <= found
    assert parses[1] == Parse("", (), ()) and parses[4] == Parse(" ", (), ())


def test_second_run_reads_the_cache(
    parsed: tuple[list[Parse], Path], resources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parses, cache = parsed
    (file,) = cache.iterdir()
    assert file.suffix == ".jsonl"
    monkeypatch.setattr("stanza.Pipeline", None)  # loading a model would fail
    assert list(parse_with_stanza(LINES, resources=resources, cache_dir=cache)) == parses


class Fake:
    """Stands for stanza's pipeline: whitespace tokens, each the dependent of the first."""

    built, processors = 0, PROCESSORS

    def __init__(self, *_: object, **options: object) -> None:
        Fake.built += 1
        self.options = options

    def bulk_process(self, documents: list[Any]) -> list[object]:
        import stanza

        return [self.parse(stanza, document.text) for document in documents]

    def parse(self, stanza: Any, text: str) -> object:
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
    ("no json", "Expecting property name"),
    ("no depparse", "it has no depparse model"),
    ("no file", "/en/depparse/ewt.pt"),
    ("truncated", "stanza cannot load its 'en' models from .*models"),
]


@pytest.mark.parametrize(("what", "message"), MISSING)
def test_missing_models(resources: Path, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*{HINT}") as caught:
        parse_with_stanza(["a"], resources=spoilt(resources, tmp_path, what), cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


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
