"""Language models that are trained here, as Hugging Face models: the same ids, likelihoods, heads and continuations."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headscope.assets import captions, sample
from headscope.data.vocabulary import Vocabulary
from headscope.export.convert import convert
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.from_native import tokenizer_of
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import select_heads
from headscope.model.native.transformer import Transformer
from headscope.model.taps import masked
from headscope.results.overview import Conversion
from headscope.training.architecture import fresh_config
from headscope.training.config import TrainConfig
from headscope.training.prepare import learn_vocabulary
from tests.makers.shared import Command, succeed
from tests.makers.wrappers import native as native_checkpoint

LINES = [line for kind in ("en", "de") for line in captions(kind).read_text(encoding="utf-8").splitlines()]
VIETNAMESE = "Tiếng Việt là ngôn ngữ của người Việt"
ODD = [
    *("", " ", "  two  spaces ", "tabs\tand\r\nlines\n", "a\u00a0b\u200bc\u2028d\ufeffe", "x\x07y"),
    *("Straße 1½ ™️ ①️ ﬁne ＡＢＣ～", "ΣΊΣΥΦΟΣ ς", "世界 ガギグ 한국어", "👩‍👩‍👧 🇩🇪 😀😀", "हिन्दी العَرَبِيَّة שָׁלוֹם", "☃☃ ☃"),
    *("▁a▁ b ▁", "aaaaaaaaaaa ababababab ------- ........", "N'T I'd don’t „Zitat“ …", "x" * 300),
    *(unicodedata.normalize("NFD", text) for text in (VIETNAMESE, "Äpfel für die Überschwemmung, café")),
]
SPECIAL = "<s> </s><pad> <unk> </s"


def make_vocabulary(kind: str = "bpe", normalise: Any = "none", size: int = 500) -> Vocabulary:
    return learn_vocabulary([*LINES, VIETNAMESE], size=size, kind=kind, normalise=normalise)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "normalise"), [("bpe", "none"), ("unigram", "lowercase"), ("bpe", "moses")])
def test_the_tokenizer_gives_the_ids_of_sentencepiece(kind: str, normalise: str) -> None:
    """On captions, on decomposed text, and on characters that no caption has."""
    vocabulary = make_vocabulary(kind, normalise, size=1500)
    tokenizer = tokenizer_of(vocabulary)
    texts = [*LINES, *ODD, *(unicodedata.normalize("NFD", line) for line in LINES[240:])]
    texts += [f"a{chr(code)}b" for code in range(1, 0x3400) if chr(code) != "\u0344"]
    texts += [SPECIAL] if kind == "bpe" else []
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    different = [text for text, ids in zip(texts, encodings, strict=True) if ids.ids != vocabulary.encode(text)]
    assert different == []
    decoded_texts = [tokenizer.decode(vocabulary.encode(line)) for line in LINES]
    assert decoded_texts == [vocabulary.decode(vocabulary.encode(line)) for line in LINES]


def save_model(folder: Path, vocabulary: Vocabulary, **options: Any) -> Path:
    """A language model with the options of `headscope train --kind lm`, a little smaller, and random weights."""
    torch.manual_seed(0)
    config = TrainConfig(kind="lm", source=captions("en"), **{"d_model": 24, "d_ffn": 20, "heads": 3} | options)
    model = Transformer(fresh_config(config, None, vocabulary))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.tie()
    checkpoint = native_checkpoint(model, target=vocabulary)
    NATIVE.save(checkpoint, folder)
    return folder


def convert_model(folder: Path, out: Path) -> Conversion:
    return convert(open_checkpoint(str(folder), device="cpu"), out, to="huggingface")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_vocabulary()


@pytest.fixture(scope="module")
def folders(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A native model with default settings, and its conversion."""
    root = tmp_path_factory.mktemp("lm")
    conversion = convert_model(save_model(root / "native", vocabulary), root / "hf")
    assert conversion.architecture == "OPTForCausalLM" and conversion.difference < 1e-5
    assert conversion.notes == (
        "the tokenizer gives the ids of the SentencePiece model, without SentencePiece",
        "OPTForCausalLM keeps positions in a table, which ends at 1024 tokens",
    )
    return root / "native", root / "hf"


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "pre"},
        {"tie_output": False, "activation": "gelu-tanh"},
        {"positions": "learned", "max_length": 40},
        {"positions": "learned", "norm": "pre", "max_length": 40},
        {"positions": "none", "norm": "pre", "activation": "silu"},
    ],
)
def test_other_settings_too(tmp_path: Path, vocabulary: Vocabulary, options: dict[str, Any]) -> None:
    conversion = convert_model(save_model(tmp_path / "native", vocabulary, **options), tmp_path / "hf")
    assert conversion.architecture == "OPTForCausalLM" and conversion.difference < 1e-5


def test_evaluate_gives_the_same_numbers(folders: tuple[Path, Path], command: Command, tmp_path: Path) -> None:
    """For truncated lines too; the end of each text counts."""
    numbers = []
    for folder in folders:
        text = ("--source", sample("en"), "--max-length", 30, "--max-sentences", 40)
        answer = json.loads(succeed(command, "evaluate", folder, *text, "--json"))["record"]
        numbers.append([answer["tokens"], answer["nll"], *(score["value"] for score in answer["scores"])])
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def with_transformers(folder: Path, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of the texts, and eight generated ids for each, by transformers in one batch."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    tokens = model.generate(**batch, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return [tokenizer(text)["input_ids"] for text in texts], [row[-8:] for row in tokens.tolist()]


@pytest.mark.slow
def test_greedy_continuations_are_those_of_transformers(
    folders: tuple[Path, Path], command: Command, tmp_path: Path
) -> None:
    """In a batch padded on the left; then with three heads removed, or masked in the original."""
    native, hf = folders
    heads = "decoder-self.0.0,decoder-self.1.1,decoder-self.1.2"
    arguments = ("--heads", heads, "--source", sample("en"), "--max-sentences", 8, "--out", tmp_path / "small")
    succeed(command, "prune", "remove", hf, *arguments)
    texts = [*LINES[:3], "Ein ☃ </s> Mann"]
    checkpoint = open_checkpoint(str(native), device="cpu")
    assert isinstance(checkpoint, TransformerCheckpoint)
    ids = [encoding.ids for encoding in checkpoint.encode(texts, side="source", limit=200)]
    for folder, without in ((hf, []), (tmp_path / "small", select_heads(heads, checkpoint.layout))):
        with masked(checkpoint.model, without):
            expected = [greedy(checkpoint, row, 8) for row in ids]
        assert with_transformers(folder, texts) == (ids, expected)


def greedy(checkpoint: TransformerCheckpoint, ids: list[int], length: int) -> list[int]:
    """Greedy continuation of `ids`, in which the end token is suppressed."""
    tokens = list(ids)
    for _ in range(length):
        with torch.no_grad():
            scores = checkpoint.model(target=torch.tensor([tokens]))[0, -1]
        assert checkpoint.target is not None
        scores[checkpoint.target.end] = -torch.inf
        tokens.append(int(scores.argmax()))
    return tokens[len(ids) :]
