"""`--export gguf`: one file for llama.cpp and what is built on it, run there before it is kept.

llama.cpp is asked about greedy continuations of texts by the model, and its log-probabilities are held against those of
the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.evaluation.model_inputs import InputTexts, prompts
from headscope.export import llama_cpp
from headscope.export.base import (
    QUANTITY,
    STEPS,
    EngineExport,
    EngineFile,
    check_difference,
    engine,
    tolerance,
)
from headscope.export.gguf_layers import LlamaDecoder, check_family, context_length
from headscope.export.gguf_writer import GgufVocabulary, write_gguf
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.selfcontained import stored_copy
from headscope.model.forward import ModelInputs, outputs

FILE = "model.gguf"
TOP, TEXTS, LONGEST = 1000, 8, 48
QUANTIZED = 0.1
"""How far quantization may move them, as a share of their range: 0.01 to 0.07 was measured on random models."""


@engine
class Gguf(EngineExport):
    """Llama-like decoders, each layer with its own number of heads where llama.cpp has an architecture that can."""

    name = "gguf"
    summary = "one file for llama.cpp, of Llama-like decoders"
    install = "headscope[engines]"
    packages = ("gguf", "xllamacpp")
    quantizations: ClassVar = {"q8_0": "matrices in 8 bits"}
    endings = ("gguf",)

    def check(self, checkpoint: Checkpoint) -> None:
        check_family(checkpoint)

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.model_type != "qwen3"

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        decoder, path = LlamaDecoder(stored_copy(checkpoint)), folder / FILE
        tokenizer, quantity = getattr(checkpoint, "tokenizer", None), QUANTITY
        vocabulary = write_gguf(decoder, tokenizer, path)
        texts = list(data.sources[:TEXTS]) if vocabulary.splits_text else []
        pairs = continuations(checkpoint, data, context_length(decoder.config))
        comparison, ids = compare(path, vocabulary, pairs, texts)
        limit = tolerance(decoder.model.lm_head.weight.dtype, comparison.largest)
        check_difference(comparison.difference, limit, "llama.cpp")
        notes = [comparison.greedy]
        if quantize != "none":  # after what the file holds was proved
            write_gguf(decoder, tokenizer, path, quantize=quantize)
            before, quantity = comparison.difference, "log-probabilities moved by quantization by"
            comparison, _ = compare(path, vocabulary, pairs)
            limit = QUANTIZED * comparison.range
            if not comparison.difference <= limit:
                raise CheckpointError(
                    f"quantization moves log-probabilities by {comparison.difference:.1e}, tolerance {limit:.1e} (a "
                    "tenth of their range); nothing was saved. Leave out --quantize"
                )
            notes = [
                f"before quantization log-probabilities differed by {before:.1e}",
                f"quantised, {comparison.greedy}",
            ]
        if texts:
            own = [checkpoint.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[attr-defined]
            same = sum(a == b for a, b in zip(ids, own, strict=True))
            notes.append(f"llama.cpp splits {same} of {len(texts)} sentences into the same tokens")
        name, is_ragged = decoder.container.name, decoder.container.ragged
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=llama_cpp.runtime(),
            quantity=quantity,
            difference=comparison.difference,
            limit=limit,
            sizes=f"architecture {name}" + (f", {quantize} matrices" if quantize != "none" else ""),
            opens=(
                f"`{FILE}`: llama.cpp and programs built on it (llama-cli, llama-server)",
                *([f"its architecture is {name}, in which every layer may have another number of heads"] * is_ragged),
            ),
            limits=_limits(decoder, vocabulary),
            notes=tuple(notes),
        )


def _limits(decoder: LlamaDecoder, vocabulary: GgufVocabulary) -> tuple[str, ...]:
    limits = []
    if not vocabulary.splits_text:
        limits.append(f"`{FILE}` lists its tokens, but llama.cpp cannot split text as this tokenizer does: give it ids")
    if (length := context_length(decoder.config)) < decoder.config.max_position_embeddings:
        limits.append(f"`{FILE}` has a context of {length} tokens, the sliding window: it is exact within it")
    return tuple(limits)


@dataclass(frozen=True)
class LogitComparison:
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


def compare(
    path: Path, vocabulary: GgufVocabulary, pairs: Sequence[tuple[list[int], Tensor]], texts: Sequence[str] = ()
) -> tuple[LogitComparison, list[list[int]]]:
    """What llama.cpp says after prompts against the log-probabilities [V] of the model; and its ids of `texts`."""
    top, prompt_ids = min(TOP, len(vocabulary.tokens)), [prompt for prompt, _ in pairs]
    answers, ids_of_texts = llama_cpp.ask(path, prompt_ids, list(texts), top=top, forced_token=vocabulary.letter)
    difference, largest, spread, same, steps = 0.0, 0.0, 0.0, 0, 0
    for log_p_of_id, (_, row) in zip(answers, pairs, strict=True):
        spread = max(spread, float(row.max() - row.min()))
        if not all(map(math.isfinite, log_p_of_id.values())):
            raise CheckpointError(
                "llama.cpp computes NaN or infinite numbers with this file, and the model does not: it rounds to the "
                "type of the matrices before it multiplies, in which they are too large; nothing was saved. Save the "
                "model in bfloat16 or float32 first"
            )
        if log_p_of_id:
            ids, values = torch.tensor(list(log_p_of_id)), torch.tensor(list(log_p_of_id.values()), dtype=torch.float64)
            difference = max(difference, float((values - row[ids]).abs().max()))
            largest = max(largest, float(row[ids].abs().max()))
            same += int(ids[values.argmax()]) == int(row.argmax())
            steps += 1
    if not steps:
        raise CheckpointError("llama.cpp gives no log-probabilities to compare; give the model a tokenizer")
    return LogitComparison(difference, largest, spread, same, steps), ids_of_texts


def continuations(checkpoint: Checkpoint, data: InputTexts, context: int) -> list[tuple[list[int], Tensor]]:
    """The first tokens of a few texts with 0, 1, … greedy ones behind, and log-probabilities [V] of what follows.

    As long as llama.cpp has room for in a `context`: it keeps one token for what follows.
    """
    room = min(LONGEST, context) - 1
    steps, pairs = min(STEPS, room), list[tuple[list[int], Tensor]]()
    for prompt in prompts(data, room - steps + 1):
        for _ in range(steps):
            ids = torch.tensor([prompt], device=checkpoint.device)
            row = outputs(checkpoint.model, ModelInputs({"input_ids": ids}, None))[0, -1]
            pairs.append((prompt, row.double().log_softmax(-1).cpu()))
            prompt = [*prompt, int(row.argmax())]
    return pairs
