"""Models whose sides have vocabularies of their own: whatever is asked of an id is answered by that of its side."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headscope as hs
from headscope.assets import captions
from headscope.data.encoded import SIDE_NAMES, SideName
from headscope.formats.base import open_checkpoint, write_checkpoint
from headscope.training.prepare import learn_vocabulary

SIZES = {"en": 140, "de": 200}  # the padding of the source has the id of a piece of the target
TEXTS = {
    side: captions(language).read_text(encoding="utf-8").splitlines()[:16]
    for side, language in zip(SIDE_NAMES, SIZES, strict=True)
}


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "marian"
    folder.mkdir(parents=True)
    subwords: dict[str, list[str]] = {}
    for side, (language, size) in zip(SIDE_NAMES, SIZES.items(), strict=True):
        lines = captions(language).read_text(encoding="utf-8").splitlines()
        learnt = learn_vocabulary(lines, size=size, kind="unigram", normalise="none")
        (folder / f"{side}.spm").write_bytes(learnt.splitter.codes or b"")
        subwords[side] = ["</s>", "<unk>", *learnt.subwords[4:], "<pad>"]
        name = "vocab.json" if side == "source" else "target_vocab.json"
        (folder / name).write_text(json.dumps({subword: n for n, subword in enumerate(subwords[side])}))
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json")]
    make: Any = transformers.MarianTokenizer
    make(*files, source_lang="en", target_lang="de", separate_vocabs=True).save_pretrained(folder)
    pad = len(subwords["source"]) - 1
    sizes: dict[str, Any] = {"vocab_size": len(subwords["source"]), "decoder_vocab_size": len(subwords["target"])}
    ids: dict[str, Any] = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    shape: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {"d_model": 12}
    shape |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8)
    shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    untied: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model: Any = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **ids, **shape, **untied))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_marian_with_two_vocabularies_reads_and_names_as_marian_tokenizer_does(marian: Path, tmp_path: Path) -> None:
    own: Any = transformers.MarianTokenizer.from_pretrained(marian)
    its = open_checkpoint(str(marian), device="cpu")
    assert its.vocabularies == tuple(size - 1 for size in SIZES.values()) and its.writes == "de"
    own_of: dict[SideName, Any] = {
        "source": (own.spm_source, own.encoder),
        "target": (own.spm_target, own.target_encoder),
    }
    for side, (pieces_of, vocabulary) in own_of.items():
        ids = own(**{"text" if side == "source" else "text_target": TEXTS[side]})["input_ids"]
        labels = its.labels(TEXTS[side], limit=99) if side == "target" else []
        for row, (text, wanted) in enumerate(zip(TEXTS[side], ids, strict=True)):
            pieces = pieces_of.encode(text, out_type=str)
            found = its.encode([text], side=side, limit=99)[0]
            read, special = (
                (found.ids, found.special) if side == "source" else (labels[row], [*found.special[1:], True])
            )
            assert read == wanted and special == [False] * len(pieces) + [True]
            assert its.subwords(read, side=side) == [*pieces, "</s>"]
            spans = its.spans(text, read, side=side)
            assert spans is not None and spans[-1] is None
            assert [text[slice(*span)] for span in spans[:-1] if span] == [each.removeprefix("▁") for each in pieces]
            assert its.decode(read[:-1], side=side) == text
        assert its.plain_ids(side=side) == list(range(1, len(vocabulary) - 1))
        assert all(its.id_of(piece, side=side) == n for piece, n in vocabulary.items() if n)
    write_checkpoint(its, tmp_path)
    again = open_checkpoint(str(tmp_path), device="cpu")
    assert again.labels(TEXTS["target"], limit=99) == its.labels(TEXTS["target"], limit=99)
    texts = hs.load(str(marian)).translate(TEXTS["source"], beam=1, max_len_b=5)
    made: Any = transformers.MarianMTModel.from_pretrained(marian)
    for text, line in zip(texts, TEXTS["source"], strict=True):
        ids = made.generate(**own(line, return_tensors="pt"), num_beams=1, max_new_tokens=6, do_sample=False)
        assert text == own.decode(ids[0], skip_special_tokens=True).strip()


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
    made: Any = transformers.FSMTForConditionalGeneration(config)
    its = hs.load(made.eval(), tokenizer=tokenizer)._checkpoint
    assert its.vocabularies == (10, 12)
    assert its.encode(["ab c"], side="source", limit=9)[0].ids == tokenizer("ab c")["input_ids"] == [4, 7, 9, 2]
    assert its.labels(["ad c"], limit=9) == [[10, 5, 7, 2]]
    assert its.subwords([4, 7, 9, 2], side="source") == ["a", "b</w>", "c</w>", "</s>"]
    assert its.subwords([10, 5, 7, 2], side="target") == ["a", "d</w>", "c</w>", "</s>"]
    assert its.spans("ab c", [4, 7, 9, 2], side="source") == [(0, 1), (1, 2), (3, 4), None]
    assert its.spans("ad c", [10, 5, 7, 2], side="target") == [(0, 1), (1, 2), (3, 4), None]
    assert its.plain_ids(side="source") == list(range(3, 10)) and its.plain_ids(side="target") == list(range(3, 12))
    assert (its.decode([10, 5, 7], side="target"), its.decode([4, 7, 9], side="source")) == ("ad c", "ab c")
