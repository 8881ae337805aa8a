"""Every architecture without some heads: the same numbers as masked, in memory, reloaded, and without headscope."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from headscope.evaluation.model_inputs import read_input_texts
from headscope.export.base import choose_export
from headscope.formats.base import write_checkpoint
from headscope.heads import HeadId, Layout
from headscope.model.discovery import find_attention
from headscope.model.projections import projections
from headscope.model.removal_plan import plan_removal
from headscope.pruning.removal.verify import verify
from tests.contracts.architectures import BY_NAME, Architecture, assert_near, build, every, inputs_of, logits, silence
from tests.contracts.catalogue import TASKS
from tests.makers import wrappers

LENGTHS, TARGETS = (7, 4, 6), (3, 5, 4)


def choose_ragged(architecture: Architecture, layout: Layout) -> list[HeadId]:
    """Different heads and different numbers of heads in every layer, but whole groups; ALBERT's layers share all."""
    groups = architecture.sizes.get("num_key_value_heads")
    head_ids = []
    for (site, layer), count in layout.items():
        if architecture.name == "albert":
            heads = [1]
        elif groups is None:
            heads = [layer % count, (layer + 1) % count][: 1 + layer % 2]
        elif layer % 2:
            heads = list(range(count // groups)) if groups > 1 else [0, 3]
        else:
            heads = [group * (count // groups) + (group + 1) % (count // groups) for group in range(groups)]
        head_ids += [HeadId(site, layer, head) for head in heads]
    return head_ids


def choose_empty(architecture: Architecture, layout: Layout) -> list[HeadId]:
    """All heads of the first layer of each site (of all layers if they are one module)."""
    all_layers = architecture.name == "albert"
    return [
        HeadId(site, layer, head)
        for (site, layer), count in layout.items()
        if all_layers or not layer
        for head in range(count)
    ]


def choose_both(architecture: Architecture, layout: Layout) -> list[HeadId]:
    """All heads of the first layer of each site, and different ones of the others."""
    if architecture.name == "albert":
        return choose_ragged(architecture, layout)
    later = [head for head in choose_ragged(architecture, layout) if head.layer]
    return choose_empty(architecture, layout) + later


WAYS = {"ragged": choose_ragged, "emptied": choose_empty, "both": choose_both}
FOLDERS_OF = ("bert", "albert", "modernbert", "gpt2", "llama", "gpt_oss", "t5", "vit")
WITHOUT_BIAS = ("modernbert", "llama", "qwen3", "gemma2", "gemma3_text", "mistral", "t5")
"""Architectures whose query, key and value projections have no bias by default."""
FOLDERS = [*((name, "both") for name in FOLDERS_OF), ("bert", "ragged")]


@every
def test_parameters_that_are_gone_are_those_of_the_heads(architecture: Architecture) -> None:
    """Counted from the config by hand: rows of W_Q, W_K, W_V with their biases, columns of W_O."""
    model = build(architecture)
    heads = choose_ragged(architecture, architecture.layout)
    removal = plan_removal(find_attention(model), heads)
    shrunk = choose_export(None, checkpoint := wrappers.hugging_face(model)).build(checkpoint, removal).model
    n_removed = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in shrunk.parameters())
    d = {name: size for name, size in architecture.sizes.items() if name in ("hidden_size", "n_embd", "dim", "d_model")}
    (model_width,) = d.values()
    ids: set[int] = set()
    rows = 0
    for site in find_attention(model).order:
        site_layer = (site.site, site.layer)
        weight = projections(model)[site_layer].output
        assert weight is not None
        if id(weight.weight) in ids:
            continue
        ids.add(id(weight.weight))
        n_heads, groups = site.heads - len(removal.kept[site_layer]), site.groups - len(removal.groups[site_layer])
        has_bias = architecture.name not in WITHOUT_BIAS
        rows += site.width * (n_heads * (2 * model_width + has_bias) + groups * 2 * (model_width + has_bias))
        rows += n_heads if architecture.sinks else 0
    assert n_removed == rows + position_bias_columns(architecture, removal)


def position_bias_columns(architecture: Architecture, removal: Any) -> int:
    """T5: 32 buckets for each head that no layer keeps."""
    if architecture.name != "t5":
        return 0
    columns = 0
    for site in ("encoder-self", "decoder-self"):
        kept = {head for (kept_site, _), heads in removal.kept.items() if kept_site.value == site for head in heads}
        columns += 3 - len(kept)
    return 32 * columns


# Without headscope, in another process: all folders in one, because starting it costs most.

ALONE = """
import importlib.abc, json, sys
from pathlib import Path

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "headscope":
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
try:
    import headscope
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("headscope can be imported here")
import torch, transformers
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
root = Path(sys.argv[1])
for name, (auto, generates, eager) in json.loads((root / "jobs.json").read_text()).items():
    inputs = torch.load(root / f"{name}.inputs.pt")
    more = {"attn_implementation": "eager"} if eager else {}
    loader = getattr(transformers, auto)
    model = loader.from_pretrained(root / name, trust_remote_code=True, **more).eval()
    with torch.no_grad():
        outputs = {"logits": model(**inputs).logits}
        if generates:
            prompt = {key: inputs[key][:1] for key in ("input_ids", "attention_mask")}
            settings = dict(num_beams=3, max_new_tokens=4, do_sample=False)
            outputs["ids"] = model.generate(**prompt, **settings)
            if name.endswith("both"):
                outputs["uncached"] = model.generate(**prompt, **settings, use_cache=False)
    model.save_pretrained(root / f"{name}-again")
    again = loader.from_pretrained(root / f"{name}-again", trust_remote_code=True, **more).eval()
    with torch.no_grad():
        outputs["again"] = again(**inputs).logits
    bare = transformers.AutoModel.from_pretrained(root / name, trust_remote_code=True, **more).eval()
    with torch.no_grad():
        outputs["bare"] = bare(**inputs)[0]
        outputs["base"] = model.base_model(**inputs)[0] if model.base_model is not model else None
    torch.save(outputs, root / f"{name}.outputs.pt")
assert not any(module.partition(".")[0] == "headscope" for module in sys.modules)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outputs of self-contained folders in a process without headscope."""
    root = tmp_path_factory.mktemp("alone")
    jobs = {}
    for kind, way in FOLDERS:
        architecture, name = BY_NAME[kind], f"{kind}-{way}"
        checkpoint = wrappers.hugging_face(build(architecture))
        removal = plan_removal(checkpoint.attention_sites, WAYS[way](architecture, checkpoint.layout))
        export = choose_export(None, checkpoint)
        (root / name).mkdir()
        write_checkpoint(export.build(checkpoint, removal), root / name)
        torch.save(inputs_of(architecture, lengths=LENGTHS, targets=TARGETS), root / f"{name}.inputs.pt")
        jobs[name] = (TASKS[architecture.task], architecture.generates, not architecture.sdpa)
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", ALONE, str(root)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return {name: torch.load(root / f"{name}.outputs.pt") for name in jobs}


@pytest.mark.parametrize(("name", "way"), FOLDERS)
def test_the_self_contained_folder_needs_no_headscope(name: str, way: str, results: dict[str, dict[str, Any]]) -> None:
    architecture = BY_NAME[name]
    outputs = results[f"{architecture.name}-{way}"]
    reference = silence(build(architecture), WAYS[way](architecture, architecture.layout))
    inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    real = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    rows = ... if real is None else real.bool()
    expected = logits(reference, inputs)[rows]
    assert_near(outputs["logits"][rows], expected, 1e-5)
    assert torch.equal(outputs["again"][rows], outputs["logits"][rows])
    if outputs["base"] is not None:
        assert torch.equal(outputs["bare"][rows] if real is not None else outputs["bare"], outputs["base"][rows])
    if architecture.generates:
        prompt = {name: inputs[name][:1] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            ids = reference.generate(**prompt, num_beams=3, max_new_tokens=4, do_sample=False)
        assert torch.equal(outputs["ids"], ids)
        assert way != "both" or torch.equal(outputs["uncached"], ids)


def test_one_architecture_is_pruned_twice() -> None:
    """T5: the second removal counts heads as the first left them, and both are remembered."""
    for name in ("t5", "bart", "llama"):
        architecture = BY_NAME[name]
        checkpoint = wrappers.hugging_face(build(architecture, dtype="float64"))
        first = choose_ragged(architecture, checkpoint.layout)
        export = choose_export(None, checkpoint)
        small = export.build(checkpoint, plan_removal(checkpoint.attention_sites, first))
        second = choose_empty(architecture, small.layout)
        smaller = export.build(small, plan_removal(small.attention_sites, second))
        data = read_input_texts(small, None, None, sentences=4)
        assert verify(small, smaller, second, data).difference <= 1e-10
        pruned: Any = smaller.model
        kept = pruned.config.kept_heads
        for (site, layer), count in checkpoint.layout.items():
            removed = {head.head for head in first if (head.site, head.layer) == (site, layer)}
            expected = [] if layer == 0 else [head for head in range(count) if head not in removed]
            assert kept[site.value][str(layer)] == expected
