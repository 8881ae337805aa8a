"""Hugging Face checkpoints: what opens, how text is fed to it, and one line for everything that is broken."""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    CLIPConfig,
    CLIPForImageClassification,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetModel,
)

from headscope.data.batching import sentence_limit
from headscope.data.encoded import Batch, pad_side
from headscope.errors import CheckpointError
from headscope.formats.base import FORMATS, Checkpoint, open_checkpoint, write_checkpoint
from headscope.formats.huggingface.companions.folder import ADAPTER
from headscope.heads import Site
from headscope.model.discovery import find_attention
from tests.contracts.architectures import BY_NAME, VOCABULARY, assert_near, build, inputs_of, logits, two_berts
from tests.makers.shared import LFS_POINTER, Call

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "a", "dog", "ran"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
SENTENCES = ["the cat sat", "a dog ran and the cat sat on a mat"]
PAD, START, END, UNKNOWN, MASK = range(5)
THE, CAT, SAT = 5, 6, 7
PT_METADATA = {"format": "pt"}

Break = Callable[[Path], object]


def tokenizer(template: str = "<s> $A </s>", *, limit: int = 53) -> Any:
    """A tokenizer of ten words with the special tokens of the template."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*SPECIAL, *WORDS]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(piece, vocabulary[piece]) for piece in SPECIAL if piece in template]
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), SPECIAL, strict=True))
    tokens = {f"{name}_token": piece for name, piece in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=limit, **tokens)


TEMPLATES = {"gpt2": "$A", "llama": "<s> $A", "t5": "$A </s>"}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with a tiny model and its tokenizer; each is saved once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def save(name: str) -> Path:
        folder: Path = root / name
        if not folder.exists():
            build(BY_NAME[name]).save_pretrained(folder)
            tokenizer(TEMPLATES.get(name, "<s> $A </s>")).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def clone(store: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of such a folder, for a test to break."""
    return lambda name="bert": shutil.copytree(store(name), tmp_path / name)


