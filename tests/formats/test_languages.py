"""Models of many languages: which one is read, which one is written, and what says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

import headscope as hs
from headscope.assets import captions
from headscope.config.commands import TranslateOptions
from headscope.data.encoded import IGNORED, SIDE_NAMES, SideName
from headscope.formats.base import open_checkpoint, write_checkpoint
from tests.makers import decoders, speech
from tests.makers import marian as makers

WORDS = ["▁a", "▁dog", "▁ein", "▁Hund", "▁ruft", "▁barks"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LANGUAGES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart50": ("en_XX", "de_DE"), "mbart": ("en_XX", "de_DE")}
CLASSES = {
    "nllb": ("NllbTokenizer", "M2M100"),
    "mbart50": ("MBart50Tokenizer", "MBart"),
    "mbart": ("MBartTokenizer", "MBart"),
}
TEXT, TARGET = ["a dog barks", "a dog"], ["ein Hund ruft", "ein Hund"]


def _tokenizer(kind: str, **languages: str) -> Any:
    vocabulary: Any = [(word, -1.0) for word in [*(SPECIAL if kind == "mbart" else ["<unk>", "<s>", "</s>"]), *WORDS]]
    if kind == "nllb":
        letters = sorted({letter for word in WORDS for letter in word})
        tokens = [*SPECIAL, *letters, *(word[:n] for word in WORDS for n in range(2, len(word) + 1))]
        vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
        merges = dict.fromkeys((word[: n - 1], word[n - 1]) for word in WORDS for n in range(2, len(word) + 1))
        languages |= {"merges": list(merges)}  # type: ignore[dict-item]
    tokenizer: Any = getattr(transformers, CLASSES[kind][0])(vocab=vocabulary, **languages)
    return tokenizer


def _save_model(folder: Path, kind: str, *, forces_german: bool = False, **languages: str) -> Any:
    """A folder with a random model of this kind, and the model; `forces_german`: its `generate` begins with German."""
    tokenizer = _tokenizer(kind, **languages)
    sides: dict[str, Any] = {
        f"{side}_{name}": count
        for side in ("encoder", "decoder")
        for name, count in {"layers": 1, "attention_heads": 2, "ffn_dim": 7}.items()
    }
    german = tokenizer.convert_tokens_to_ids(LANGUAGES[kind][1])
    config = getattr(transformers, f"{CLASSES[kind][1]}Config")(
        d_model=12, vocab_size=len(tokenizer), max_position_embeddings=31, init_std=0.4, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=german if kind == "mbart" else 2, **sides,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{CLASSES[kind][1]}ForConditionalGeneration")(config).eval()
    if forces_german:
        model.generation_config.forced_bos_token_id = german
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("named_by", ["by the tokenizer", "by the settings", "by both"])
@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_language_that_is_written_is_the_one_that_is_named(tmp_path: Path, kind: str, named_by: str) -> None:
    """In targets, in their likelihood, and as the first token of `generate`."""
    source, german = LANGUAGES[kind]
    languages = {} if named_by == "by the settings" else {"src_lang": source, "tgt_lang": german}
    model = _save_model(tmp_path, kind, forces_german=named_by != "by the tokenizer" and kind != "mbart", **languages)
    checkpoint: Any = open_checkpoint(str(tmp_path), device="cpu")
    tokenizer = _tokenizer(kind, src_lang=source, tgt_lang=german)
    inputs = tokenizer(TEXT, text_target=TARGET, return_tensors="pt", padding=True)
    labels = inputs.pop("labels")
    labels[labels == 1] = -100
    with torch.no_grad():
        loss = float(model(**inputs, labels=labels).loss)
        number = tokenizer.convert_tokens_to_ids(german)
        bos = {} if kind == "mbart" else {"forced_bos_token_id": number}
        ids = model.generate(**inputs, **bos, max_new_tokens=6, do_sample=False, num_beams=2)
    perplexity = hs.evaluate(str(tmp_path), TEXT, target=TARGET, metrics="perplexity", bootstrap=5)["perplexity"].value
    assert perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    translations = checkpoint.translations(TEXT, TranslateOptions(beam=2, max_len_b=5))
    assert [best.text for [best] in translations] == tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert checkpoint.search_facts(TranslateOptions())["language"] == german == checkpoint.writes
    assert checkpoint.tokenizer.tgt_lang == languages.get("tgt_lang"), "left as it was"


@pytest.mark.parametrize("kind", LANGUAGES)
def test_what_is_forced_costs_a_translation_nothing(tmp_path: Path, kind: str) -> None:
    """The language and mBART's forced end have no score, but count in the length, as in `generate`."""
    source, german = LANGUAGES[kind]
    model, tokenizer = _save_model(tmp_path, kind, src_lang=source, tgt_lang=german), _tokenizer(kind, src_lang=source)
    bos = {} if kind == "mbart" else {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(german)}
    longest = 7 if kind == "mbart50" else 6  # five subwords, a language or an end; mBART-50 has both
    search = {"max_new_tokens": longest, "do_sample": False, "num_beams": 3, "length_penalty": 0.7}
    output = {"output_scores": True, "return_dict_in_generate": True}
    theirs = model.generate(**tokenizer(TEXT[:1], return_tensors="pt"), **bos, **search, **output).sequences_scores
    options = TranslateOptions(beam=3, max_len_b=5, lenpen=0.7, scores=True)
    [[best]] = open_checkpoint(str(tmp_path), device="cpu").translations(TEXT[:1], options)
    assert best.score == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nllb", "mbart50"])
