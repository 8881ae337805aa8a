"""fairseq and MHR checkpoints: every layout gives fairseq's logits; what does not fit is named in one line."""

import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.config import Companions
from headscope.errors import CheckpointError, DataError, HeadscopeError, OutputError
from headscope.formats.base import open_checkpoint
from headscope.formats.fairseq.config import ARCHITECTURES, Settings, read_settings, transformer_config
from headscope.formats.fairseq.format import FAIRSEQ, FairseqCheckpoint
from headscope.formats.pickles import read_tensors, read_torch
from headscope.heads import Site
from headscope.model.native.beams import SearchConfig
from headscope.model.native.transformer import fold_mixings
from headscope.model.taps import capture
from tests.makers.fairseq_layouts import OPTIONS, PREVIOUS, SOURCE, TIED, logits_of
from tests.makers.shared import LFS_POINTER
from tests.oracles import fairseq
from tests.oracles.capturing import weights_of

pytestmark = pytest.mark.slow


def load(path: Path, **options: Any) -> FairseqCheckpoint:
    checkpoint = open_checkpoint(str(path), device="cpu", dtype=options.pop("dtype", "float64"), **options)
    assert isinstance(checkpoint, FairseqCheckpoint)
    return checkpoint


def assert_same_logits(logits: torch.Tensor, options: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    expected = fairseq.logits(options, weights, None if fairseq.is_lm(options) else SOURCE, PREVIOUS)
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_fairseq(tmp_path: Path, name: str) -> None:
    weights = fairseq.state(OPTIONS[name])
    checkpoint = load(fairseq.write(tmp_path / "c.pt", OPTIONS[name], weights))
    assert (checkpoint.format, checkpoint.model_type) == ("fairseq", OPTIONS[name]["arch"])
    assert_same_logits(logits_of(checkpoint), OPTIONS[name], weights)


@pytest.mark.parametrize("carrier", ["args", "cfg", "nested", "namespace", "omegaconf"])
@pytest.mark.parametrize("name", ["pre-norm, learned positions", "unequal sides", "lm"])
def test_options_stand_in_args_or_in_any_kind_of_cfg(tmp_path: Path, carrier: str, name: str) -> None:
    weights = fairseq.state(OPTIONS[name])
    checkpoint = load(fairseq.write(tmp_path / "c.pt", OPTIONS[name], weights, carrier=carrier))
    assert_same_logits(logits_of(checkpoint), OPTIONS[name], weights)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["post-norm, untied, gelu", "post-norm, tied", "no final norm"])
def test_files_of_old_versions_are_upgraded(tmp_path: Path, name: str, legacy: bool) -> None:
    options = OPTIONS[name]
    weights = fairseq.state(options)
    if name == "no final norm":  # the first versions had none, whatever the options say
        weights = OrderedDict((key, w) for key, w in weights.items() if not key.startswith("encoder.layer_norm"))
        options = {key: value for key, value in options.items() if key != "no_decoder_final_norm"}
    old = fairseq.as_version_05(fairseq.fuse_qkv(weights))
    if name == "post-norm, tied":
        del old["decoder.embed_out"]
    assert_same_logits(logits_of(load(fairseq.write(tmp_path / "c.pt", options, old, legacy=legacy))), options, weights)


@pytest.mark.parametrize("alphas", [("all",), ("encoder.1.self_attn", "decoder.0.encoder_attn")])
def test_alphas_mix_heads_and_absent_ones_are_the_identity(tmp_path: Path, alphas: tuple[str, ...]) -> None:
    options = fairseq.BASE | TIED
    weights = fairseq.state(options, alphas=alphas)
    for key in weights:
        if key.endswith("alphas_bias"):
            weights[key] = torch.full_like(weights[key], 7.0)  # stored, never used
    checkpoint = load(fairseq.write(tmp_path / "c.pt", options, weights))
    assert_same_logits(logits_of(checkpoint), options, weights)
    model = fold_mixings(checkpoint.model)
    assert not any("mixing" in key for key in model.state_dict())
    previous = torch.tensor([PREVIOUS])
    torch.testing.assert_close(model(torch.tensor([SOURCE]), previous)[0], logits_of(checkpoint), rtol=0, atol=1e-10)


