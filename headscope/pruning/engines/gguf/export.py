"""`--export gguf`: one file for llama.cpp and what is built on it, run there before it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.writing import with_stored_dtype
from headscope.pruning.engines.base import ENGINES, EngineExport, EngineFile, EngineOptions, refuse_difference
from headscope.pruning.engines.gguf import llama_cpp
from headscope.pruning.engines.gguf.layers import Decoder, check_family, context_length
from headscope.pruning.engines.gguf.vocabulary import Vocabulary
from headscope.pruning.engines.gguf.writer import write_gguf
from headscope.pruning.removal.model_inputs import InputTexts

FILE = "model.gguf"
PROMPTS, STEPS, TOP, TEXTS, LONGEST = 3, 8, 1000, 8, 48
LIMIT = {torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Largest difference of log-probabilities as a share of the largest (or of 1), by the type of the matrices."""
QUANTIZED = 0.1
"""How far quantization may move them, as a share of their range: 0.01 to 0.07 was measured on random models."""
FULL = 1e-5
"""The same in float32: llama.cpp sums in another order, 2e-7 to 2e-6 was measured on random models."""


class Gguf(EngineExport):
    """Llama-like decoders, each layer with its own number of heads where llama.cpp has an architecture that can."""

    name = "gguf"
    summary = "one file for llama.cpp"
    extra = "engines"
    packages = ("gguf",)
    quantizations = ("none", "q8_0")

    def check(self, checkpoint: Checkpoint) -> None:
        check_family(checkpoint)

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.model_type != "qwen3"

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        decoder = Decoder(checkpoint.with_model(with_stored_dtype(checkpoint)))
        tokenizer = getattr(checkpoint, "tokenizer", None)
        path, runtime = folder / FILE, llama_cpp.installed()
        vocabulary = write_gguf(decoder, tokenizer, path)
        proof = Proof(None, None, ()) if not runtime else _proved(checkpoint, decoder, vocabulary, data, path)
        if options.quantize != "none":
            write_gguf(decoder, tokenizer, path, quantize=options.quantize)
            proof = proof if not runtime else _moved(checkpoint, vocabulary, data, path, proof)
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=runtime,
            quantity="log-probabilities moved by quantization by" if options.quantize != "none" else _QUANTITY,
            difference=proof.difference,
            limit=proof.limit,
            sizes=f"architecture {decoder.container.name}, {options.quantize} matrices"
            if options.quantize != "none"
            else f"architecture {decoder.container.name}",
            opens=(f"`{FILE}`: llama.cpp and programs built on it (llama-cli, llama-server)", *_usage(decoder)),
            limits=_limits(decoder, vocabulary),
            notes=proof.notes,
        )


_QUANTITY = "log-probabilities differ by"


@dataclass(frozen=True)
class Proof:
    """The largest difference of log-probabilities, what is let pass, and what else came out."""

    difference: float | None
    limit: float | None
    notes: tuple[str, ...]


