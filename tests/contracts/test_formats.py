"""Contracts of every checkpoint format: it opens, saves, writes a model without some heads, and refuses garbage.

`one_file` is a format of another package (tests/plugin), registered for these tests.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.errors import ConfigError, HeadscopeError, OutputError
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.export.convert import check_target_format, convert, writable_formats
from headscope.export.gguf_export import write_gguf
from headscope.export.gguf_layers import LlamaDecoder
from headscope.formats.base import FORMATS, Checkpoint, CheckpointFormat, open_checkpoint, write_checkpoint
from headscope.formats.exports import Probe
from headscope.formats.native import NATIVE
from headscope.heads import HeadId
from headscope.model.forward import max_abs_difference, outputs, reference
from headscope.model.interface import through_attend
from headscope.model.removal_plan import plan_removal
from tests.formats import test_transformerlens
from tests.makers import decoders
from tests.oracles import checkpoints, fairseq, story
from tests.oracles.plugin import register_plugin

PLUGIN = "one_file"
NAMES = [*FORMATS.names(), PLUGIN]
HP = {"res_steps": "nlda", "rescale_emb": False, "num_layers": 2, "num_heads": 2, "hid_size": 10}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with register_plugin(FORMATS, PLUGIN) if request.param == PLUGIN else nullcontext():
        yield request.param


def native(folder: Path) -> Path:
    NATIVE.save(checkpoints.small(self_mixing="alpha.v1"), folder)
    return folder


def mhr(folder: Path) -> Path:
    fairseq.dictionaries(folder)
    return fairseq.write(folder / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE, alphas=("all",)))


def gated(folder: Path) -> Path:
    folder.mkdir()
    hp = HP | {"concrete_heads": ["enc-self"]}
    np.savez(folder / "model.npz", **story.make(hp, (7, 11), 13, seed=5))  # type: ignore[arg-type]
    (folder / "hp.json").write_text(json.dumps(hp))
    for side, count in (("src", 7), ("dst", 11)):
        pieces = ["_BOS_", "_EOS_", "_UNK_", *(f"{side}{n}" for n in range(3, count))]
        (folder / f"{side}.voc.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return folder / "model.npz"


def one_file(folder: Path) -> Path:
    checkpoint = checkpoints.small(decoder_only=True)
    checkpoint.path = "model.safetensors"
    return FORMATS.get(PLUGIN).save(checkpoint, folder).path


def gguf(folder: Path) -> Path:
    source = decoders.save_decoder(folder / "whole", tokenizer=decoders.byte_level())
    write_gguf(LlamaDecoder(load(source)), load(source).tokenizer, path := folder / "model.gguf")  # type: ignore[attr-defined]
    return path


def transformerlens(folder: Path) -> Path:
    folder.mkdir()
    torch.save(test_transformerlens.state(), folder / "model.pt")
    (folder / "model.json").write_text(json.dumps(test_transformerlens.SETTINGS))
    return folder / "model.pt"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "native": native,
    "fairseq": mhr,
    "huggingface": lambda folder: checkpoints.save_model(folder, "bert"),
    "story_of_heads": gated,
    "gguf": gguf,
    "transformerlens": transformerlens,
    PLUGIN: one_file,
}


def load(path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(str(path), device="cpu", **options)


def logits(checkpoint: Checkpoint, data: InputTexts) -> list[torch.Tensor]:
    with through_attend(checkpoint.model):
        return [outputs(checkpoint.model, batch) for batch in data.feeds]


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def test_every_format_has_an_example_here(name: str) -> None:
    format_ = FORMATS.get(name)
    assert format_.name == name and name in WRITERS
    assert format_.summary and type(format_).__doc__
    assert [export.name for export in format_.exports] == list(getattr(format_, "export_names", ("same", "masked")))


def test_it_is_recognised_and_opened(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "whole")
    assert [other for other, candidate in FORMATS if candidate.recognise(path)] == [name]
    checkpoint = load(path)
    assert (checkpoint.format, checkpoint.path, checkpoint.in_memory) == (name, str(path), False)
    assert checkpoint.digest == load(path).digest and sum(checkpoint.layout.values()) > 0


def test_what_is_saved_is_the_same_when_it_is_opened(name: str, tmp_path: Path) -> None:
    checkpoint = load(WRITERS[name](tmp_path / "whole"))
    output = FORMATS.get(name).save(checkpoint, tmp_path / "again")
    assert output.format == name or output.format in output.notes[0]
    assert output.path == tmp_path / "again" or output.path.parent == tmp_path / "again"
    again = load(output.path)
    assert again.format == output.format and again.layout == checkpoint.layout and equal(again, checkpoint)
    data = read_input_texts(checkpoint, None, None, sentences=4)
    assert all(torch.equal(*pair) for pair in zip(logits(checkpoint, data), logits(again, data), strict=True))
    with pytest.raises(OutputError, match="--force"):
        FORMATS.get(name).save(checkpoint, tmp_path / "again")
    FORMATS.get(name).save(checkpoint, tmp_path / "again", force=True)
    assert equal(load(output.path), checkpoint)


def test_without_heads_it_is_written_as_if_they_were_masked_or_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    checkpoint = load(WRITERS[name](tmp_path / "whole"), dtype="float64")
    group = range(2 if name == "gguf" else 1)  # of its query heads two share their keys
    sites = [site_layer for site_layer, count in checkpoint.layout.items() if site_layer[1] == 1 and count]
    heads = [HeadId(*site_layer, head) for site_layer in sites for head in group]
    data = read_input_texts(checkpoint, None, None, sentences=4)
    before = {key: tensor.clone() for key, tensor in checkpoint.model.state_dict().items()}
    refusals = 0
    for export in FORMATS.get(name).exports:
        plan = plan_removal(checkpoint.attention_sites, heads, whole_groups=export.whole_groups)
        (folder := tmp_path / export.name).mkdir()
        try:
            removal = export.build(checkpoint, plan)
        except ConfigError as error:
            assert len(str(error)) > 40 and "\n" not in str(error)
            refusals += 1
            continue
        output = write_checkpoint(removal, folder)
        assert output.format == name or (output.notes and output.format in output.notes[0])
        again = load(output.path, format=output.format, dtype="float64")
        assert again.layout == removal.layout
        assert (removal.layout == checkpoint.layout) is (export.name == "masked")
        for batch, values in zip(data.feeds, logits(again, data), strict=True):
            assert max_abs_difference(values, reference(checkpoint, heads, batch)) < 1e-6  # files may be in float32
    assert refusals < len(FORMATS.get(name).exports)
    after = checkpoint.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before), "the whole checkpoint stays as it was"


def files_of(path: Path) -> list[Path]:
    """The files without which a checkpoint cannot be opened."""
    if path.is_file():
        return [path]
    return [file for file in path.iterdir() if file.suffix in (".safetensors", ".toml") or file.name == "config.json"]


@pytest.mark.parametrize("damage", ["empty", "half", "noise"])
def test_garbage_is_refused_in_one_line(name: str, damage: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "whole")
    for file in files_of(path):
        content = file.read_bytes()
        spoilt = {"empty": b"", "half": content[: len(content) // 2], "noise": random.Random(7).randbytes(997)}[damage]
        file.write_bytes(spoilt)
        assert isinstance(FORMATS.get(name).recognise(path), bool)
        for format in (name, None):
            with pytest.raises(HeadscopeError) as error:
                load(path, format=format)
            assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
        file.write_bytes(content)
    load(path)


def mutate(data: bytes, change: str, rng: random.Random) -> bytes:
    if change == "truncated":
        return data[: rng.randrange(len(data))]
    buffer = bytearray(data)
    start = rng.randrange(min(len(data), 6000) if change == "head" else len(data))  # a pickle stands at the front
    if change == "bytes":
        buffer[start : start + 8] = rng.randbytes(8)
    else:
        buffer[start] ^= 1 << rng.randrange(8)
    return bytes(buffer)


def test_damaged_files_open_or_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path, rng, refusals = WRITERS[name](tmp_path / "whole"), random.Random(name), 0
    for file in files_of(path):
        content = file.read_bytes()
        for change in 3 * ("flipped", "head", "bytes", "truncated"):
            file.write_bytes(mutate(content, change, rng))
            try:
                load(path, format=name).layout  # noqa: B018
            except HeadscopeError as error:
                assert "\n" not in str(error) and len(str(error)) < 2000
                refusals += 1
        file.write_bytes(content)
    assert refusals > 3


def test_what_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        assert not FORMATS.get(name).recognise(path)
        with pytest.raises(HeadscopeError) as error:
            load(path, format=name)
        assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_conversion_gives_the_same_logits_or_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = load(mhr(tmp_path / "whole"), dtype="float64")
    format_: CheckpointFormat[Any] = FORMATS.get(name)
    assert format_.converts is (name in writable_formats())
    if format_.converts:
        conversion = convert(checkpoint, tmp_path / "out", to=name)
        assert conversion.difference < 1e-5 and load(conversion.path).format == name
        return
    if name != "gguf":  # which an engine writes
        with pytest.raises(ConfigError, match=f"{name}.*native, fairseq, huggingface"):
            check_target_format(name)
    with pytest.raises(ConfigError, match=f"{name}"):
        format_.convert(checkpoint, tmp_path, Probe(*[torch.empty(0)] * 3))
