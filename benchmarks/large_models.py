"""Memory that a large model needs: to be opened, to have its weights read, and for moments of all its layers.

Run: python benchmarks/large_models.py

A Llama of 8 layers of width 1024 (float32, in shards of 20 MB) is made on disk. Each figure is the largest anonymous
resident memory of a process of its own over that of one that has imported headscope alone: pages of mapped files do
not count, which the system can drop at any time. Limits: opening takes 1.15 times the weights, with the layers on disk
a quarter of them; reading weights (copying, composition) adds a third, with what the analyses themselves import; sums
in files take a quarter of what they take in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS, WIDTH, VOCABULARY = 8, 1024, 512
MEASURE = """
import sys, threading, time
from pathlib import Path
import headscope as hs
from headscope.formats.base import open_checkpoint
import transformers.models.llama.modeling_llama, accelerate
from headscope.pruning.closed_form import moments
from headscope.data.corpus import Corpus, Sentence

def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024

step, folder = sys.argv[1], sys.argv[2]
before, peak, ended = anonymous(), [0.0], threading.Event()

def watch():
    while not ended.wait(0.005):
        peak[0] = max(peak[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
mapped = step == "mapped" or step.startswith("sums")
model = hs.load(folder, device_map=folder + "/../map.json") if mapped else hs.load(folder, device="cpu")
model.checkpoint.projections
if step == "weights":
    model.analyze(["a b c"], only=("copying", "composition"), bootstrap=10)
if step.startswith("sums"):
    text = [Sentence(number, "a b c d e f g") for number in range(20)]
    moments.collect_moments(model.checkpoint, Corpus("", 20, "", lambda: iter(text)))
ended.set()
watcher.join()
print(peak[0] - before)
"""


def write_model(folder: Path) -> float:
    """Write the model, its tokenizer and a device map with all layers on disk; MiB of its weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=16,
            max_position_embeddings=64,
        )
    )
    model.save_pretrained(folder, max_shard_size="20MB")
    words = Tokenizer(models.WordLevel({f"{chr(97 + n % 26)}{n // 26 or ''}": n for n in range(VOCABULARY)}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="z", unk_token="a").save_pretrained(folder)
    devices = {f"model.layers.{layer}": "disk" for layer in range(LAYERS)}
    devices |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    (folder.parent / "map.json").write_text(json.dumps(devices), encoding="utf-8")
    return float(sum(parameter.nbytes for parameter in model.parameters()) / 2**20)


def peak(step: str, folder: Path) -> float:
    """MiB of anonymous memory at most."""
    command = [sys.executable, "-c", MEASURE, step, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        weights = write_model(folder)
        base, on_disk, reading = (peak(step, folder) for step in ("opened", "mapped", "weights"))
        memory = peak("sums in memory", folder)
    print(f"weights {weights:.0f} MiB in {LAYERS} layers")
    print(f"opened {base:.0f} MiB, {base / weights:.2f} times (limit 1.15)")
    print(f"layers on disk {on_disk:.0f} MiB, {on_disk / weights:.2f} times (limit 0.25)")
    print(f"copying and composition add {reading - base:.0f} MiB, {(reading - base) / weights:.2f} times (limit 0.33)")
    sums = LAYERS * WIDTH**2 * 8 / 2**20
    print(f"moments are {sums:.0f} MiB; with them and layers on disk {memory:.0f} MiB in all")


if __name__ == "__main__":
    main()
