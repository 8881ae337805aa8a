"""`prune remove`: every format, every export, refusals, and that no file is left or changed on the way."""

import copy
import hashlib
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headscope.config.commands import TranslateOptions
from headscope.errors import CheckpointError, ConfigError
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.export.base import choose_export
from headscope.formats.base import open_checkpoint, write_checkpoint
from headscope.formats.fairseq.format import FairseqCheckpoint
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import HeadId, Site, select_heads
from headscope.model.discovery import find_attention
from headscope.model.forward import double_precision, first_sentence, max_abs_difference, reference
from headscope.model.removal_plan import RemovalPlan, plan_removal
from headscope.model.taps import masked
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal import remove, verify
from headscope.pruning.removal.record import typed_command
from tests.contracts.architectures import BY_NAME, build, inputs_of, logits
from tests.faults.cases import digests
from tests.makers.modules import ROOT
from tests.makers.removals import remove_heads
from tests.makers.shared import Command
from tests.oracles import checkpoints, fairseq, native

pytestmark = pytest.mark.slow

REMOVED = "encoder-self.0.*,decoder-self.0.1,decoder-self.2.0,cross.0.2,cross.2.0"


def test_a_card_has_the_command_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b\n", encoding="utf-8")
    text, other = tmp_path / "text", str(tmp_path / "text")
    how: dict[str, Any] = {"compensate": "least-squares", "damping": 0.5, "sequential": True, "check": (other, other)}
    config = RemoveConfig(checkpoint="models/small", heads="cross.0.*", out=tmp_path, source=text, **how)
    assert typed_command(config) == (
        "prune remove small --source text --check text,text --heads 'cross.0.*' "
        "--compensate least-squares --set damping=0.5 --sequential"
    )


def save_native(folder: Path, **options: Any) -> Path:
    """A native checkpoint of prime sizes in float64."""
    NATIVE.save(checkpoints.small(**options), folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"self_mixing": "alpha.v1", "norm": "pre", "final_norm": True},
        {"head_input": "slice", "d_model": 12, "slices": 4, "model": {"tie_output": True}},
        {"head_input": "slice", "d_model": 12, "shared_qkv": True},
    ],
    ids=str,
)
def test_native_shrunk_equals_masked_sentence_by_sentence(tmp_path: Path, options: dict[str, Any]) -> None:
    intact = checkpoints.small(**options)
    NATIVE.save(intact, tmp_path / "whole")
    removal = remove_heads(tmp_path / "whole", tmp_path / "small", REMOVED)
    small = open_checkpoint(str(tmp_path / "small"))
    assert isinstance(small, TransformerCheckpoint) and small.format == removal.record["output"]["format"] == "native"
    assert (small.model.config.decoder.self_heads, small.model.config.decoder.cross_heads) == ((1, 0, 2), (2, 2, 0))
    assert small.model.config.encoder is not None and small.model.config.encoder.self_heads == (0, 2)
    source, target, source_mask, target_mask = native.texts()
    heads = select_heads(REMOVED, intact.layout)
    with torch.no_grad(), masked(intact.model, heads):
        expected = intact.model(source, target, source_mask=source_mask, target_mask=target_mask)
    for row in range(3):
        n, m = int(source_mask[row].sum()), int(target_mask[row].sum())
        actual = native.logits(small.model, source[row, :n].tolist(), target[row, :m].tolist())
        torch.testing.assert_close(actual, expected[row, :m], rtol=0, atol=1e-10)
    with masked(intact.model, heads):
        expected_texts = intact.translations(checkpoints.SOURCES, TranslateOptions(beam=3))
    texts = small.translations(checkpoints.SOURCES, TranslateOptions(beam=3))
    assert [beam[0].text for beam in texts] == [beam[0].text for beam in expected_texts]
    verification = removal.record["verified"]
    assert verification["difference"] <= 1e-10 and verification["searched"] == verification["searches"] == 8


