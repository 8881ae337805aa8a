"""Folders that are not quite a model of transformers: adapters, sentence-transformers, kernels that are not here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPConfig, CLIPForImageClassification, PreTrainedModel

from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.companions.folder import ADAPTER
from headscope.model.discovery import find_attention
from tests.contracts.architectures import BY_NAME, build

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


def test_a_classifier_of_pictures_is_probed_with_a_picture_of_its_size() -> None:
    assert set(find_attention(clip(CLIPForImageClassification)).layout.values()) == {5}