def test_the_forks_defaults_are_read_from_its_alphas(tmp_path: Path) -> None:
    """The fork's transformer_iwslt_de_en has twice fairseq's heads; a file may omit their number."""
    options = fairseq.BASE | TIED
    weights = fairseq.state(options, alphas=("all",))
    partial_options = {key: value for key, value in options.items() if not key.endswith("attention_heads")}
    checkpoint = load(fairseq.write(tmp_path / "c.pt", partial_options, weights))
    assert_same_logits(logits_of(checkpoint), options, weights)
    FAIRSEQ.save(checkpoint, tmp_path / "again")
    assert vars(read_torch(tmp_path / "again" / "c.pt")["args"])["encoder_attention_heads"] == 3


def test_half_precision_is_widened_on_a_cpu_and_written_back(tmp_path: Path) -> None:
    options = fairseq.BASE | TIED
    weights = {key: tensor.half() for key, tensor in fairseq.state(options).items()}
    checkpoint = load(fairseq.write(tmp_path / "c.pt", options, weights), dtype="auto")
    assert checkpoint.dtype == torch.float32
    FAIRSEQ.save(checkpoint, tmp_path / "again")
    assert {tensor.dtype for tensor in _tensors(tmp_path / "again" / "c.pt").values()} == {torch.float16}


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_the_name_of_an_architecture_fills_in_what_the_file_leaves_out(arch: str) -> None:
    settings = Settings("c.pt", {"share_decoder_input_output_embed": True}, arch, True)
    heads = settings.number("decoder_attention_heads")
    wide = {f"{side}_{name}": 2 * heads for side in ("encoder", "decoder") for name in ("embed_dim", "attention_heads")}
    options = {**fairseq.BASE, "arch": arch, **wide}
    options |= {f"{side}_normalize_before": settings.on(f"{side}_normalize_before") for side in ("encoder", "decoder")}
    if fairseq.is_lm(options):
        options |= {"decoder_normalize_before": True, "decoder_learned_pos": settings.on("decoder_learned_pos")}
    config = transformer_config(settings, fairseq.state(options))
    assert config.decoder.self_heads == (heads, heads) and config.decoder.d_head == 2
    assert heads == HEADS.get(arch, 16 if "big" in arch else 8)
    big = {"transformer_wmt_en_de_big_t2t": "pre"}.get(arch, "pre" if fairseq.is_lm(options) else "post")
    assert config.decoder.norm == big


HEADS = {
    **{"transformer_tiny": 2, "transformer_iwslt_de_en": 4, "transformer_lm_gpt": 12, "transformer_lm_gpt2_tiny": 1},
    **{"transformer_lm_gpt2_small": 16, "transformer_lm_gpt2_medium": 20, "transformer_lm_gpt2_big": 25},
    **{f"transformer_lm_gpt3_{n}": c for n, c in zip(["small", "medium", "large", "xl", "2_7", "6_7", "13", "175"],
                                                     (12, 16, 16, 32, 32, 32, 40, 96), strict=True)},
}  # fmt: skip
"""Numbers of heads in fairseq's tables that are neither 8 nor the 16 of big models."""


def load_mhr(oracles: Path, **companions: Path) -> FairseqCheckpoint:
    folder = oracles / "mhr"
    files: dict[str, Any] = {"dicts": folder / "data", **companions}
    return load(folder / "alpha" / "checkpoint_best.pt", dtype="auto", companions=Companions(**files))


@pytest.fixture(scope="module")
def mhr(shared: Path) -> FairseqCheckpoint:
    """The fork's checkpoint with its BPE codes."""
    return load_mhr(shared / "oracles", bpe=shared / "oracles" / "mhr" / "data" / "codes")