def test_languages_can_be_named_where_the_files_name_others_or_none(tmp_path: Path, kind: str) -> None:
    """The named languages are read and written, also by the smaller model, whose files name them."""
    french, (english, german) = {"nllb": "fra_Latn"}.get(kind, "fr_XX"), LANGUAGES[kind]
    _save_model(tmp_path / "model", kind, forces_german=kind == "mbart50")  # German is written, if anything is said
    languages: dict[str, Any] = {"src_lang": german, "tgt_lang": french}
    model = hs.load(tmp_path / "model", device="cpu", **languages)
    small = model.remove(heads="decoder-self.0.1").save(tmp_path / "small").path
    for loaded_model in (model, hs.load(small, device="cpu")):
        checkpoint: Any = loaded_model.checkpoint
        tokenizer = _tokenizer(kind, **languages)
        assert [row.ids for row in checkpoint.encode(TEXT, side="source", limit=9)] == tokenizer(TEXT)["input_ids"]
        labels = tokenizer(text_target=TARGET)["input_ids"]
        assert checkpoint.labels(TARGET, limit=9) == labels
        number = tokenizer.convert_tokens_to_ids(french)
        bos = {} if kind == "mbart" else {"forced_bos_token_id": number}
        inputs, starts = tokenizer(TEXT, return_tensors="pt", padding=True), {"decoder_start_token_id": number}
        starts = starts if kind == "mbart" else {}
        ids = checkpoint.model.generate(**inputs, **bos, **starts, max_new_tokens=6, do_sample=False, num_beams=2)
        translations = checkpoint.translations(TEXT, TranslateOptions(beam=2, max_len_b=5))
        assert [best.text for [best] in translations] == tokenizer.batch_decode(ids, skip_special_tokens=True)
        record = loaded_model.overview().record["tokenizer"]["languages"]
        assert (record["reads"], record["writes"]) == (german, french)
    assert english not in languages.values()


def test_of_a_cut_text_neither_end_nor_language_is_what_comes_next(tmp_path: Path) -> None:
    """mBART appends both to a text."""
    _save_model(tmp_path, "mbart", src_lang="en_XX", tgt_lang="de_DE")
    checkpoint = open_checkpoint(str(tmp_path), device="cpu")
    [(*words, end, language)] = checkpoint.labels(TARGET[:1], limit=9)
    assert checkpoint.subwords([*words, end, language], side="source") == [*WORDS[2:5], "</s>", "de_DE"]
    assert checkpoint.labels(TARGET[:1], limit=4) == [[*words[:2], IGNORED, IGNORED]]