def test_a_decoder_alone_is_shrunk(tmp_path: Path) -> None:
    path = save_native(tmp_path / "whole", decoder_only=True)
    removal = remove_heads(path, tmp_path / "small", "decoder-self.0.1,decoder-self.1.*")
    assert removal.record["verified"]["difference"] <= 1e-10 and removal.record["verified"]["cached"] is not None
    assert open_checkpoint(str(tmp_path / "small")).layout == {(Site.DECODER_SELF, 0): 2, (Site.DECODER_SELF, 1): 0}


@pytest.mark.parametrize("alphas", [(), ("encoder.0.self_attn", "decoder.1.encoder_attn")])
def test_fairseq_and_mhr_files_keep_their_format(tmp_path: Path, alphas: tuple[str, ...]) -> None:
    options = fairseq.BASE | {"share_decoder_input_output_embed": True}
    weights = fairseq.state(options, alphas=alphas)
    assert sum(key.endswith("alphas") for key in weights) == len(alphas)
    path = fairseq.write(tmp_path / "in" / "best.pt", options, weights)
    fairseq.dictionaries(tmp_path / "in")
    before = digests(tmp_path / "in")
    removed = "encoder-self.0.1,encoder-self.1.*,cross.1.0,cross.1.2"
    removal = remove_heads(path, tmp_path / "out", removed, dtype="float64")
    assert (removal.record["output"]["format"], removal.path) == ("fairseq", tmp_path / "out" / "best.pt")
    assert digests(tmp_path / "in") == before
    small = open_checkpoint(str(removal.path), dtype="float64")
    assert isinstance(small, FairseqCheckpoint) and small.target is not None
    with pytest.raises(CheckpointError, match=r"removal, pruning.json\), .*give one that lies in it: .*out/best\.pt$"):
        open_checkpoint(str(tmp_path / "out"))
    assert not any("alphas" in key for key in small.origin.keys)
    notes = [note for note in removal.record["notes"] if "warning: " not in note]  # that the vocabulary lacks subwords
    assert len(notes) == (2 if alphas else 1) and "open it with headscope" in notes[-1]
    state = {key: value.double() for key, value in weights.items()}
    zero_heads = {"encoder.layers.0.self_attn": [1], "encoder.layers.1.self_attn": [0, 1, 2]}
    for name, heads in (zero_heads | {"decoder.layers.1.encoder_attn": [0, 2]}).items():
        for head in heads:  # values of zero: the context is zero before any mixing
            state[f"{name}.v_proj.weight"][4 * head : 4 * head + 4] = 0
            state[f"{name}.v_proj.bias"][4 * head : 4 * head + 4] = 0
    source, previous = [5, 9, 4, 3, 17, 2], [2, 7, 4, 12, 3]
    expected = fairseq.logits(options, state, source, previous)
    with torch.no_grad():
        actual = small.model(torch.tensor([source]), torch.tensor([previous]))[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # saved in single precision, as the file was


def save_plain(folder: Path, name: str) -> Path:
    build(BY_NAME[name]).save_pretrained(folder)
    return folder


def test_masked_export_keeps_its_size_and_takes_any_heads(tmp_path: Path) -> None:
    path = save_plain(tmp_path / "llama", "llama")
    heads = "decoder-self.0.1,decoder-self.1.0,decoder-self.1.1,decoder-self.1.5"
    with pytest.raises(ConfigError, match="group 0 keeps 2, group 1 keeps 3"):
        remove_heads(path, tmp_path / "small", heads)
    removal = remove_heads(path, tmp_path / "small", heads, export=("masked",))
    assert removal.record["before"]["parameters"] == removal.record["after"]["parameters"]
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    intact, inputs = open_checkpoint(str(path)).model, inputs_of(BY_NAME["llama"])
    with masked(intact, removal.removed):
        torch.testing.assert_close(logits(small, inputs), logits(intact, inputs), rtol=0, atol=1e-4)
    columns = load_file(tmp_path / "small" / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert not columns[:, 10:20].any() and columns[:, :10].all()


def test_matrices_that_are_folded_in_are_rounded_as_the_file_stores_weights(tmp_path: Path) -> None:
    """fairseq writes half precision, which a CPU widens; weights with a matrix folded in are no longer of that type."""
    weights = fairseq.state(fairseq.BASE, alphas=("encoder.0.self_attn",))
    path = fairseq.write(tmp_path / "in" / "best.pt", fairseq.BASE, {key: x.half() for key, x in weights.items()})
    fairseq.dictionaries(tmp_path / "in")
    removal = remove_heads(path, tmp_path / "out", "encoder-self.0.1")
    assert any("rounded to float16, as the checkpoint stores them" in note for note in removal.record["notes"])
    assert removal.record["verified"]["reloaded"] is not None and removal.record["verified"]["reloaded"] <= 1e-6


@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_what_is_only_rounding_is_settled_in_float64(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says by how much each model rounds; a model that computes something else is refused as before."""
    monkeypatch.setitem(verify.TOLERANCE, torch.float32, 1e-12)
    build(BY_NAME[kind]).save_pretrained(tmp_path / "whole")
    checkpoint = open_checkpoint(str(tmp_path / "whole"), device="cpu")
    group, *_, other = GateLayout(checkpoint.attention_sites).units
    removal = remove_heads(tmp_path / "whole", tmp_path / "small", ",".join(map(str, group)))
    rounding = removal.record["verified"]["rounding"]
    assert rounding is not None, removal.record
    assert rounding["difference"] <= 1e-9 < rounding["masked"] < 1e-5 and 0 < rounding["smaller"] < 1e-5
    note = f"in float64 both models' logits differ by {rounding['difference']:.1e}"
    assert any(note in remark for remark in removal.record["notes"])
    data = read_input_texts(checkpoint, None, None, sentences=4)
    plan = plan_removal(checkpoint.attention_sites, group)
    small = choose_export(None, checkpoint).build(checkpoint, plan)
    with pytest.raises(CheckpointError, match="computes something else"):
        verify.compare(checkpoint, small, other, data)
    double, line = checkpoint.with_model(copy.deepcopy(checkpoint.model).double()), first_sentence(data.feeds[0])
    single, wide = reference(checkpoint, group, line).double(), reference(double, group, line)
    result = verify.compare(checkpoint, small, group, InputTexts(data.sources, data.name, (line,))).rounding
    assert result is not None and result.masked == pytest.approx(max_abs_difference(single, wide), rel=1e-9)


def test_double_precision_gives_weights_back_as_they_were() -> None:
    """Several types and tied weights, also after an error; inside, all floating-point weights are float64."""
    model = build(BY_NAME["gpt2"]).bfloat16()
    model.transformer.ln_f.float()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises(KeyError), double_precision(model):
        assert {values.dtype for values in model.parameters()} == {torch.float64}
        raise KeyError
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(values.dtype == before[name].dtype for name, values in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_every_weight_keeps_its_own_type(tmp_path: Path) -> None:
    """Norms and biases in single precision among halves, of a model with and without its head."""
    heads = "decoder-self.0.0,decoder-self.0.1,decoder-self.0.2"
    for name, prefix in (("whole", "model."), ("bare", "")):
        build(BY_NAME["llama"]).bfloat16().save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = {key: values.float() if "norm" in key else values for key, values in load_file(file).items()}
        if not prefix:
            weights = {key.removeprefix("model."): values for key, values in weights.items()}
        save_file(weights, file, {"format": "pt"})
        removal = remove_heads(tmp_path / name, tmp_path / f"small-{name}", heads)
        state = load_file(tmp_path / f"small-{name}" / "model.safetensors")
        assert {key.removeprefix("model."): values.dtype for key, values in state.items()} == {
            key.removeprefix("model."): values.dtype for key, values in weights.items()
        }
        assert removal.record["after"]["bytes"] == sum(values.nbytes for values in state.values())
        assert removal.record["before"]["bytes"] == sum(values.nbytes for values in weights.values())


def test_opening_runs_no_code_of_the_folder(tmp_path: Path) -> None:
    remove_heads(save_plain(tmp_path / "bert", "bert"), tmp_path / "small", "encoder-self.0.1")
    marker = tmp_path / "ran"
    (tmp_path / "small" / "modeling_headscope.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    assert open_checkpoint(str(tmp_path / "small")).layout[Site.ENCODER_SELF, 0] == 2
    assert not marker.exists()


HOSTILE: list[Any] = [
    7,
    {"shapes": {"encoder.layer.0.attention.self.query.weight": [10**9, 15]}},
    {"shapes": {"encoder.layer.0.attention.self.query.weight": [-1, 15]}},
    {"shapes": {"encoder.layer.0.attention.self.query.weight": ["a", 15]}},
    {"shapes": {"encoder.layer.0.attention.self.query.forward": [1]}},
    {"shapes": []},
    {"attributes": {"encoder.layer.0.attention.self": {"forward": 3}}},
    {"attributes": {"encoder.layer.0.attention.self": {"num_attention_heads": 10**9}}},
    {"attributes": {"encoder.layer.0.attention.self": 3}},
    {"zeros": {"encoder.layer.0.attention.self.query": 10**12}},
    {"zeros": {"encoder": 5}},
    {"configs": {"encoder.layer.0.attention.self": {"vocab_size": 3}}},
    {"configs": {"encoder.layer.0.attention.self": {"num_attention_heads": 10**9}}},
    {"empty": {"encoder.layer.0": True}},
    {"bias_heads": {"encoder.layer.0.attention.self": [0]}},
    {"bias_heads": {"encoder.layer.0.attention.self": None}},
]


@pytest.mark.parametrize("table", HOSTILE, ids=str)
def test_a_hostile_table_is_refused_in_one_line(tmp_path: Path, table: Any) -> None:
    folder = save_plain(tmp_path / "bert", "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"narrowed": table}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_savings_are_those_counted_by_hand(tmp_path: Path) -> None:
    """BERT, d = 15, heads of width 5: 4 matrices and 3 biases a head; products of scores and contexts."""
    path = checkpoints.save_model(tmp_path / "bert", "bert")
    (tmp_path / "text").write_text("aha bhb\ncic\n")
    removal = remove_heads(path, tmp_path / "small", "encoder-self.0.0,encoder-self.1.*", source=tmp_path / "text")
    before, after = (removal.record[when] for when in ("before", "after"))
    assert (before["attention_heads"], after["attention_heads"]) == (6, 2)
    heads = 4
    assert before["parameters"] - after["parameters"] == heads * (4 * 15 * 5 + 3 * 5)
    assert before["bytes"] - after["bytes"] == 4 * heads * (4 * 15 * 5 + 3 * 5)
    intact = open_checkpoint(str(path))
    longest = max(len(text.ids) for text in intact.encode(["aha bhb", "cic"], side="source", limit=99))
    tokens = 2 * longest
    assert before["flops"] - after["flops"] == heads * 2 * (tokens * 4 * 15 * 5 + 2 * tokens * longest * 5)
    assert before["cache"] == after["cache"] == 0


def test_the_record_says_what_went_and_why(tmp_path: Path) -> None:
    path = save_native(tmp_path / "whole")
    ranking = tmp_path / "ranking.txt"
    ranking.write_text("encoder-self.0.1\ncross.0.2\n")
    removal = remove_heads(path, tmp_path / "small", str(ranking), rounds=1, batch=3)
    record = json.loads((tmp_path / "small" / "pruning.json").read_text())
    assert sorted(record["removed"]) == ["cross.0.2", "encoder-self.0.1"]
    assert record["kept"]["encoder-self"] == {"0": [0, 2], "1": [0, 1]}
    assert record["heads"]["sha256"] == hashlib.sha256(ranking.read_bytes()).hexdigest()
    assert record["source"] == {"path": str(path), "format": "native", "digest": open_checkpoint(str(path)).digest}
    assert record["verified"]["difference"] <= 1e-10 and record["verified"]["reloaded"] <= 1e-9
    times = {(time["what"], time["sentences"]) for time in record["times"]}
    assert times == {("forward", 1), ("forward", 3), ("beam search", 1), ("beam search", 8)}
    assert record["signature"] == str(removal.signature) and "heads:14/16" in record["signature"]


def test_the_command_prints_proof_savings_and_times(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = checkpoints.save_model(tmp_path / "bart", "bart")
    arguments = ("--heads", "cross.0.1,encoder-self.1.*", "--max-sentences", 8, "--set", "batch=4", "--rounds")
    walks: list[set[str]] = []  # files from the command to the cut
    select = torch.Tensor.index_select

    def record_walk(values: torch.Tensor, *index: Any) -> torch.Tensor:
        stack = [frame.filename for frame in traceback.extract_stack()]
        if stack[-2].endswith("huggingface/shrink.py"):
            walks.append({name for name in stack if Path(name).is_relative_to(ROOT / "headscope")})
        return select(values, *index)

    monkeypatch.setattr(torch.Tensor, "index_select", record_walk)
    status, out, _ = command("prune", "remove", path, "--out", tmp_path / "small", *arguments, 1, "--verbose")
    assert status == 0 and walks and max(map(len, walks)) <= 8, "a reader should not have to open more"
    monkeypatch.setattr(torch.Tensor, "index_select", select)
    for phrase in ("parameters", "FLOPs of the text", "cache a token", "forward ", "beam search"):
        assert phrase in out.split("Checked:")[0], "in the first table"
    assert "Checked: outputs equal those of the model with these heads off" in out
    assert "8 of 8 results are the same" in out
    status, out, _ = command("prune", "remove", path, "--out", tmp_path / "other", *arguments, 0, "--json")
    assert status == 0 and json.loads(out)["record"]["after"]["attention_heads"] == 22


def test_a_model_that_computes_something_else_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_native(tmp_path / "whole")

    def plan_wrong(sites: Any, heads: list[HeadId], **options: Any) -> Any:
        right = plan_removal(sites, heads, **options)
        wrong = plan_removal(sites, [HeadId(Site.CROSS, 0, 1)], **options)
        return RemovalPlan(right.removed, wrong.kept, wrong.groups)

    monkeypatch.setattr(remove, "plan_removal", plan_wrong)
    with pytest.raises(CheckpointError):
        remove_heads(path, tmp_path / "small", "cross.0.0")
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("kind", ["transformer", "huggingface"])
def test_files_that_say_something_else_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The written files are checked separately: the model in memory is right, its copy on disk is not."""
    path = (
        save_native(tmp_path / "whole") if kind == "transformer" else checkpoints.save_model(tmp_path / "whole", "bert")
    )
    heads = "cross.0.0" if kind == "transformer" else "encoder-self.0.0"

    def write_other_weights(checkpoint: Any, folder: Path) -> Any:
        with torch.no_grad():
            next(checkpoint.model.parameters()).mul_(1.5)
        return write_checkpoint(checkpoint, folder)

    monkeypatch.setattr(remove, "write_checkpoint", write_other_weights)
    with pytest.raises(CheckpointError):
        remove_heads(path, tmp_path / "small", heads)
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]


def test_layers_that_share_a_module_lose_the_same_heads() -> None:
    sites = find_attention(build(BY_NAME["albert"]))
    with pytest.raises(ConfigError, match=r"encoder-self.*0, 1, 2"):
        plan_removal(sites, [HeadId(Site.ENCODER_SELF, 1, 0)])
    plan = plan_removal(sites, [HeadId(Site.ENCODER_SELF, layer, 0) for layer in range(3)])
    assert plan.layout[Site.ENCODER_SELF, 0] == 2