def test_mhr_logits_and_weights(oracles: Path) -> None:
    mhr, folder = load_mhr(oracles), oracles / "mhr" / "alpha" / "oracle"
    oracle, attention = np.load(folder / "tf_logits.npz"), np.load(folder / "tf_attention.npz")
    sites = {Site.ENCODER_SELF: "encoder.{}.self_attn", Site.DECODER_SELF: "decoder.{}.self_attn",
             Site.CROSS: "decoder.{}.enc_attn"}  # fmt: skip
    numbers = [int(name.removeprefix("src_")) for name in oracle.files if name.startswith("src_")]
    assert len(numbers) >= 2
    for n in numbers:
        with capture(mhr.model) as records, torch.no_grad():
            logits = mhr.model(torch.from_numpy(oracle[f"src_{n}"])[None], torch.from_numpy(oracle[f"prev_{n}"])[None])
        np.testing.assert_allclose(logits[0].numpy(), oracle[f"logits_{n}"], rtol=0, atol=1e-5)
        for site, name in sites.items():
            for layer, weights in enumerate(weights_of(records, site)):
                np.testing.assert_allclose(weights[0], attention[f"{n}/{name.format(layer)}"], rtol=0, atol=1e-5)


def test_mhr_translations_are_the_forks_own(mhr: FairseqCheckpoint, shared: Path) -> None:
    """200 sentences from raw text, beam 5: text, score and BLEU of the fork's generate log."""
    import sacrebleu

    folder = shared / "oracles" / "mhr"
    log: dict[str, dict[int, str]] = {"H": {}, "P": {}}
    for line in (folder / "alpha/generate/generate-base.log").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([HP])-(\d+)\t(.*)", line):
            log[match[1]][int(match[2])] = match[3]
    lines = (folder / "data/test.de").read_text(encoding="utf-8").splitlines()
    order = sorted(range(len(lines)), key=lambda n: len(lines[n]))
    assert mhr.target is not None
    texts = [""] * len(lines)
    for first in range(0, len(order), 50):
        group = order[first : first + 50]
        for n, beam in zip(group, mhr.translate([lines[n] for n in group]), strict=True):
            score, _, text = log["H"][n].partition("\t")
            texts[n] = mhr.target.decode(beam[0].ids)
            assert texts[n] == text
            assert beam[0].score / math.log(2) == pytest.approx(float(score), abs=1e-5)
    references = (folder / "data/test.en").read_text(encoding="utf-8").splitlines()
    bleu = sacrebleu.corpus_bleu(texts, [references], tokenize="none", smooth_method="none", force=True)
    assert f"BLEU4 = {bleu.score:.2f}," in (folder / "alpha/generate/generate-base.log").read_text(encoding="utf-8")


def test_mhr_pieces_are_the_files_own(mhr: FairseqCheckpoint, shared: Path) -> None:
    folder = shared / "oracles" / "mhr" / "data"
    raw, split = ((folder / f"test{part}.de").read_text(encoding="utf-8").splitlines() for part in ("", ".bpe"))
    assert mhr.source is not None
    assert [[piece.text for piece in mhr.source.splitter.split(line)] for line in raw] == [x.split() for x in split]


def test_mhr_file_is_written_again_as_it_was(oracles: Path, tmp_path: Path) -> None:
    mhr = load_mhr(oracles)
    FAIRSEQ.save(mhr, tmp_path / "again")
    copy = tmp_path / "again" / Path(mhr.path).name
    before, after = _tensors(Path(mhr.path)), _tensors(copy)
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert vars(read_torch(Path(mhr.path))["args"]) == vars(read_torch(copy)["args"])


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path, read_torch(path)["model"])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("version", ["modern", "ancient"])
def test_save_and_load_is_the_identity(tmp_path: Path, name: str, version: str) -> None:
    weights = fairseq.state(OPTIONS[name])
    if version != "modern" and name != "unequal sides":
        weights = fairseq.fuse_qkv(weights)
    if version == "ancient" and "norm" not in name:
        weights = fairseq.as_version_05(weights)
    checkpoint = load(fairseq.write(tmp_path / "c.pt", OPTIONS[name], weights), dtype="auto")
    FAIRSEQ.save(checkpoint, tmp_path / "again")
    after = _tensors(tmp_path / "again" / "c.pt")
    assert list(after) == list(weights)
    assert all(torch.equal(weights[key], after[key]) for key in weights)
    assert torch.equal(logits_of(load(tmp_path / "again" / "c.pt", dtype="auto")), logits_of(checkpoint))
    with pytest.raises(OutputError, match=r"c\.pt.*--force"):
        FAIRSEQ.save(checkpoint, tmp_path / "again")


