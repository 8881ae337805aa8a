"""What has no end, or more of it than anyone means: lines, files, keys, layers, numbers of options."""

from __future__ import annotations

import gzip
import io
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.cli.failures import reports_error, user_message
from headscope.config import EvaluateConfig
from headscope.config.option import SEED, WHOLE, configured
from headscope.config.small import TranslateConfig
from headscope.data.corpus import open_corpus
from headscope.data.lines import MOST_LINE, lines_of
from headscope.data.parses import read_conllu
from headscope.data.vocabulary import Merges, merged
from headscope.errors import CheckpointError, ConfigError, DataError
from headscope.evaluation import translation
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import read_bytes, read_json
from headscope.files.toml import KEY_PARTS, read_toml
from headscope.formats.base import LONGEST
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId, select_heads
from headscope.model.native.beams import SearchConfig
from headscope.model.native.transformer_config import StackConfig
from headscope.pruning.sweep.table import with_seeds
from headscope.training.architecture import check_memory
from tests.oracles import checkpoints, commands

ENDLESS = Path("/dev/zero")
needs_device = pytest.mark.skipif(not ENDLESS.exists(), reason="there is no endless file here")


# Text.


def test_a_line_that_never_ends_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.en.gz"
    path.write_bytes(gzip.compress(b"a b\n" + b"word " * (MOST_LINE // 5 + 1)))
    with pytest.raises(DataError, match=r"text\.en\.gz:2: .*1,048,576"):
        open_corpus(path)
    with pytest.raises(DataError, match="stdin:1:"):
        list(lines_of(io.BytesIO(b"\0" * (MOST_LINE + 1)), name="stdin"))
    assert list(lines_of(io.BytesIO(b"a\n" + b"b" * MOST_LINE), name="x")) == [b"a\n", b"b" * MOST_LINE]


@needs_device
def test_devices_and_pipes_are_no_texts(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (ENDLESS, tmp_path / "pipe"):
        with pytest.raises(DataError, match="pipe"):
            open_corpus(path)
    with pytest.raises(DataError):
        list(read_conllu(ENDLESS))
    with pytest.raises(DataError, match="67,108,864"):
        read_bytes(ENDLESS)


def test_a_sentence_of_parses_ends(tmp_path: Path) -> None:
    path = tmp_path / "text.conllu"
    path.write_text("".join(f"{n}\ta\t_\tX\t_\t_\t0\troot\t_\t_\n" for n in range(1, 100_002)), encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.conllu:100001: .*100000"):
        list(read_conllu(path))
    for head in ("9" * 5000, "²"):
        path.write_text(f"1\ta\t_\tX\t_\t_\t{head}\troot\t_\t_\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"text\.conllu:1: head"):
            list(read_conllu(path))
    path.write_text(f"{'1' * 5000}\ta\t_\tX\t_\t_\t0\troot\t_\t_\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.conllu:1: id"):
        list(read_conllu(path))


# Translation.


@pytest.mark.slow
def test_a_very_long_line_is_cut_where_the_model_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints.small()
    assert checkpoint.source_limit is None and checkpoint.reads(None) == LONGEST == 1024
    seen: list[int] = []
    encode = checkpoint.model.encode

    def watched(ids: torch.Tensor, *rest: Any) -> Any:
        seen.append(ids.shape[1])
        return encode(ids, *rest)

    monkeypatch.setattr(checkpoint.model, "encode", watched)
    cut: list[int] = []
    line = "a " * 100_000
    found = list(translate_lines(checkpoint, ["a b", line], options=TranslateOptions(), tokens=50, cut=cut.append))
    assert cut == [2] and seen == [3, 1024] and len(found) == 2
    short = TranslateOptions(longest=5)
    cut.clear()
    (one,) = translate_lines(checkpoint, ["a b c d e f g"], options=short, tokens=50, cut=cut.append)
    (other,) = translate_lines(checkpoint, ["a b c d"], options=short, tokens=50, cut=cut.append)
    assert one == other and cut == [1] and seen[-2:] == [5, 5]


def test_no_more_pieces_than_positions() -> None:
    checkpoint = checkpoints.small(positions="learned", max_positions=17)
    assert checkpoint.reads(None) == checkpoint.reads(17) == 17
    with pytest.raises(ConfigError, match=r"--max-length 18.*17"):
        checkpoint.reads(18)


@pytest.mark.parametrize(
    ("tokens", "at_once", "batches"),
    [(1000, 2, [[1, 3], [0, 2]]), (9, 9, [[1, 3, 0], [2]]), (1, 1, [[1], [3], [0], [2]])],
)
def test_a_wide_beam_takes_fewer_sentences_at_once(
    tokens: int, at_once: int, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a text is a piece too: lines of 3, 2, 9 and 2."""
    checkpoint, lines = checkpoints.small(), ["a b", "c", "a b c d e f g h", "d"]
    monkeypatch.setattr(translation, "LOGITS", at_once * 4 * checkpoint.vocabulary * 3)
    seen: list[list[int]] = []

    def translated(texts: list[str], options: TranslateOptions) -> list[Any]:
        seen.append([lines.index(text) for text in texts])
        return [[] for _ in texts]

    monkeypatch.setattr(checkpoint, "translations", translated)
    list(translate_lines(checkpoint, lines, options=TranslateOptions(beam=3), tokens=tokens))
    assert seen == batches


def slowly_merged(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """As subword-nmt says it: find the pair of the lowest rank, replace all of it, begin anew."""
    while True:
        ranked = [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not ranked:
            return symbols
        best = tuple(symbols[min(ranked)[1] :][:2])
        made: list[str] = []
        while symbols:
            both = tuple(symbols[:2]) == best
            made.append("".join(symbols[: 1 + both]))
            symbols = symbols[1 + both :]
        symbols = made


def test_merging_in_n_log_n_is_merging() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        known, ranks = ["a", "b", "c"], dict[tuple[str, str], int]()
        for rank in range(chance.randint(0, 14)):
            pair = chance.choice(known), chance.choice(known)
            ranks.setdefault(pair, chance.choice((rank, rank, 0, 3, 99 - rank)))
            known.append("".join(pair))
        word = chance.choices("abc", k=chance.randint(1, 13))
        assert merged(word, ranks) == slowly_merged(list(word), ranks)


def test_a_word_of_200000_characters_is_split() -> None:
    deep = "".join(f"{'a' * n} a\n" for n in range(1, 3000))
    codes = Merges.read(f"#version: 0.2\n{deep}".encode())
    assert "".join(codes.split("ab" * 100_000)) == "ab" * 100_000


# Records.


def test_keys_of_thousands_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for line in (".".join("a" * 8000) + " = 1", "[" + ' . "x"' * 0 + ".".join(['"a\\"."'] * 40) + "]"):
        path.write_text(line, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"\b{KEY_PARTS}\b"):
            read_toml(path)
    path.write_text(f"{'.'.join('a' * KEY_PARTS)} = [1.5, 2.5]\nb = 'a.b'  # a.b.c\n", encoding="utf-8")
    assert read_toml(path)["b"] == "a.b"
    for text in ("a = " + "[" * 50_000, "a = " + "1" * 5000, "a = 'x\n", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError):
            read_toml(path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="1,048,576"):
        read_toml(path)


def test_numbers_of_a_record_are_bounded() -> None:
    with pytest.raises(ConfigError, match="unknown option 'x0'"):
        configured(SearchConfig, {f"x{n}": n for n in range(1000)})
    for value in (2**40, 10**5000, float("nan"), float("inf"), 10**400):
        with pytest.raises(ConfigError) as caught:
            configured(SearchConfig, {"beam" if isinstance(value, int) and value > 2**39 else "power": value})
        assert len(str(caught.value)) < 200


def test_layers_are_believed_up_to_a_number() -> None:
    with pytest.raises(ConfigError, match=r"self_heads.*100000.*2000"):
        StackConfig(vocabulary=5, d_model=4, d_ffn=4, d_head=2, self_heads=(2,) * 100_000)
    with pytest.raises(ConfigError, match=r"d_model.*2147483647"):
        StackConfig(vocabulary=5, d_model=WHOLE, d_ffn=4, d_head=2, self_heads=(2,))


@pytest.mark.slow
def test_models_that_no_machine_can_train() -> None:
    wide = StackConfig(vocabulary=100, d_model=2**16, d_ffn=2**18, d_head=2**10, self_heads=(64,) * 900)
    from headscope.model.native.transformer_config import TransformerConfig

    with pytest.raises(ConfigError, match=r"[\d,]+ parameters.*[\d,]+ GB"):
        check_memory(TransformerConfig(decoder=wide))


def test_lists_of_heads_that_are_none(tmp_path: Path) -> None:
    layout = checkpoints.small().layout
    path = tmp_path / "heads.txt"
    path.write_bytes(b"cross.0.0\n\xff\n")
    with pytest.raises(ConfigError, match=r"heads\.txt.*11.*UTF-8"):
        select_heads(str(path), layout)
    for name in ("cross.0.²", f"cross.0.{'1' * 5000}", "a" * 5000, "cross.0.-1", "\x00"):
        with pytest.raises(ConfigError) as caught:
            select_heads(name, layout)
        assert len(str(caught.value)) < 250
    with pytest.raises(ConfigError):
        HeadId.parse(f"cross.0.{'1' * 5000}")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_json(tmp_path / ("a" * 5000))


# Options.


def test_numbers_of_configs_are_bounded() -> None:
    given = {"checkpoint": "x", "source": "x"}
    for options, message in (
        ({"bootstrap": 2147483648}, r"--bootstrap.*2147483648.*10000"),
        ({"seed": 2**63}, "--seed.*9223372036854775808.*9223372034707292160"),
        ({"seed": -1}, "--seed is -1"),
        ({"max_sentences": 10**30}, "--max-sentences.*100 bits.*2147483647"),
        ({"lenpen": float("nan")}, "--lenpen.*nan"),
        ({"max_len_a": float("inf")}, "--max-len-a.*inf"),
        ({"max_len_b": 10**6}, "--max-len-b.*1000000.*65536"),
        ({"seed": True}, "--seed is True; give a number"),
        ({"each_head": "yes"}, "--each-head is 'yes'"),
        ({"text": "row"}, "--text is 'row'.*did you mean 'raw'"),
    ):
        with pytest.raises(ConfigError, match=message):
            configured(EvaluateConfig, {**given, **options})
    with pytest.raises(ConfigError, match=r"--nbest.*2000.*1000"):
        configured(TranslateConfig, {"checkpoint": "x", "nbest": 2000})
    assert configured(EvaluateConfig, {**given, "seed": SEED}).seed == SEED
    several = configured(EvaluateConfig, {**given, "metrics": "bleu, chrf", "batch_tokens": "auto"})
    assert several.metrics == ("bleu", "chrf") and several.batch_tokens is None and several.source == Path("x")


def test_what_memory_cannot_hold_is_one_line() -> None:
    said = "[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you tried to\n allocate 9"
    for error in (
        RuntimeError(said),
        MemoryError("Unable to allocate 128. GiB"),
        torch.OutOfMemoryError("out of memory"),
    ):
        line = user_message(error)
        assert line and line.startswith("there is not enough memory (") and "\n" not in line
    assert user_message(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert user_message(FileNotFoundError(2, "No such file or directory", "x")) is None
    assert user_message(CheckpointError("a\nb")) == "a b"
    said = user_message(CheckpointError("a \x1b[96mstep\x1b[0m 3\x1b]8;;here\x07.")) or ""
    assert said.startswith("a \\x1b[96mstep") and said.isprintable()


# Several processes.

TOGETHER: set[tuple[str, ...]] = {("analyze",), ("evaluate",), ("translate",)}
TOGETHER.update(("prune", name) for name in ("l0", "subset", "rank", "sweep"))
ALONE = [each for each in commands.commands() if each.words not in TOGETHER and each.words[0] != "train"]


@pytest.mark.parametrize("command", ALONE, ids=lambda command: " ".join(command.words))
def test_commands_that_share_no_work_are_refused_once(
    command: commands.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, status, said in (("0", 2, "runs in one process; start it without torchrun\n"), ("1", 0, "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("headscope.cli.main.reports_error", lambda error: True)
        found = commands.ran([*command.words, "x"])
        assert (found.status, found.said, found.crash) == (status, "", None)
        name = command.words[0] if command.words[0] == "plot" else " ".join(command.words)
        assert found.error == (f"error: headscope {name} {said}" if said else "")


def test_one_process_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    assert reports_error(ConfigError(""))
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [reports_error(ConfigError("")) for _ in range(3)] == [True, False, False]


def test_large_seeds_stay_what_they_are() -> None:
    seeds = (None, int(SEED), 2**60 + 1)
    rows: list[dict[str, Any]] = [{"seed": seed, "x": number} for number, seed in enumerate(seeds, start=1)]
    table = with_seeds(rows)
    assert list(table) == ["seed", "x"] and table["seed"].tolist()[1:] == [2**63 - 2**31, 2**60 + 1]