def _proved(checkpoint: Checkpoint, decoder: Decoder, vocabulary: Vocabulary, data: InputTexts, path: Path) -> Proof:
    """What llama.cpp computes, against the model; CheckpointError where that is something else."""
    texts = list(data.sources[:TEXTS]) if vocabulary.splits_text else []
    continued = _continued(checkpoint.model, data, context_length(decoder.config))
    answer = llama_cpp.ask(_request(path, continued, vocabulary, texts))
    measured = compared(continued, answer)
    if not measured.steps:
        return Proof(None, None, ("llama.cpp runs it, but gave no log-probabilities",))
    limit = LIMIT.get(decoder.model.lm_head.weight.dtype, FULL) * max(1.0, measured.largest)
    refuse_difference(measured.difference, limit, "llama.cpp", _QUANTITY)
    notes = [measured.greedy]
    if texts:
        ids = [checkpoint.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[attr-defined]
        same = sum(a == b for a, b in zip(answer.ids, ids, strict=True))
        notes.append(f"llama.cpp splits {same} of {len(texts)} sentences into the same tokens")
    return Proof(measured.difference, limit, tuple(notes))


def _moved(checkpoint: Checkpoint, vocabulary: Vocabulary, data: InputTexts, path: Path, proof: Proof) -> Proof:
    """How far quantization moves log-probabilities; what the file holds was proved before it was quantised."""
    continued = _continued(checkpoint.model, data, LONGEST)
    measured = compared(continued, llama_cpp.ask(_request(path, continued, vocabulary, [])))
    limit = QUANTIZED * measured.range
    if not measured.difference <= limit:
        raise CheckpointError(
            f"quantization moves log-probabilities by {measured.difference:.1e}, and at most {limit:.1e} is let pass "
            "(a tenth of their range); nothing was saved. Leave out --quantize"
        )
    before = f"before quantization log-probabilities differed by {proof.difference or 0.0:.1e}"
    return Proof(measured.difference, limit, (before, f"quantised, {measured.greedy}", *proof.notes[1:]))


@dataclass(frozen=True)
class Continued:
    """A prompt with the first 0, 1, … greedy tokens of a model, and log-probabilities [steps V] of what follows."""

    prompts: list[list[int]]
    rows: Tensor


@dataclass(frozen=True)
class Comparison:
    """The largest difference of log-probabilities, the largest of them, and on how many steps both say the same.

    `range` is how far apart the log-probabilities of one step are.
    """

    difference: float
    largest: float
    range: float
    same: int
    steps: int

    @property
    def greedy(self) -> str:
        """A line on the greedy choices."""
        return f"the likeliest token is the same in llama.cpp at {self.same} of {self.steps} steps"


def compared(continued: list[Continued], answer: llama_cpp.Answer) -> Comparison:
    """What llama.cpp says along a model's greedy continuations, and what the model says."""
    difference, largest, same, steps = 0.0, 0.0, 0, 0
    rows = torch.cat([continuation.rows for continuation in continued])
    for found, row in zip(answer.log_probabilities, rows, strict=True):
        if not found:
            continue
        ids, values = torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)
        difference = max(difference, float((values - row[ids]).abs().max()))
        largest = max(largest, float(row[ids].abs().max()))
        same += int(ids[values.argmax()]) == int(row.argmax())
        steps += 1
    return Comparison(difference, largest, float((rows.amax(1) - rows.amin(1)).max()), same, steps)


def _continued(model: Any, data: InputTexts, longest: int) -> list[Continued]:
    """Greedy continuations of the first tokens of a few texts."""
    continued = []
    for prompt in _prompts(data, longest):
        ids, rows = torch.tensor([prompt], device=model.device), []
        with torch.no_grad():
            for _ in range(STEPS):
                rows.append(model(input_ids=ids, use_cache=False).logits[0, -1].double().log_softmax(-1).cpu())
                ids = torch.cat([ids, rows[-1].argmax().to(ids).view(1, 1)], dim=1)
        whole = ids[0].tolist()
        prompts = [whole[: len(prompt) + step] for step in range(STEPS)]
        continued.append(Continued(prompts, torch.stack(rows)))
    return continued


def _prompts(data: InputTexts, longest: int) -> list[list[int]]:
    """The first tokens of a few texts, without padding."""
    rows = [
        ids[mask.bool()].tolist()
        for batch in (data.feeds[0], data.feeds[-1])
        for ids, mask in zip(batch.given["input_ids"], batch.given["attention_mask"], strict=True)
    ]
    length = max(min(longest, LONGEST) - STEPS, 1)
    return [row[:length] for row in rows[-PROMPTS:]]


def _request(path: Path, continued: list[Continued], vocabulary: Vocabulary, texts: list[str]) -> llama_cpp.Request:
    prompts = [prompt for continuation in continued for prompt in continuation.prompts]
    top = min(TOP, len(vocabulary.tokens))
    return llama_cpp.Request(file=str(path), prompts=prompts, texts=texts, top=top, said=vocabulary.letter)


def _usage(decoder: Decoder) -> tuple[str, ...]:
    if not decoder.container.ragged:
        return ()
    return (f"its architecture is {decoder.container.name}, in which every layer may have another number of heads",)


def _limits(decoder: Decoder, vocabulary: Vocabulary) -> tuple[str, ...]:
    limits = []
    if not vocabulary.splits_text:
        limits.append(f"`{FILE}` lists its tokens, but llama.cpp cannot split text as this tokenizer does: give it ids")
    if (length := context_length(decoder.config)) < decoder.config.max_position_embeddings:
        limits.append(f"`{FILE}` has a context of {length} tokens, the sliding window: it is exact within it")
    return tuple(limits)


ENGINES.register("gguf", Gguf(), where=__name__)