def test_fewer_heads_are_read_from_the_size_of_the_queries(tmp_path: Path) -> None:
    weights = fairseq.state(fairseq.BASE, alphas=("decoder.1.self_attn",))
    name, keep = "decoder.1.self_attn", slice(4, 12)  # without its first head of width 4
    for part in "qkv":
        for kind in ("weight", "bias"):
            key = f"decoder.layers.1.self_attn.{part}_proj.{kind}"
            weights[key] = weights[key][keep].clone()
    key = "decoder.layers.1.self_attn.out_proj.weight"
    weights[key] = weights[key][:, keep].clone()
    weights["decoder.layers.1.self_attn.alphas"] = weights["decoder.layers.1.self_attn.alphas"][1:, 1:].clone()
    checkpoint = load(fairseq.write(tmp_path / "c.pt", fairseq.BASE, weights))
    assert checkpoint.layout[Site.DECODER_SELF, 1] == 2, name
    assert checkpoint.model.config.decoder.self_heads == (3, 2)
    FAIRSEQ.save(checkpoint, tmp_path / "again")
    after = _tensors(tmp_path / "again" / "c.pt")
    assert after["decoder.layers.1.self_attn.alphas_bias"].shape == (2, 1)
    assert torch.equal(logits_of(load(tmp_path / "again" / "c.pt", dtype="auto")), logits_of(checkpoint))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.module."])
@pytest.mark.parametrize("name", ["post-norm, tied", "lm"])
def test_a_prefix_of_all_names_is_taken_off_and_said(tmp_path: Path, name: str, prefix: str) -> None:
    weights = fairseq.state(OPTIONS[name])
    state = {prefix + key: tensor for key, tensor in weights.items()}
    with pytest.warns(UserWarning, match=f": {prefix} begins all names of weights, and is taken off$"):
        checkpoint = load(fairseq.write(tmp_path / "c.pt", OPTIONS[name], state))
    assert_same_logits(logits_of(checkpoint), OPTIONS[name], weights)


