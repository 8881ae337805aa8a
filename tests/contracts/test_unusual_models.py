"""Models whose attention headscope cannot read are refused by name; unusual ones that it can read are not."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from headscope.errors import CheckpointError
from headscope.formats.base import open_checkpoint
from headscope.heads import HeadId, Site
from headscope.model.discovery import find_attention, probe_inputs
from headscope.model.taps import capture, gated
from headscope.results.study import Study
from tests.contracts.architectures import BY_NAME, assert_near, build, inputs_of, logits, sharpen, silence, two_berts
from tests.contracts.catalogue import catalogue
from tests.makers.figures import draw_nothing
from tests.makers.wrappers import hugging_face
from tests.oracles import tiny as words

BERT, GPT2, LLAMA = (BY_NAME[name].sizes for name in ("bert", "gpt2", "llama"))
BART, T5 = BY_NAME["bart"].sizes, BY_NAME["t5"].sizes


def tiny(name: str, sizes: dict[str, Any], kind: str | None = None) -> Any:
    config = AutoConfig.for_model(name, **sizes)
    model = getattr(transformers, kind)(config) if kind else AutoModel.from_config(config)
    return sharpen(model.eval())


def twin(model: Any) -> Any:
    """The same model under eager attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@pytest.mark.parametrize("name", ["bloom", "mpnet", "xlnet"])
def test_models_whose_code_bypasses_the_interface_are_refused_by_name(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = sharpen(catalogue()[name].model())
    capfd.readouterr()
    for _ in range(2):  # not only the first time
        with pytest.raises(CheckpointError, match=f"'{name}'") as error:
            find_attention(model)
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=name), capture(model):
        pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_decoder_without_its_encoder_is_refused(name: str) -> None:
    sizes = {**BY_NAME[name].sizes, "is_decoder": True, "add_cross_attention": True}
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        find_attention(tiny(name, sizes))


def test_a_module_that_attends_twice_before_it_is_through_is_refused() -> None:
    """Two calls of a module in one of its passes, in an architecture that is otherwise supported."""
    model = tiny("bert", BERT)
    attention = model.encoder.layer[1].attention.self
    forward = attention.forward
    attention.forward = lambda *args, **more: (forward(*args, **more), forward(*args, **more))[1]
    with pytest.raises(CheckpointError, match=r"\(encoder\.layer\.1\.attention\.self\)"):
        find_attention(model)
    attention.forward = forward
    assert len(find_attention(model).order) == 2


