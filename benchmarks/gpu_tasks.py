"""What commands take on an accelerator: analyses against the forward pass, ranking, removal, refit, a training step.

Part of `benchmarks/gpu.py`, which runs it unless --no-tasks is given. Models are Llamas with their output layer, of
random weights; texts are lines of `WORDS` words drawn by Zipf's law. Times are the fastest of `ROUNDS` after one that
does not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from long_context import SEED, VOCABULARY, whole_words, words

COLUMNS = ("device", "task", "model", "tokens", "seconds", "ratio")
ROUNDS, WORDS, LINES = 3, 31, 64
TINY: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
}
MODELS: dict[str, dict[str, Any]] = {
    "0.1B": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
BATCHES = {True: (128, 256), False: (512, 2048, 8192, 32768)}


def rows(device: torch.device, name: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """One row after the other, with the columns `COLUMNS`; a ratio is to the forward pass over the same text."""
    lines = LINES // 4 if tiny else LINES
    for model, sizes in (TINY if tiny else MODELS).items():
        checkpoint = build_checkpoint(sizes, device)
        for tokens in BATCHES[tiny]:
            text = texts(max(lines, 2 * tokens // WORDS))
            base, total = (fastest(partial(work, checkpoint, text, tokens), device) for work in (forward, study))
            yield row(name, "forward", model, tokens, base)
            yield row(name, "analyze", model, tokens, total, total / base)
        for task, work in commands(checkpoint, texts(lines)).items():
            yield row(name, task, model, 2048, fastest(work, device))
    yield row(name, "training step", "tiny" if tiny else "small", 2048, training_step(device, tiny=tiny))


def row(*values: Any) -> dict[str, Any]:
    """A row of these values, the ratio of which may be missing."""
    columns = dict(zip(COLUMNS, (*values, None), strict=False))
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in columns.items()}


def build_checkpoint(sizes: dict[str, Any], device: torch.device) -> Any:
    """A Llama with an output layer, in bfloat16 where it runs on an accelerator."""
    import transformers

    from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return HuggingFaceCheckpoint(path="random Llama", model=model.eval(), tokenizer=whole_words(), digest="0" * 64)


def texts(count: int) -> list[str]:
    """Lines of words."""
    ids = words(count * WORDS)
    return [" ".join(f"w{number}" for number in ids[first : first + WORDS]) for first in range(0, len(ids), WORDS)]


def forward(checkpoint: Any, text: list[str], tokens: int) -> None:
    """The model's own eager pass over a text in batches."""
    from headscope.data.batching import batches
    from headscope.data.corpus import Corpus, Sentence
    from headscope.model.interface import through_attend

    corpus = Corpus("zipf", len(text), "0" * 40, lambda: (Sentence(*pair, None) for pair in enumerate(text)))
    with torch.inference_mode(), through_attend(checkpoint.model, implementation="eager"):
        for batch in batches(corpus, checkpoint, tokens=tokens, limit=512):
            checkpoint.forward(batch.to(checkpoint.device))


def study(checkpoint: Any, text: list[str], tokens: int) -> None:
    """All default analyses of a text."""
    import headscope as hs

    hs.Model(checkpoint).analyze(text, batch_tokens=tokens)


def commands(checkpoint: Any, text: list[str]) -> dict[str, Callable[[], object]]:
    """Ranking, removal of half of the heads, and the same with a refit."""
    import headscope as hs

    model = hs.Model(checkpoint)
    heads = [f"{site}.{layer}.{head}" for (site, layer), n in checkpoint.layout.items() for head in range(n // 2)]
    return {
        "rank by gradient": lambda: model.rank(by="gradient", text=text),
        "remove half": lambda: model.remove(heads, text=text),
        "remove half and refit": lambda: model.remove(heads, refit=hs.Refit(method="least-squares"), text=text),
    }


def training_step(device: torch.device, *, tiny: bool) -> float:
    """Seconds of an update of the baseline on the captions that ship."""
    from headscope import assets
    from headscope.training.config import PRESETS, TrainConfig
    from headscope.training.prepare import collate, epoch_plan
    from headscope.training.trainer import make_run
    from headscope.training.variant import VARIANTS

    sizes: dict[str, Any] = {"d_model": 16, "d_ffn": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    sizes = {**PRESETS["small"], **(sizes if tiny else {}), "vocab_size": 200 if tiny else 1000}
    folder = Path(str(assets.__path__[0]))
    lines = 64 if tiny else None
    text: dict[str, Any] = {"source": folder / "captions.en", "target": folder / "captions.de", "max_sentences": lines}
    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig(out=Path(out) / "run", device=str(device), max_tokens=2048, **text, **sizes)
        run = make_run(config, VARIANTS.get("baseline")(None))
        group = epoch_plan(run.data.train, tokens=2048, seed=1, epoch=1)[0]
        batch = collate(run.data.train, group).to(run.device)
        return fastest(lambda: run.update([batch]), device)


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(ROUNDS + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def wait(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