@pytest.mark.parametrize("location", ["beside", "data", "option"])
def test_dictionaries_are_found(tmp_path: Path, location: str) -> None:
    path = fairseq.write(tmp_path / "run" / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    folders = {"beside": path.parent, "data": path.parent / "some.de-en", "option": tmp_path / "else"}
    fairseq.dictionaries(folders[location])
    companions = Companions(dicts=tmp_path / "else") if location == "option" else None
    checkpoint = load(path, companions=companions)
    encoding = checkpoint.encode(["a@@ c d zzz"], side="source", limit=9)[0]
    assert encoding.ids == [4, 6, 7, 3, 2]
    assert checkpoint.encode(["c"], side="target", limit=9)[0].ids == [2, 6]
    assert checkpoint.translate(["a@@ c", "d"])[1][0].ids[-1] == 2
    assert (checkpoint.limit, checkpoint.vocabulary) == (29, fairseq.SOURCE)


MULTILINGUAL: dict[str, Any] = {"task": "translation_multi_simple_epoch", "lang_pairs": ["de-en"], "langs": "de,en"}
FROM_BART: dict[str, Any] = {"task": "translation_from_pretrained_bart", "langs": "de,en"}
# Options, the ids around a source, what a decoder reads first and is made to write; added subwords are the last ids.
REPLACING: dict[str, Any] = {"decoder_langtok": True, "lang_tok_replacing_bos_eos": True}
LANGUAGE_CASES = {
    "source": (MULTILINGUAL | {"encoder_langtok": "src", "decoder_langtok": True}, ([21], [2]), [2, 18], 2),
    "target": (MULTILINGUAL | {"encoder_langtok": "tgt"}, ([22], [2]), [2], 2),
    "langtoks": (MULTILINGUAL | {"langtoks": {"main": ("src", "tgt")}}, ([21], [2]), [2, 18], 2),
    "replaced": (MULTILINGUAL | REPLACING | {"encoder_langtok": "tgt"}, ([], [22]), [18], 2),
    "without": (MULTILINGUAL, ([], [2]), [2], 2),
    "pretrained": (FROM_BART, ([], [2, 20]), [17], 3),
}


def test_languages_that_are_given_stand_over_those_of_the_options_and_of_the_only_pair() -> None:
    args = {"arch": "transformer", **MULTILINGUAL, "source_lang": "de"}
    for source, target, languages in ((None, None, "de-en"), ("fr", None, "fr-en"), (None, "nl", "de-nl")):
        settings = read_settings("best.pt", {"args": args}, source, target)
        assert f"{settings.text('source_lang')}-{settings.text('target_lang')}" == languages


@torch.no_grad()
@pytest.mark.parametrize("kind", LANGUAGE_CASES)
def test_languages_stand_where_their_task_puts_them(tmp_path: Path, kind: str) -> None:
    """As in fairseq: before a source, as the first token of a translation, or instead of an end."""
    task, (before, after), begin, n_added = LANGUAGE_CASES[kind]
    languages = {} if kind == "pretrained" else {"source_lang": None, "target_lang": None}
    options = fairseq.BASE | languages | task
    weights = fairseq.state(options, seed=3)
    path = fairseq.write(tmp_path / "c.pt", options, weights)
    for file in fairseq.dictionaries(tmp_path).glob("dict.*.txt"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) - n_added]), encoding="utf-8")
    checkpoint = load(path)
    FAIRSEQ.save(checkpoint, tmp_path / "again")
    for model in (checkpoint, load(tmp_path / "again" / "c.pt")):
        source = [*before, 6, 7, *after]
        assert model.encode(["c d"], side="source", limit=9)[0].ids == source
        assert model.encode(["c"], side="target", limit=9)[0].ids == [*begin, 6]
        assert model.labels(["c"], limit=9) == [[*begin[1:], 6, 2]]
        ids = list(begin)
        for number, step in enumerate(range(5), start=len(begin) - 1):
            log_p = fairseq.logits(options, weights, source, ids)[-1].double().log_softmax(-1)
            log_p[1] = -torch.inf
            log_p[2] = -torch.inf if number == 0 else log_p[2]
            ids.append(int(log_p.argmax()) if step < 4 else 2)
            if ids[-1] == 2:
                break
        config = SearchConfig(beam=1, max_extra=len(begin) + 3)
        [[translation]] = model.translate(["c d"], config)
        assert list(translation.ids) == ids[1:]
        assert model.target is not None and not {"[en]", "__en__"} & set(model.target.decode(translation.ids).split())


def test_codes_split_raw_text(tmp_path: Path) -> None:
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    fairseq.dictionaries(tmp_path)
    (tmp_path / "codes").write_text("#version: 0.2\nb c</w>\n", encoding="utf-8")
    checkpoint = load(path, companions=Companions(bpe=tmp_path / "codes"))
    ids = checkpoint.encode(["ac d"], side="source", limit=9)[0].ids
    assert checkpoint.subwords(ids, side="source") == ["a@@", "c", "d", "</s>"]
    (tmp_path / "broken.model").write_bytes(b"\n\x05\xff\xfe\x00ab")
    with pytest.raises(DataError, match="SentencePiece"):
        load(path, companions=Companions(bpe=tmp_path / "broken.model"))
    with pytest.raises(DataError, match="--bpe"):
        load(path, companions=Companions(bpe=tmp_path / "none"))