def test_a_model_that_computes_something_else_is_refused() -> None:
    """Eager attention that scales its weights, as a fork of an architecture might."""
    model = tiny("bert", BERT)
    module = transformers.models.bert.modeling_bert
    eager = module.eager_attention_forward

    def scale_context(*args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        context, weights = eager(*args, **more)
        return context * 1.01, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", scale_context)
        with pytest.raises(CheckpointError, match="differ"):
            find_attention(model)


UNUSUAL = {
    "a vocabulary of 7": ("bert", {**BERT, "vocab_size": 7}, None),
    "a vocabulary of special ids only": ("bert", {**BERT, "vocab_size": 3}, None),
    "a start that is padding": ("bart", {**BART, "decoder_start_token_id": 0}, None),
    "BERT as a decoder": ("bert", {**BERT, "is_decoder": True}, "BertLMHeadModel"),
    "BERT with a classifier": ("bert", BERT, "BertForSequenceClassification"),
    "BERT with tags": ("bert", BERT, "BertForTokenClassification"),
    "the encoder of T5": ("t5", T5, "T5EncoderModel"),
    "BART with a classifier": ("bart", BART, "BartForSequenceClassification"),
    "GPT-2 scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, None),
    "GPT-2 in upcast order": ("gpt2", {**GPT2, "reorder_and_upcast_attn": True}, None),
    "GPT-2 without scaling": ("gpt2", {**GPT2, "scale_attn_weights": False}, None),
    "Llama with biases": ("llama", {**LLAMA, "attention_bias": True}, None),
    "Llama with two ends": ("llama", {**LLAMA, "eos_token_id": [2, 5]}, None),
    "Llama with one group": ("llama", {**LLAMA, "num_key_value_heads": 1}, None),
    "GPT-NeoX in sequence": ("gpt_neox", {**BY_NAME["gpt_neox"].sizes, "use_parallel_residual": False}, None),
    "OPT with norms behind": ("opt", {**BY_NAME["opt"].sizes, "do_layer_norm_before": False}, None),
    "a gated T5": ("t5", {**T5, "feed_forward_proj": "gated-gelu"}, None),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_configs_give_the_numbers_of_eager_attention(case: str) -> None:
    name, sizes, kind = UNUSUAL[case]
    model = tiny(name, sizes, kind)
    inputs = unusual_inputs(name, model, sizes)
    layers = {site for site, _ in find_attention(model).layout}
    with capture(model) as record, torch.no_grad():
        actual = model(**inputs)[0]
    with torch.no_grad():
        assert_near(actual, twin(model)(**inputs)[0], 1e-6)
    assert {site for site, _ in record.calls} == layers
    for site, layer in record.calls:
        assert_zero_gate_is_zero_slice(model, inputs, HeadId(site, layer, 1))


def unusual_inputs(name: str, model: Any, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    inputs = inputs_of(BY_NAME[name])
    classifier = "Classification" in type(model).__name__
    if classifier or not model.config.is_encoder_decoder:
        inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    inputs["input_ids"] = inputs["input_ids"] % sizes["vocab_size"]
    if classifier and name == "bart":
        inputs["input_ids"][:, -1] = model.config.eos_token_id  # it classifies at the end of the sentence
    return inputs


def assert_zero_gate_is_zero_slice(model: Any, inputs: dict[str, torch.Tensor], head: HeadId) -> None:
    without_head = silence(twin(model), [head])
    with torch.no_grad(), gated(model, [head]):
        actual = model(**inputs)[0]
    with torch.no_grad():
        assert_near(actual, without_head(**inputs)[0], 1e-6)


@pytest.mark.parametrize("kind", ["UMT5EncoderModel", "UMT5ForTokenClassification"])
def test_an_encoder_whose_config_says_that_there_is_a_decoder(kind: str) -> None:
    """The encoder of UMT5 alone (a text encoder of other models) keeps `is_encoder_decoder`."""
    model, ids = tiny("umt5", T5, kind), torch.tensor([[5, 7, 11, 13]])
    assert model.config.is_encoder_decoder and {site for site, _ in find_attention(model).layout} == {Site.ENCODER_SELF}
    with capture(model), torch.no_grad():
        actual = model(ids)[0]
    with torch.no_grad():
        assert_near(actual, twin(model)(ids)[0], 1e-6)
    assert not hugging_face(model).two_sided


def test_an_encoder_decoder_made_of_two_berts_has_three_sites() -> None:
    model, inputs = two_berts(), inputs_of(BY_NAME["bart"])
    inputs["decoder_input_ids"] %= 89
    sites = find_attention(model)
    assert [len(sites.at(site)) for site in Site] == [2, 3, 3]
    with capture(model) as record:
        actual = logits(model, inputs)
    output = twin(model)(**inputs, output_attentions=True)
    assert_near(actual, output.logits.detach(), 1e-6)
    assert_near(record[Site.CROSS, 2]["weights"], output.cross_attentions[2].detach(), 1e-6)
    assert_zero_gate_is_zero_slice(model, inputs, HeadId(Site.CROSS, 2, 1))
    assert_zero_gate_is_zero_slice(model, inputs, HeadId(Site.ENCODER_SELF, 0, 1))


def test_the_probe_leaves_ids_with_a_meaning_out_where_it_can() -> None:
    for architecture in (BY_NAME["roberta"], BY_NAME["m2m_100"]):
        ids = probe_inputs(build(architecture))["input_ids"]
        special = [architecture.sizes[f"{name}_token_id"] for name in ("pad", "bos", "eos")]
        assert not torch.isin(ids, torch.tensor(special)).any()
        assert ids.unique().numel() == ids.numel()
    two_ends = probe_inputs(tiny("llama", {**LLAMA, "eos_token_id": [2, 6]}))["input_ids"]
    assert not torch.isin(two_ends, torch.tensor([0, 1, 2, 6])).any()


@pytest.mark.parametrize(
    ("name", "heads"), [("lfm2", [0, 6]), ("qwen3_next", [0, 0, 0, 6]), ("recurrent_gemma", [0, 0, 6])]
)
def test_layers_below_the_first_attention_count_in_a_run(
    name: str, heads: list[int], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a model whose first layers have no attention: its figures once looked for layer 1 among one layer."""
    draw_nothing(monkeypatch)
    (tmp_path / "text").write_text("ah bi ch\nbi ah ch bi\n", encoding="utf-8")
    sharpen(catalogue()[name].model()).save_pretrained(tmp_path / "model")
    words.tokenizer([], []).save_pretrained(tmp_path / "model")
    options = ["--only", "confidence,similarity", "--bootstrap", 100]
    result = command("analyze", tmp_path / "model", "--source", tmp_path / "text", "--out", tmp_path / "run", *options)
    assert result[0] == 0, result
    run = Study.open(tmp_path / "run")
    assert run.layout == {"decoder-self": heads} and set(run.heads["layer"]) == {len(heads) - 1}
    assert (tmp_path / "run" / "figures" / "heads.png").is_file()
    assert f"Layers with attention: decoder-self: {len(heads) - 1}" in command("show", tmp_path / "model")[1]


@pytest.mark.parametrize(("width", "implementation"), [(11, "eager"), (12, "grouped_mm")])
def test_experts_of_any_width_open(width: int, implementation: str, tmp_path: Path) -> None:
    """torch multiplies all experts at once if rows are multiples of 16 bytes, which 11 numbers of float32 are not."""
    entry = catalogue()["qwen3_moe"]
    sizes = entry.sizes | {"hidden_size": 44, "moe_intermediate_size": width, "experts_implementation": None}
    model = sharpen(replace(entry, sizes=sizes).model())
    if implementation == "eager":
        with pytest.raises(CheckpointError, match=r'; call model\.set_experts_implementation\("eager"\) first$'):
            find_attention(model)
    model.save_pretrained(tmp_path)
    loaded_model: Any = open_checkpoint(str(tmp_path), device="cpu").model
    assert loaded_model.config._experts_implementation == implementation
    model.set_experts_implementation("eager")
    ids = torch.tensor([[5, 7, 11, 13]])
    assert_near(logits(loaded_model, {"input_ids": ids}), logits(model, {"input_ids": ids}), 1e-5)
