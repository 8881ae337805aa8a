"""What has no end, or more of it than anyone means: lines, files, keys, layers, numbers of options."""

import gzip
import io
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.config.commands import EvaluateConfig, TranslateConfig, TranslateOptions
from headscope.config.option import SEED, make_config
from headscope.data.corpus import open_corpus
from headscope.data.encoded import UnknownSubwords
from headscope.data.parses import read_conllu
from headscope.data.vocabulary import merge_symbols
from headscope.errors import ConfigError, DataError
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import MAX_LINE, lines_of, read_bytes, read_toml
from headscope.formats.base import LONGEST
from tests.oracles import checkpoints, commands

ENDLESS = Path("/dev/zero")
needs_device = pytest.mark.skipif(not ENDLESS.exists(), reason="there is no endless file here")


def test_a_line_that_never_ends_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.en.gz"
    path.write_bytes(gzip.compress(b"a b\n" + b"word " * (MAX_LINE // 5 + 1)))
    with pytest.raises(DataError, match=r"text\.en\.gz:2: .*1,048,576"):
        open_corpus(path)
    with pytest.raises(DataError, match="stdin:1:"):
        list(lines_of(io.BytesIO(b"\0" * (MAX_LINE + 1)), name="stdin"))
    assert list(lines_of(io.BytesIO(b"a\n" + b"b" * MAX_LINE), name="x")) == ["a", "b" * MAX_LINE]


@needs_device
def test_devices_and_pipes_are_no_texts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (ENDLESS, tmp_path / "pipe"):
        with pytest.raises(DataError, match="pipe"):
            open_corpus(path)
    with pytest.raises(DataError):
        list(read_conllu(ENDLESS))
    with pytest.raises(DataError, match="67,108,864"):
        read_bytes(ENDLESS)


@pytest.mark.slow
def test_a_very_long_line_is_cut_where_the_model_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints.small()
    assert checkpoint.source_limit is None and checkpoint.source_length(None) == LONGEST == 1024
    lengths: list[int] = []
    encode = checkpoint.model.encode

    def record_length(ids: torch.Tensor, *args: Any) -> Any:
        lengths.append(ids.shape[1])
        return encode(ids, *args)

    monkeypatch.setattr(checkpoint.model, "encode", record_length)
    counts = UnknownSubwords()
    line = "a " * 100_000
    outputs = list(translate_lines(checkpoint, ["a b", line], options=TranslateOptions(), tokens=50, unknown=counts))
    assert counts.cut == [2] and lengths == [3, 1024] and len(outputs) == 2
    short = TranslateOptions(max_length=5)
    counts.cut.clear()
    (first,) = translate_lines(checkpoint, ["a b c d e f g"], options=short, tokens=50, unknown=counts)
    (second,) = translate_lines(checkpoint, ["a b c d"], options=short, tokens=50, unknown=counts)
    assert first == second and counts.cut == [1] and lengths[-2:] == [5, 5]


def merge_slowly(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """As subword-nmt says it: find the pair of the lowest rank, replace all of it, begin anew."""
    while True:
        candidates = [(ranks[pair], index) for index, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not candidates:
            return symbols
        best = tuple(symbols[min(candidates)[1] :][:2])
        result: list[str] = []
        while symbols:
            is_best = tuple(symbols[:2]) == best
            result.append("".join(symbols[: 1 + is_best]))
            symbols = symbols[1 + is_best :]
        symbols = result


def test_merging_in_n_log_n_is_merging() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        symbols, ranks = ["a", "b", "c"], dict[tuple[str, str], int]()
        for rank in range(chance.randint(0, 14)):
            pair = chance.choice(symbols), chance.choice(symbols)
            ranks.setdefault(pair, chance.choice((rank, rank, 0, 3, 99 - rank)))
            symbols.append("".join(pair))
        word = chance.choices("abc", k=chance.randint(1, 13))
        assert merge_symbols(word, ranks) == merge_slowly(list(word), ranks)


def test_config_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for text in ("a = " + "[" * 50_000, "a = " + "1" * 5000, "a = 'x\n", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError):
            read_toml(path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="1,048,576"):
        read_toml(path)


def test_numbers_of_configs_are_bounded() -> None:
    base = {"checkpoint": "x", "source": "x"}
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
            make_config(EvaluateConfig, {**base, **options})
    with pytest.raises(ConfigError, match=r"--nbest.*2000.*1000"):
        make_config(TranslateConfig, {"checkpoint": "x", "nbest": 2000})
    assert make_config(EvaluateConfig, {**base, "seed": SEED}).seed == SEED


TOGETHER: set[tuple[str, ...]] = {("analyze",), ("evaluate",), ("translate",)}
TOGETHER.update(("prune", name) for name in ("l0", "subset", "rank", "sweep"))
ALONE = [entry for entry in commands.commands() if entry.words not in TOGETHER and entry.words[0] != "train"]


@pytest.mark.parametrize("command", ALONE, ids=lambda command: " ".join(command.words))
def test_commands_that_share_no_work_are_refused_once(
    command: commands.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, status, message in (("0", 2, "runs in one process; start it without torchrun\n"), ("1", 0, "")):
        monkeypatch.setenv("RANK", rank)
        outcome = commands.run_cli([*command.words, "x"])
        assert (outcome.status, outcome.stdout, outcome.crash) == (status, "", None)
        name = command.words[0] if command.words[0] == "plot" else " ".join(command.words)
        assert outcome.error == (f"error: headscope {name} {message}" if message else "")
