"""Folders that are not quite a model of transformers: adapters, sentence-transformers, kernels that are not here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoBackbone,
    BertConfig,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    PreTrainedModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.companions.folder import ADAPTER
from headscope.heads import Site
from headscope.model.discovery import find_attention
from tests.contracts.architectures import BY_NAME, build

Command = Callable[..., tuple[int, str, str]]
LORA = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
TEXT: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 19,
}
PICTURES: dict[str, Any] = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 17,
    "image_size": 14,
    "patch_size": 7,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    build(BY_NAME["bert"]).save_pretrained(folder)
    return folder


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def sentence_transformer(bert: Path, folder: Path, first: str = "0_Transformer") -> Path:
    """A folder as sentence-transformers wrote it before its version 2."""
    shutil.copytree(bert, folder / "0_Transformer")
    written(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 15, "pooling_mode_mean_tokens": True})
    paths = {first: "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in paths.items()]
    written(folder / "modules.json", modules)
    return folder


def test_the_encoder_of_a_sentence_transformer_opens(bert: Path, tmp_path: Path) -> None:
    found = open_checkpoint(str(sentence_transformer(bert, tmp_path / "st")), device="cpu")
    plain = open_checkpoint(str(bert), device="cpu")
    assert found.digest == plain.digest and found.layout == plain.layout
    assert found.path == str(tmp_path / "st" / "0_Transformer")


@pytest.mark.parametrize("first", ["../bert", "/etc", "", "..", "none"])
def test_modules_elsewhere_are_not_looked_at(bert: Path, tmp_path: Path, first: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(str(sentence_transformer(bert, tmp_path / "st", first)), device="cpu")


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (LORA, "owner/base.*merge_and_unload"),
        ([], "adapter"),
    ],
)
def test_an_adapter_is_named_with_what_to_do(command: Command, tmp_path: Path, adapter: Any, says: str) -> None:
    written(tmp_path / "lora" / ADAPTER, adapter)
    status, out, err = command("show", tmp_path / "lora")
    assert (status, out, err.count("\n")) == (2, "", 1)
    with pytest.raises(CheckpointError, match=f"lora.*{says}"):
        open_checkpoint(str(tmp_path / "lora"), device="cpu")


def test_an_adapter_beside_a_model_is_not_passed_over(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "both")
    written(folder / ADAPTER, LORA)
    with pytest.raises(CheckpointError, match="adapter_config"):
        open_checkpoint(str(folder), device="cpu")
    (folder / ADAPTER).unlink()
    assert open_checkpoint(str(folder), device="cpu").layout


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn", "none"])
@pytest.mark.parametrize("entry", ["_attn_implementation", "attn_implementation"])
def test_a_stored_attention_that_is_not_installed_is_replaced(
    bert: Path, tmp_path: Path, entry: str, kernel: str
) -> None:
    folder = shutil.copytree(bert, tmp_path / "flash")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written(folder / "config.json", config | {entry: kernel})
    model = open_checkpoint(str(folder), device="cpu")
    expected = open_checkpoint(str(bert), device="cpu")
    assert model.layout == expected.layout
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model.model(input_ids=ids)[0], expected.model(input_ids=ids)[0])


def clip(cls: Any) -> PreTrainedModel:
    model: PreTrainedModel = cls(CLIPConfig(text_config=TEXT, vision_config=PICTURES, projection_dim=15))
    model.eval()
    return model


def captioner() -> PreTrainedModel:
    decoder = BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**PICTURES), decoder)
    model: PreTrainedModel = VisionEncoderDecoderModel(config)
    model.eval()
    return model


def test_a_model_of_text_and_pictures_says_what_stands_in_the_way_and_what_opens(tmp_path: Path) -> None:
    model: Any = clip(CLIPModel)
    says = "'clip' reads pictures beside the text, .*: save model.text_model or model.vision_model with"
    with pytest.raises(CheckpointError, match=says):
        find_attention(model)
    for part, heads in (("text_model", 3), ("vision_model", 5)):
        getattr(model, part).save_pretrained(tmp_path / part)
        assert set(open_checkpoint(str(tmp_path / part), device="cpu").layout.values()) == {heads}


def test_a_model_that_writes_text_for_pictures_is_refused_with_what_opens() -> None:
    model: Any = captioner()
    says = "'vision-encoder-decoder' writes text for a picture, .*; open a part of it: save model.encoder with"
    with pytest.raises(CheckpointError, match=says):
        find_attention(model)
    assert set(find_attention(model.encoder).layout) == {(Site.ENCODER_SELF, 0), (Site.ENCODER_SELF, 1)}


def test_a_classifier_of_pictures_is_probed_with_a_picture_of_its_size() -> None:
    assert set(find_attention(clip(CLIPForImageClassification)).layout.values()) == {5}


def test_a_model_whose_config_says_no_size_of_pictures_is_not_said_to() -> None:
    """SigLIP 2 reads patches: pictures of any size, cut up beforehand."""
    sizes = {name: size for name, size in PICTURES.items() if name != "image_size"}
    model = Siglip2VisionModel(Siglip2VisionConfig(**sizes))
    says = r"'siglip2\S*' fails on a picture of 224×224, its config says no image_size: "
    with pytest.raises(CheckpointError, match=says):
        find_attention(model)


def test_a_backbone_that_gives_states_of_several_layers_says_what_opens() -> None:
    backbone = AutoBackbone.from_config(Dinov2Config(**PICTURES))
    with pytest.raises(CheckpointError, match=r"Dinov2Backbone .* gives states of several layers, .*; name in"):
        find_attention(backbone)


def test_a_model_of_pictures_that_fails_on_one_is_not_said_to_read_text() -> None:
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4, image_size=7))
    with pytest.raises(CheckpointError, match=r"'convnext' fails on a picture of 7×7, as its image_size says: .*size"):
        find_attention(model)