def load(folder: Path, **more: Any) -> Any:
    return open_checkpoint(str(folder), **{"device": "cpu", **more})


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("roberta", "RobertaForMaskedLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("llama", "LlamaForCausalLM"),
        ("bart", "BartForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_a_saved_model_opens_as_it_was_with_its_task_head_and_in_silence(
    store: Callable[[str], Path], name: str, architecture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = store(name)
    capfd.readouterr()
    checkpoint = load(folder)
    assert capfd.readouterr() == ("", "")
    assert (checkpoint.format, checkpoint.model_type) == ("huggingface", name)
    assert type(checkpoint.model).__name__ == architecture == checkpoint.facts()["architecture"]
    assert dict(checkpoint.layout) == BY_NAME[name].layout
    assert checkpoint.two_sided is (BY_NAME[name].task == "seq2seq")
    assert not checkpoint.model.training
    inputs = inputs_of(BY_NAME[name])
    assert torch.equal(logits(checkpoint.model, inputs), logits(build(BY_NAME[name]), inputs))


@pytest.mark.parametrize("name", ["bert", "albert", "roberta"])
def test_a_config_that_names_no_class_opens_with_the_head_that_the_weights_have(
    clone: Callable[..., Path], name: str
) -> None:
    """Many configs of 2019 and 2020 are like that."""
    folder = clone(name)
    edit(architectures=None)(folder)
    inputs = inputs_of(BY_NAME[name])
    assert torch.equal(logits(load(folder).model, inputs), logits(build(BY_NAME[name]), inputs))


def shard(folder: Path, *, size: str = "2KB") -> None:
    (folder / "model.safetensors").unlink()
    build(BY_NAME["bert"]).save_pretrained(folder, max_shard_size=size)
    assert len(list(folder.glob("model-*.safetensors"))) > 3


def to_pickle(folder: Path, state: Any = None) -> None:
    (folder / "model.safetensors").unlink()
    state = build(BY_NAME["bert"]).state_dict() if state is None else state
    torch.save(state, folder / "pytorch_model.bin")


def split_weights(folder: Path, state: dict[str, Any], name: str, save: Callable[[dict[str, Any], Path], None]) -> None:
    """Split the weights alternately into two files, with an index."""
    (folder / "model.safetensors").unlink()
    stem, _, ending = name.partition(".")
    files = {key: f"{stem}-0000{number % 2 + 1}-of-00002.{ending}" for number, key in enumerate(state)}
    for file in {*files.values()}:
        save({key: state[key] for key in files if files[key] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def pickle_shards(folder: Path) -> None:
    split_weights(folder, build(BY_NAME["bert"]).state_dict(), "pytorch_model.bin", torch.save)


@pytest.mark.parametrize("change", [shard, to_pickle, pickle_shards])
def test_every_kind_of_weights_file_gives_the_same_model(
    clone: Callable[..., Path], change: Break, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = clone()
    single = load(folder).digest
    change(folder)
    capfd.readouterr()
    checkpoint = load(folder)
    assert capfd.readouterr() == ("", "")
    inputs = inputs_of(BY_NAME["bert"])
    assert torch.equal(logits(checkpoint.model, inputs), logits(build(BY_NAME["bert"]), inputs))
    assert checkpoint.digest != single


def rename(folder: Path, prefix: str, layout: str) -> None:
    """Put a prefix before all names of a folder's weights, as wrappers do, in one file or in two."""
    weights = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    if layout == "bin":
        to_pickle(folder, weights)
    elif layout == "safetensors":
        save_file(weights, folder / "model.safetensors", PT_METADATA)
    else:
        split_weights(folder, weights, "model.safetensors", lambda part, path: save_file(part, path, PT_METADATA))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
@pytest.mark.parametrize(
    ("prefix", "layout"),
    [
        ("_orig_mod.", "safetensors"),
        ("module.", "bin"),
        ("base_model.model.", "sharded"),
        ("module._orig_mod.", "safetensors"),
        ("student.net.", "bin"),
    ],
)
def test_a_common_prefix_is_taken_off_and_said(
    clone: Callable[..., Path], tmp_path: Path, name: str, prefix: str, layout: str
) -> None:
    folder = clone(name)
    rename(folder, prefix, layout)
    with pytest.warns(UserWarning, match=f": {prefix} begins all names of weights, and is taken off$"):
        checkpoint = load(folder)
    inputs = inputs_of(BY_NAME[name])
    assert torch.equal(logits(checkpoint.model, inputs), logits(build(BY_NAME[name]), inputs))
    copy = tmp_path / "again"
    FORMATS.get("huggingface").save(checkpoint, copy)
    assert not any(key.startswith(prefix) for key in load_file(copy / "model.safetensors"))
    assert torch.equal(logits(load(copy).model, inputs), logits(checkpoint.model, inputs))


def test_the_digest_is_that_of_the_bytes_and_not_of_the_place(clone: Callable[..., Path], tmp_path: Path) -> None:
    folder = clone()
    elsewhere = shutil.copytree(folder, tmp_path / "another name")
    digest = load(folder).digest
    assert len(digest) == 64
    assert load(elsewhere).digest == load(folder).digest == digest
    (elsewhere / "README.md").write_text("words about the model")
    assert load(elsewhere).digest == digest
    edit(vocab_size=VOCABULARY, note="changed")(elsewhere)
    assert load(elsewhere).digest != digest


def test_an_adapter_beside_a_model_is_not_passed_over(clone: Callable[..., Path]) -> None:
    folder = clone()
    write(ADAPTER, '{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')(folder)
    with pytest.raises(CheckpointError, match="adapter_config"):
        load(folder)
    (folder / ADAPTER).unlink()
    assert load(folder).layout


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn", "none"])
@pytest.mark.parametrize("entry", ["_attn_implementation", "attn_implementation"])
def test_a_stored_attention_that_is_not_installed_is_replaced(
    clone: Callable[..., Path], entry: str, kernel: str
) -> None:
    folder = clone()
    edit(**{entry: kernel})(folder)
    checkpoint, inputs = load(folder), inputs_of(BY_NAME["bert"])
    assert checkpoint.layout == BY_NAME["bert"].layout
    assert_near(logits(checkpoint.model, inputs), logits(build(BY_NAME["bert"]), inputs), 1e-6)


def test_a_classifier_of_pictures_is_probed_with_a_picture_of_its_size() -> None:
    shared = {"hidden_size": 15, "num_hidden_layers": 2, "intermediate_size": 17}
    texts = {**shared, "vocab_size": 53, "num_attention_heads": 3, "max_position_embeddings": 19}
    pictures = {**shared, "num_attention_heads": 5, "image_size": 14, "patch_size": 7}
    clip: Any = CLIPForImageClassification
    model = clip(CLIPConfig(text_config=texts, vision_config=pictures, projection_dim=15)).eval()
    assert set(find_attention(model).layout.values()) == {5}


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_the_type_is_the_one_asked_for_and_single_precision_on_a_cpu(
    clone: Callable[..., Path], dtype: str, expected: str
) -> None:
    folder = clone()
    build(BY_NAME["bert"], dtype="bfloat16").save_pretrained(folder)
    assert load(folder, dtype=dtype).dtype == getattr(torch, expected)


def test_two_berts_in_one_checkpoint_are_fed_as_a_translator(tmp_path: Path) -> None:
    two_berts().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    assert checkpoint.two_sided and checkpoint.default_length == 53
    assert {site for site, _ in checkpoint.layout} == set(Site)
    assert checkpoint.encode(["the cat"], side="target", limit=7)[0].ids == [1, START, THE, CAT]


def test_the_limit_is_that_of_the_side_that_reads_less(tmp_path: Path) -> None:
    """A RoBERTa encoder with a GPT-2 decoder, which has fewer positions; XLNet's -1 means no limit."""
    sizes = {"vocab_size": 31, "n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 11}
    decoder = AutoConfig.for_model("gpt2", **sizes, is_decoder=True, add_cross_attention=True)
    encoder = AutoConfig.for_model(
        "roberta", hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=7, vocab_size=31,
        max_position_embeddings=23, pad_token_id=1,
    )  # fmt: skip
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, decoder_start_token_id=1)
    EncoderDecoderModel(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).limit == 11
    XLNetModel(XLNetConfig(vocab_size=31, d_model=6, n_layer=1, n_head=2, d_inner=7)).save_pretrained(tmp_path)
    assert (load(tmp_path).limit, load(tmp_path).default_length) == (None, 53)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5", "marian", "m2m_100"])
def test_the_decoders_inputs_are_the_models_own_shift_of_its_labels(store: Callable[[str], Path], name: str) -> None:
    checkpoint = load(store(name))
    labels = torch.tensor([checkpoint.tokenizer("the cat sat")["input_ids"]])
    source = checkpoint.encode(["the cat sat"], side="source", limit=53)[0].ids
    target = checkpoint.encode(["the cat sat"], side="target", limit=53)[0]
    assert source == labels[0].tolist()
    assert len(target.ids) == len(target.special) == labels.shape[1]
    assert target.special[0] and not target.special[-1]
    inputs = {"input_ids": torch.tensor([source])}
    with torch.no_grad():
        expected = checkpoint.model(**inputs, labels=labels).logits
        actual = checkpoint.model(**inputs, decoder_input_ids=torch.tensor([target.ids])).logits
    assert_near(actual, expected, 1e-6)


def test_plain_ids_are_those_that_text_can_have(store: Callable[[str], Path]) -> None:
    checkpoint = load(store("gpt2"))
    assert checkpoint.plain_ids(side="source") == [UNKNOWN, *range(5, 5 + len(set(WORDS)))]
    assert checkpoint.subwords([PAD, THE, MASK], side="source") == ["<pad>", "the", "<mask>"]
    assert (checkpoint.id_of("cat", side="source"), checkpoint.id_of("zebra", side="source")) == (CAT, None)
    assert checkpoint.vocabulary == VOCABULARY


@pytest.mark.parametrize(("size", "limit"), [(60, 59), (59, 59), (53, 53)])
def test_texts_are_cut_where_the_tokenizer_cuts_them(clone: Callable[..., Path], size: int, limit: int) -> None:
    """roberta-base says 512 in its tokenizer and 514 in its config: 512 pieces fit."""
    folder = clone("roberta")
    tokenizer(limit=size).save_pretrained(folder)
    assert (load(folder).limit, load(folder).default_length) == (59, limit)
    assert sentence_limit(load(folder)) == limit and sentence_limit(load(folder), 59) == 59


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])  # T5 has no model without it
def test_a_batch_goes_through_without_the_vocabulary_wide_layer(store: Callable[[str], Path], name: str) -> None:
    checkpoint = load(store(name))
    heads = [part for part in checkpoint.model.modules() if getattr(part, "out_features", 0) == VOCABULARY]
    assert heads
    for part in heads:
        part.register_forward_pre_hook(lambda *_: pytest.fail("the output layer was run"))
    checkpoint.forward(batch(checkpoint))
    if checkpoint.two_sided:
        checkpoint.forward(batch(checkpoint, target=False))


def batch(checkpoint: Checkpoint, *, target: bool = True) -> Batch:
    source = pad_side(checkpoint.encode(SENTENCES, side="source", limit=53))
    other = pad_side(checkpoint.encode(SENTENCES, side="target", limit=53)) if checkpoint.two_sided and target else None
    return Batch(torch.arange(2), 0, source, other)


def edit(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def write(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def remove(pattern: str) -> Break:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def chain(first: Break, second: Break) -> Break:
    def change(folder: Path) -> None:
        first(folder)
        second(folder)

    return change


def truncate(length: int) -> Break:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:length])

    return change


def flip(index: int) -> Break:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[index] ^= 0xFF
        path.write_bytes(content)

    return change


def add_adapter(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    state = {f"base_model.model.{key.replace('query.', 'query.base_layer.')}": value for key, value in weights.items()}
    state["base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight"] = torch.ones(2, 15)
    save_file(state, folder / "model.safetensors", PT_METADATA)


def use_relative_positions(folder: Path) -> None:
    edit(position_embedding_type="relative_key_query")(folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        weights[f"bert.encoder.layer.{layer}.attention.self.distance_embedding.weight"] = torch.ones(105, 5)
    save_file(weights, folder / "model.safetensors", PT_METADATA)


def nest_as_trainer(folder: Path) -> None:
    for step in (500, 1500):
        shutil.copytree(folder, folder.parent / f"checkpoint-{step}")
    remove("*")(folder)
    for step in (500, 1500):
        (folder.parent / f"checkpoint-{step}").rename(folder / f"checkpoint-{step}")


NO_FORMAT = (
    r"is no checkpoint that headscope knows; give a folder with config.json and weights, or .*`headscope list formats`"
)
BROKEN_FILE = r"(its weights file|\.bin) is truncated or broken \(.*\); fetch it again$"
OTHER_SIZE = r"of another size than config.json says: .*{}.* must agree$"
INDEX = "model.safetensors.index.json"
BROKEN: dict[str, tuple[Break, str]] = {
    "an empty directory": (remove("*"), NO_FORMAT),
    "no config": (remove("config.json"), r"holds weights \(model\.safetensors\) without config\.json"),
    "a config that is not JSON": (write("config.json", "{model_type: bert"), "config.json' is not a valid JSON"),
    "a config that is not UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"\xff"}'), "cannot be loaded"),
    "a config that is a list": (write("config.json", '["model_type"]'), NO_FORMAT),
    "a config without model_type": (
        write("config.json", '{"hidden_size": 15}'),
        r'no model_type, such as "model_type": "bert"; add it',
    ),
    "an unknown model_type": (edit(model_type="bart2"), "model type bart2 is unknown"),
    "an architecture that is no model": (edit(architectures=["AutoTokenizer"]), "AutoTokenizer, which is no model"),
    "an architecture of another type": (
        edit(architectures=["GPT2LMHeadModel"]),
        r"do not fit the architecture that they name \('BertConfig'",
    ),
    "a size that is a word": (edit(hidden_size="fifteen"), "'hidden_size' expected int, got str"),
    "an unknown activation": (edit(hidden_act="swoosh"), "'swoosh'"),
    "safetensors of no bytes": (truncate(0), BROKEN_FILE),
    "safetensors cut in the weights": (truncate(9973), BROKEN_FILE),
    "safetensors with a huge length": (flip(7), BROKEN_FILE),
    "safetensors with a broken header": (flip(53), BROKEN_FILE),
    "a .bin of no bytes": (chain(to_pickle, write("pytorch_model.bin", "")), BROKEN_FILE),
    "a .bin that is text": (chain(to_pickle, write("pytorch_model.bin", "these are no weights " * 97)), BROKEN_FILE),
    "a .bin with a list": (lambda folder: to_pickle(folder, [1, 2]), "cannot be loaded"),
    "a .bin with other names": (
        lambda folder: to_pickle(folder, {"a": torch.ones(3)}),
        "weights are missing .*a instead.*: bert",
    ),
    "a shard that is missing": (chain(shard, remove("model-00002-*")), "No such file .*model-00002-of-"),
    "an index that is not JSON": (chain(shard, write(INDEX, "{")), "is no JSON"),
    "an index without weights": (chain(shard, write(INDEX, "{}")), "has no weight_map"),
    "another width": (edit(hidden_size=18), OTHER_SIZE.format(r"LayerNorm.bias \(15, config.json: 18\)")),
    "another vocabulary": (edit(vocab_size=101), OTHER_SIZE.format(r"97×15, config.json: 101×15")),
    "a layer too many": (edit(num_hidden_layers=3), r"weights are missing: bert.encoder.layer.2.* and 13 more"),
    "a layer too few": (
        edit(num_hidden_layers=1),
        r"weights are left over, .*\(does config.json say fewer layers\?\): bert.encoder.layer.1",
    ),
    "heads that do not divide the width": (edit(num_attention_heads=7), r"\(15\) is not a multiple .* heads \(7\)"),
    "no weights": (remove("*.safetensors"), "there is no weights file; put model.safetensors"),
    "code of its own": (
        edit(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}),
        "needs program code of its own, which headscope never runs",
    ),
    "LFS weights": (write("model.safetensors", LFS_POINTER), r"model\.safetensors is a Git LFS"),
    "LFS config": (write("config.json", LFS_POINTER), r"config\.json is a Git LFS pointer"),
    "LFS .bin": (chain(remove("*.safetensors"), write("pytorch_model.bin", LFS_POINTER)), r"\.bin is a Git LFS"),
    "a Trainer's": (nest_as_trainer, r"give a checkpoint that lies in it: \S+/checkpoint-1500, \S+/checkpoint-500$"),
    "Flax": (
        chain(remove("*.safetensors"), write("flax_model.msgpack", "weights")),
        r"of another program .*\(flax_model.msgpack\)",
    ),
    "an adapter alone": (
        chain(remove("*"), write("adapter_model.bin", "weights")),
        r"or an adapter \(adapter_model.bin\)",
    ),
    "PEFT's state dict": (add_adapter, r"with an adapter \(PEFT: .*merge_and_unload\(\)"),
    "relative positions": (use_relative_positions, r"left over, \w+ has no such parts.*distance_embedding"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(
    case: str, clone: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = clone()
    change, message = BROKEN[case]
    change(folder)
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("template", ["../{}", "..\\\\{}", "/{}", "C:\\\\{}", "inner/../../{}", "a link"])
def test_an_index_names_no_files_outside_its_folder(template: str, clone: Callable[..., Path], tmp_path: Path) -> None:
    folder = clone()
    shard(folder)
    index = folder / "model.safetensors.index.json"
    first = min(folder.glob("model-*.safetensors"))
    elsewhere = first.rename(folder.parent / first.name)
    if template == "a link":
        first.symlink_to(elsewhere)
    else:
        name = template.format(first.name) if template != "/{}" else str(elsewhere)
        index.write_text(index.read_text().replace(f'"{first.name}"', json.dumps(name)))
    with pytest.raises(CheckpointError, match="folder") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_model_of_the_hub_is_written_with_what_lies_beside_it_and_in_its_own_type(
    clone: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Image preprocessing is copied; weights keep half precision though config.json does not name it."""
    folder, out = clone("llama"), tmp_path / "out"
    weights = folder / "model.safetensors"
    save_file({name: values.half() for name, values in load_file(weights).items()}, weights, {"format": "pt"})
    edit(dtype=None)(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    cache = tmp_path / "hub" / "models--a--b"
    shutil.copytree(folder, cache / "snapshots" / "1234")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    out.mkdir()
    write_checkpoint(open_checkpoint("a/b", device="cpu"), out)
    assert (out / "preprocessor_config.json").read_text() == "{}"
    assert {values.dtype for values in load_file(out / "model.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_would_run_a_program_does_not(clone: Callable[..., Path], tmp_path: Path, as_zip: bool) -> None:
    folder, mark = clone(), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    state = {**build(BY_NAME["bert"]).state_dict(), "extra": Call(os.system, f"touch '{mark}'")}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    with pytest.raises(CheckpointError, match=r"posix.system.*safetensors"):
        load(folder)
    assert not mark.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists()  # it would have


def test_code_beside_a_known_model_type_is_not_run(clone: Callable[..., Path], tmp_path: Path) -> None:
    folder, mark = clone(), tmp_path / "mark"
    edit(auto_map={"AutoConfig": "mine.Config", "AutoModelForMaskedLM": "mine.Model"})(folder)
    (folder / "mine.py").write_text(f"open({str(mark)!r}, 'w')")
    assert type(load(folder).model).__name__ == "BertForMaskedLM"
    assert not mark.exists()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart", "llama"])
def test_a_model_without_a_tokenizer_opens_but_reads_no_text(clone: Callable[..., Path], name: str) -> None:
    """transformers 5 makes up a tokenizer without words for most of these."""
    folder = clone(name)
    remove("*token*")(folder)
    checkpoint = load(folder)
    assert checkpoint.facts()["tokenizer"] is None
    assert dict(checkpoint.layout) == BY_NAME[name].layout
    assert checkpoint.plain_ids(side="source") == list(range(VOCABULARY))
    with pytest.raises(CheckpointError, match=r"tokenizer.*vocabulary"):
        checkpoint.encode(SENTENCES, side="source", limit=53)


@pytest.mark.parametrize("name", ["nobody/nothing-of-that-name", "nothing-of-that-name"])
def test_a_hub_that_cannot_be_reached_is_said_without_waiting(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("waits for the network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(time, "sleep", wait)
    monkeypatch.setattr(socket.socket, "connect", wait)
    message = f"{name} .*the model hub cannot be reached|there is no file or directory {name};"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(name)
    assert capfd.readouterr() == ("", "")