def test_broken_and_foreign_dictionaries_are_named(tmp_path: Path) -> None:
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    fairseq.dictionaries(tmp_path)
    dictionary = tmp_path / "dict.de.txt"
    text = dictionary.read_text(encoding="utf-8")
    for content, message in (
        (text + "more 1\n", r"dict\.de\.txt.*24.*23"),
        (text.replace("c 88", "c"), r"line 3 of the dictionary .* is 'c'"),
        (text.replace("c 88", "d 88"), "line 4 of the dictionary .* repeats 'd'"),
    ):
        dictionary.write_text(content, encoding="utf-8")
        with pytest.raises(HeadscopeError, match=message):
            load(path)
    dictionary.write_bytes(b"\xff 1\n")
    with pytest.raises(DataError, match=r"dict\.de\.txt"):
        load(path)
    dictionary.write_text(text.replace("c 88", "<s> 0 #fairseq:overwrite"), encoding="utf-8")
    assert load(path).id_of("<s>", side="source") == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adaptive_softmax_cutoff": "100,200"}, r"adaptive_softmax_cutoff \('100,200'\)"),
        ({"quant_noise_pq": 0.1}, "quant_noise_pq"),
        ({"encoder_layers_to_keep": "0,1"}, r"encoder_layers_to_keep \('0,1'\)"),
        ({"cross_self_attention": True}, "cross_self_attention"),
        ({"max_relative_length": 8}, "max_relative_length"),
        ({"adaptive_input": True}, "adaptive_input"),
        ({"mask_layer_type": "enc-enc"}, "mask_layer_type"),
        ({"activation_fn": "mish"}, "activation_fn.*'mish'"),
        ({"arch": "lightconv"}, "arch.*'lightconv'"),
        ({"arch": None}, "arch.*None"),
        ({"arch": "transformer_mine", "encoder_attention_heads": None}, "encoder_attention_heads"),
        ({"encoder_attention_heads": 5}, "width 12.*5 encoder_attention_heads"),
        ({"encoder_attention_heads": "two"}, "encoder_attention_heads.*'two'"),
        ({"encoder_attention_heads": [[2]]}, "encoder_attention_heads"),
        ({"encoder_attention_heads": 2**62}, "encoder_attention_heads.*4611686018427387904"),
        ({"layernorm_embedding": True}, r"encoder\.embeddings\.norm"),
        ({"share_decoder_input_output_embed": True}, "output.weight.*decoder.embeddings"),
        (lambda w: w.pop("encoder.layers.0.fc2.bias"), r"missing: encoder\.layers\.0\.ffn\.outer\.bias"),
        (lambda w: w.pop("decoder.output_projection.weight"), "decoder.output_projection.weight"),
        (lambda w: w.pop("encoder.embed_tokens.weight"), "encoder.embed_tokens.weight"),
        (lambda w: w.update({"encoder.layers.0.conv.weight": torch.ones(2)}), "weights encoder"),
        (lambda w: w.update({"encoder.layers.0.fc2.bias": torch.ones(3)}), "size"),
        (lambda w: w.update({"encoder.layers.0.fc2.bias": torch.ones(12).long()}), "torch.int64"),
        (lambda w: w.clear(), "transformer_iwslt_de_en"),
    ],
)
def test_options_and_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    options, weights = dict(fairseq.BASE), fairseq.state(fairseq.BASE)
    if callable(change):
        change(weights)
    else:
        options |= change
    path = fairseq.write(tmp_path / "c.pt", options, weights)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS_POINTER.encode(), "is a Git LFS pointer and not the file itself; run `git lfs pull`"),
        (b"", "is empty; copy it again"),
        (b"<!DOCTYPE html>\n<html>", "is a web page"),
        (b"\x1f\x8b\x08\x00" + bytes(99), "is an archive; unpack it"),
        ({"q.weight": torch.ones(2)}, r"has the entries 'q.weight', and files of fairseq"),
    ],
)
def test_files_that_are_none_of_fairseq_say_what_they_are(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "model.pt"
    torch.save(content, path) if isinstance(content, dict) else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(str(path), device="cpu")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
