"""Whether `attnlrp` gives what the authors' package lxt gives, on the same small weights and texts.

Run: python benchmarks/lxt_agreement.py LXT_PYTHON

LXT_PYTHON is the interpreter of an environment with lxt 2.1 and a transformers that its wheel imports beside (4.52); it
runs `lxt_reference.py`. Limit: 1e-5 of the largest relevance.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import headscope.model.transformers_attention  # noqa: F401  # registers IMPLEMENTATION
from headscope.model.attention import IMPLEMENTATION
from headscope.relevance.backward import Backward, recording
from headscope.relevance.rulesets import RULE_SETS

LIMIT = 1e-5
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        dict(hidden_size=42, intermediate_size=17, num_hidden_layers=3, num_attention_heads=6, head_dim=10)
        | dict(num_key_value_heads=2, vocab_size=97),
        6,
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=15, n_layer=3, n_head=3, n_positions=61, vocab_size=97), 3),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        dict(hidden_size=15, num_hidden_layers=3, num_attention_heads=3, intermediate_size=17, vocab_size=97),
        3,
    ),
}


def build_model(kind: str) -> tuple[Any, dict[str, Any]]:
    """A random model in float64, and the inputs from which the other side rebuilds it."""
    name, config_name, sizes, heads = SIZES[kind]
    config = {**sizes, **SPECIAL}
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config_name)(**config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.tie_weights()
    ids, mask = torch.randint(5, 97, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    inputs = {"class": name, "config_class": config_name, "config": config, "heads": heads, "ids": ids, "mask": mask}
    return model, {**inputs, "state": {key: value.detach() for key, value in model.state_dict().items()}}


def own_relevances(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Headscope's relevances [layer b h]."""
    rule_set = RULE_SETS.get("attnlrp")
    assert isinstance(rule_set, Backward)
    model.set_attn_implementation(IMPLEMENTATION)
    with recording(model, {"attnlrp": rule_set.rules}) as record:
        logits = model(input_ids=inputs["ids"], attention_mask=inputs["mask"]).logits
    with torch.enable_grad():
        value = (logits.max(dim=-1).values * inputs["mask"]).sum()
    relevances = record.relevance(value, rule_set.rules)
    return torch.stack([relevance.raw[0] for _, relevance in sorted(relevances.items(), key=lambda item: item[0][1])])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="interpreter of the environment that has lxt")
    interpreter = parser.parse_args().python
    models = {kind: build_model(kind) for kind in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        input_file, out = Path(folder, "inputs.pt"), Path(folder, "out.pt")
        torch.save({kind: inputs for kind, (_, inputs) in models.items()}, input_file)
        script = Path(__file__).with_name("lxt_reference.py")
        subprocess.run([interpreter, str(script), str(input_file), str(out)], check=True)
        reference = torch.load(out, weights_only=True)
    for kind, (model, inputs) in models.items():
        ours = own_relevances(model, inputs)
        gap = float((ours - reference[kind]).abs().max() / reference[kind].abs().max())
        print(f"{kind}: {len(ours)} layers, largest difference {gap:.1e} of the largest relevance (limit {LIMIT})")


if __name__ == "__main__":
    main()
