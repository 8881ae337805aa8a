"""Paths that do not open: the refusal names the cause, and what opens all the same does so and says it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from headscope.errors import CheckpointError
from headscope.formats.base import FORMATS, open_checkpoint
from tests.contracts.architectures import BY_NAME, build, inputs_of, logits
from tests.makers.fairseq_layouts import MADE, computed
from tests.oracles import fairseq

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456789\n".format("4d7a" * 16)
Copied = Callable[..., Path]


def open_it(path: Path) -> Any:
    return open_checkpoint(str(path), device="cpu")


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    """A folder with a tiny model and a tokenizer, to break."""

    def save(name: str = "bert") -> Path:
        build(BY_NAME[name]).save_pretrained(tmp_path / name)
        words = WordLevel({"<unk>": 0, "a": 1, "cat": 2}, unk_token="<unk>")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>").save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def edit(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


# A prefix


def rename(folder: Path, prefix: str, how: str) -> None:
    """Put a prefix before all names of a folder's weights, as wrappers do, in one file or in two."""
    weights = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if how == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif how == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = {key: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, key in enumerate(weights)}
        for file in {*names.values()}:
            part = {key: weights[key] for key in names if names[key] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
@pytest.mark.parametrize(
    ("prefix", "how"),
    [
        ("_orig_mod.", "safetensors"),
        ("module.", "bin"),
        ("base_model.model.", "sharded"),
        ("module._orig_mod.", "safetensors"),
        ("student.net.", "bin"),
    ],
)
def test_a_common_prefix_is_taken_off_and_said(
    copied: Copied, tmp_path: Path, name: str, prefix: str, how: str
) -> None:
    folder = copied(name)
    rename(folder, prefix, how)
    with pytest.warns(UserWarning, match=f": {prefix} begins all names of weights, and is taken off$"):
        opened = open_it(folder)
    inputs = inputs_of(BY_NAME[name])
    assert torch.equal(logits(opened.model, inputs), logits(build(BY_NAME[name]), inputs))
    again = tmp_path / "again"
    FORMATS.get("huggingface").save(opened, again)
    assert not any(key.startswith(prefix) for key in load_file(again / "model.safetensors"))
    assert torch.equal(logits(open_it(again).model, inputs), logits(opened.model, inputs))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.module."])
@pytest.mark.parametrize("name", ["post-norm, tied", "lm"])
def test_a_prefix_of_fairseqs_names(tmp_path: Path, name: str, prefix: str) -> None:
    weights = fairseq.state(MADE[name])
    renamed = {prefix + key: tensor for key, tensor in weights.items()}
    with pytest.warns(UserWarning, match=f": {prefix} begins all names of weights, and is taken off$"):
        found = open_it(fairseq.write(tmp_path / "c.pt", MADE[name], renamed))
    assert torch.equal(computed(found), computed(open_it(fairseq.write(tmp_path / "d.pt", MADE[name], weights))))


# Folders of transformers


def keep_only(pattern: str, *names: str, content: bytes = b"weights") -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    return change


def adapted(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    found = {f"base_model.model.{key.replace('query.', 'query.base_layer.')}": value for key, value in weights.items()}
    found["base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight"] = torch.ones(2, 15)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def relative(folder: Path) -> None:
    edit(position_embedding_type="relative_key_query")(folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        weights[f"bert.encoder.layer.{layer}.attention.self.distance_embedding.weight"] = torch.ones(105, 5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def trainer(folder: Path) -> None:
    for step in (500, 1500):
        shutil.copytree(folder, folder.parent / f"checkpoint-{step}")
    for file in folder.iterdir():
        file.unlink()
    for step in (500, 1500):
        (folder.parent / f"checkpoint-{step}").rename(folder / f"checkpoint-{step}")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "LFS weights": (keep_only("x", "model.safetensors", content=POINTER.encode()), r"model\.safetensors is a Git LFS"),
    "LFS config": (keep_only("x", "config.json", content=POINTER.encode()), r"config\.json is a Git LFS pointer"),
    "LFS .bin": (keep_only("*.safetensors", "pytorch_model.bin", content=POINTER.encode()), r"\.bin is a Git LFS"),
    "a Trainer's": (trainer, r"give a checkpoint that lies in it: \S+/checkpoint-1500, \S+/checkpoint-500$"),
    "Flax": (keep_only("*.safetensors", "flax_model.msgpack"), r"of another program .*\(flax_model.msgpack\)"),
    "an adapter alone": (keep_only("*", "adapter_model.bin"), r"or an adapter \(adapter_model.bin\)"),
    "PEFT's state dict": (adapted, r"with an adapter \(PEFT: .*merge_and_unload\(\)"),
    "no config": (keep_only("config.json"), r"holds weights \(model\.safetensors\) without config\.json"),
    "relative positions": (relative, r"left over, \w+ has no such parts.*distance_embedding"),
    "a layer too few": (edit(num_hidden_layers=1), r"left over, .*\(does config.json say fewer layers\?\)"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_say_what_keeps_them_from_opening(copied: Copied, case: str) -> None:
    folder = copied()
    change, message = FOLDERS[case]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_it(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


# Files


def torch_file(content: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(content, path)


def raw(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "LFS": (raw(POINTER.encode()), "is a Git LFS pointer and not the file itself; run `git lfs pull`"),
    "nothing": (raw(b""), "is empty; copy it again"),
    "a page": (raw(b"<!DOCTYPE html>\n<html>"), "is a web page"),
    "gzip": (raw(b"\x1f\x8b\x08\x00" + bytes(99)), "is an archive; unpack it"),
    "weights": (torch_file({"q.weight": torch.ones(2)}), r"has the entries 'q.weight', and files of fairseq"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_say_what_they_are(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.pt"
    FILES[case][0](path)
    with pytest.raises(CheckpointError, match=FILES[case][1]) as caught:
        open_it(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