WHISPER = {"en": 323, "de": 324, "fr": 325}
TASKS = {"transcribe": 326, "translate": 327}
START, NO_TIMES = 322, 328
SPOKEN = ["ein hund", "two dogs bark"]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random multilingual Whisper that names no language, with features of two recordings."""
    path = tmp_path_factory.mktemp("whisper")
    end = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 321)
    model = speech.whisper(vocab_size=329, decoder_start_token_id=START, **end)
    settings = dict(
        is_multilingual=True, lang_to_id={f"<|{code}|>": number for code, number in WHISPER.items()}, task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMES, return_timestamps=False, suppress_tokens=[7, 9], max_length=31,
        begin_suppress_tokens=[5, 321], forced_decoder_ids=[[1, None], [2, TASKS["transcribe"]]],
    )  # fmt: skip
    vars(model.generation_config).update(settings)
    model.save_pretrained(path)
    plain = decoders.byte_level()
    plain.add_tokens(["<|endofprompt|>"])
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in (*WHISPER, *TASKS, "notimestamps"))]
    plain.add_special_tokens({"additional_special_tokens": names, "eos_token": names[0], "pad_token": names[0]})
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[names[1], names[-1], "$A", names[0]],
        special_tokens=[(names[1], START), (names[-1], NO_TIMES), (names[0], 321)],
    )
    plain.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=5, chunk_length=1, n_fft=400).save_pretrained(path)
    for number in range(2):
        features = np.random.default_rng(number).normal(size=(5, 100)).astype(np.float32)
        np.save(path / f"{number}.npy", features)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "language", "task"),
    [
        ({"tgt_lang": "<|fr|>"}, "fr", "transcribe"), ({"src_lang": "German", "tgt_lang": "en"}, "de", "translate"),
    ],
)  # fmt: skip
def test_whisper_begins_with_language_and_task(
    whisper: Path, tmp_path: Path, options: dict[str, Any], language: str, task: str
) -> None:
    """As in transformers' `generate` and loss; a copy with fewer heads needs no options."""
    names = [str(whisper / f"{number}.npy") for number in range(2)]
    features = torch.stack([torch.from_numpy(np.load(name)) for name in names])
    small = hs.load(whisper, device="cpu", **options).remove(heads="decoder-self.0.1").save(tmp_path / "small").path
    for model in (hs.load(whisper, device="cpu", **options), hs.load(small, device="cpu")):
        checkpoint: Any = model.checkpoint
        theirs, tokenizer = checkpoint.model, checkpoint.tokenizer
        settings = {"language": language, "task": task, "num_beams": 1, "do_sample": False, "max_new_tokens": 9}
        ids = theirs.generate(features, **settings, return_timestamps=False)
        translations = checkpoint.translations(names, TranslateOptions(beam=1, max_len_b=9))
        assert [best.text for [best] in translations] == [
            text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)
        ]
        prefix, loss = [START, WHISPER[language], TASKS[task], NO_TIMES], torch.zeros(2)
        for row, text in zip(features, SPOKEN, strict=True):
            labels = [*prefix, *tokenizer(text, add_special_tokens=False)["input_ids"], 321][1:]
            with torch.no_grad():
                out = theirs(row[None], labels=torch.tensor([labels]))
            loss += torch.tensor([float(out.loss) * len(labels), len(labels)])
        perplexity = model.evaluate(names, target=SPOKEN, metrics="perplexity", bootstrap=5)["perplexity"].value
        assert perplexity == pytest.approx((loss[0] / loss[1]).exp().item(), rel=1e-4)
        record = model.overview().record["tokenizer"]["languages"]
        assert record == {"reads": language, "writes": "en" if task == "translate" else language, "known": 3}


def test_older_whisper_files_name_language_and_task_by_forced_ids(whisper: Path, tmp_path: Path) -> None:
    """A model fitted to translate still translates, though only the forced ids name the task."""
    folder = tmp_path / "older"
    shutil.copytree(whisper, folder)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    for name in ("is_multilingual", "lang_to_id", "task_to_id"):
        del settings[name]
    settings["forced_decoder_ids"] = [[1, WHISPER["de"]], [2, TASKS["translate"]], [3, NO_TIMES]]
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    languages = hs.load(folder, device="cpu").overview().record["tokenizer"]["languages"]
    assert (languages["reads"], languages["writes"]) == ("de", "en")


# Models whose sides have vocabularies of their own: whatever is asked of an id is answered by that of its side.


SIZES = {"en": 140, "de": 200}  # the padding of the source has the id of a piece of the target
TEXTS = {
    side: captions(language).read_text(encoding="utf-8").splitlines()[:16]
    for side, language in zip(SIDE_NAMES, SIZES, strict=True)
}


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "marian"
    shape: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {"d_model": 12}
    shape |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8)
    shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    options: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    makers.marian(folder, tuple(SIZES.values()), **shape, **options).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_marian_with_two_vocabularies_reads_and_names_as_marian_tokenizer_does(marian: Path, tmp_path: Path) -> None:
    tokenizer: Any = transformers.MarianTokenizer.from_pretrained(marian)
    checkpoint = open_checkpoint(str(marian), device="cpu")
    assert checkpoint.vocabularies == tuple(size - 1 for size in SIZES.values()) and checkpoint.writes == "de"
    sides: dict[SideName, Any] = {
        "source": (tokenizer.spm_source, tokenizer.encoder),
        "target": (tokenizer.spm_target, tokenizer.target_encoder),
    }
    for side, (pieces_of, vocabulary) in sides.items():
        ids = tokenizer(**{"text" if side == "source" else "text_target": TEXTS[side]})["input_ids"]
        labels = checkpoint.labels(TEXTS[side], limit=99) if side == "target" else []
        for row, (text, expected) in enumerate(zip(TEXTS[side], ids, strict=True)):
            pieces = pieces_of.encode(text, out_type=str)
            encoding = checkpoint.encode([text], side=side, limit=99)[0]
            row_ids, special = (
                (encoding.ids, encoding.special) if side == "source" else (labels[row], [*encoding.special[1:], True])
            )
            assert row_ids == expected and special == [False] * len(pieces) + [True]
            assert checkpoint.subwords(row_ids, side=side) == [*pieces, "</s>"]
            spans = checkpoint.spans(text, row_ids, side=side)
            assert spans is not None and spans[-1] is None
            assert [text[slice(*span)] for span in spans[:-1] if span] == [
                subword.removeprefix("▁") for subword in pieces
            ]
            assert checkpoint.decode(row_ids[:-1], side=side) == text
        assert checkpoint.plain_ids(side=side) == list(range(1, len(vocabulary) - 1))
        assert all(checkpoint.id_of(piece, side=side) == n for piece, n in vocabulary.items() if n)
    write_checkpoint(checkpoint, tmp_path)
    copy = open_checkpoint(str(tmp_path), device="cpu")
    assert copy.labels(TEXTS["target"], limit=99) == checkpoint.labels(TEXTS["target"], limit=99)
    texts = hs.load(str(marian)).translate(TEXTS["source"], beam=1, max_len_b=5)
    model: Any = transformers.MarianMTModel.from_pretrained(marian)
    for text, line in zip(texts, TEXTS["source"], strict=True):
        ids = model.generate(**tokenizer(line, return_tensors="pt"), num_beams=1, max_new_tokens=6, do_sample=False)
        assert text == tokenizer.decode(ids[0], skip_special_tokens=True).strip()


def fsmt(folder: Path) -> Any:
    """FSMT's tokenizer of letters: source ids of `abc`, target ids of `cba` and more."""
    for name, letters in (("src", "abc"), ("tgt", "dcba")):
        pieces = [f"{letter}{end}" for letter in letters for end in ("", "</w>")]
        ids = {piece: n for n, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
        (folder / f"{name}.json").write_text(json.dumps(ids))
    (folder / "merges").write_text("#version: 0.2\n")
    make: Any = transformers.FSMTTokenizer
    names = {"src_vocab_file": "src.json", "tgt_vocab_file": "tgt.json", "merges_file": "merges"}
    return make(langs=["en", "de"], **{name: str(folder / file) for name, file in names.items()})


def test_fsmt(tmp_path: Path) -> None:
    tokenizer = fsmt(tmp_path)
    shape: dict[str, Any] = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    shape |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8)
    shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = transformers.FSMTConfig(langs=["en", "de"], src_vocab_size=10, tgt_vocab_size=12, **shape)
    torch_model: Any = transformers.FSMTForConditionalGeneration(config)
    model = hs.load(torch_model.eval(), tokenizer=tokenizer)._checkpoint
    assert model.vocabularies == (10, 12)
    assert model.encode(["ab c"], side="source", limit=9)[0].ids == tokenizer("ab c")["input_ids"] == [4, 7, 9, 2]
    assert model.labels(["ad c"], limit=9) == [[10, 5, 7, 2]]
    assert model.subwords([4, 7, 9, 2], side="source") == ["a", "b</w>", "c</w>", "</s>"]
    assert model.subwords([10, 5, 7, 2], side="target") == ["a", "d</w>", "c</w>", "</s>"]
    assert model.spans("ab c", [4, 7, 9, 2], side="source") == [(0, 1), (1, 2), (3, 4), None]
    assert model.spans("ad c", [10, 5, 7, 2], side="target") == [(0, 1), (1, 2), (3, 4), None]
    assert model.plain_ids(side="source") == list(range(3, 10)) and model.plain_ids(side="target") == list(range(3, 12))
    assert (model.decode([10, 5, 7], side="target"), model.decode([4, 7, 9], side="source")) == ("ad c", "ab c")
