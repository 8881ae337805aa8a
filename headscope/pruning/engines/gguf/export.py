"""`--export gguf`: one file for llama.cpp and what is built on it, run there before it is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.selfcontained import stored_copy
from headscope.model.forward import refuse_overflow
from headscope.model.nonfinite import is_finite
from headscope.pruning.engines.base import (
    FULL,
    LIMIT,
    QUANTITY,
    EngineExport,
    EngineFile,
    EngineOptions,
    EngineRun,
    engine,
    refuse_difference,
)
from headscope.pruning.engines.gguf import llama_cpp
from headscope.pruning.engines.gguf.layers import FAMILIES, LLAMA, LlamaDecoder, check_family, context_length
from headscope.pruning.engines.gguf.writer import GgufVocabulary, write_gguf
from headscope.pruning.model_inputs import InputTexts, prompts

FILE = "model.gguf"
TIMED = 32  # tokens written where llama.cpp is timed


@engine
class Gguf(EngineExport):
    """Llama-like decoders, each layer with its own number of heads where llama.cpp has an architecture that can."""

    name = "gguf"
    summary = "one file for llama.cpp, of Llama-like decoders"
    install = "headscope[engines]"
    packages = ("gguf",)
    quantizations: ClassVar = {"q8_0": "matrices in 8 bits"}
    endings = ("gguf",)
    runs_later = True

    def check(self, checkpoint: Checkpoint) -> None:
        check_family(checkpoint)

    def fits(self, checkpoint: Checkpoint) -> None:
        _ = LlamaDecoder(checkpoint).container

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.model_type != "qwen3"

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        decoder = LlamaDecoder(stored_copy(checkpoint))
        vocabulary, proof = _written(checkpoint, decoder, data, folder / FILE, options)
        quantized, name, ragged = options.quantize != "none", decoder.container.name, decoder.container.ragged
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=llama_cpp.installed(),
            quantity="log-probabilities moved by quantization by" if quantized else QUANTITY,
            difference=proof.difference,
            limit=proof.limit,
            sizes=f"architecture {name}" + (f", {options.quantize} matrices" if quantized else ""),
            opens=(
                f"`{FILE}`: llama.cpp and programs built on it (llama-cli, llama-server)",
                *([f"its architecture is {name}, in which every layer may have another number of heads"] * ragged),
            ),
            limits=_limits(decoder, vocabulary),
            notes=proof.notes,
        )

    @contextmanager
    def running(self, file: EngineFile, checkpoint: Checkpoint, data: InputTexts, folder: Path) -> Iterator[EngineRun]:
        if not file.runtime:
            raise ConfigError("llama.cpp, which would run the file, is not installed")
        model: Any = checkpoint.model
        most = context_length(model.config) - 2
        (prompt,) = prompts(data, max(most - TIMED, 1), count=1)
        steps, threads = min(TIMED, most - len(prompt)), torch.get_num_threads()
        with llama_cpp.speaking(folder / file.file, prompt, steps=steps, threads=threads) as work:
            yield EngineRun(what=f"{len(prompt)} tokens read, {steps} written", sentences=1, work=work)


def _written(
    checkpoint: Checkpoint, decoder: LlamaDecoder, data: InputTexts, path: Path, options: EngineOptions
) -> tuple[GgufVocabulary, Proof]:
    """Write the file, quantised after it was proved; the vocabulary that it has, and what proves it."""
    tokenizer, unproven = getattr(checkpoint, "tokenizer", None), unproven_parts(decoder, options)
    runs, proof = bool(llama_cpp.installed()), Proof()
    if not runs:
        why, advice = f"{llama_cpp.PACKAGE}, which runs the file, is not installed", f'pip install "{Gguf.install}"'
        _refuse_unproven(unproven, options, why, f"install it ({advice})")
    vocabulary = write_gguf(decoder, tokenizer, path)
    if runs:
        asked = Asked(path, vocabulary, continuations(checkpoint, data, context_length(decoder.config)))
        proof = proved(checkpoint, asked, data, dtype=decoder.model.lm_head.weight.dtype)
    if options.quantize != "none":
        write_gguf(decoder, tokenizer, path, quantize=options.quantize)
        proof = moved(asked, proof) if runs else proof
    if proof.difference is None and unproven:
        _refuse_unproven(unproven, options, "llama.cpp gives no probabilities", "give the model a tokenizer")
        proof = replace(proof, notes=(*proof.notes, f"only a run of llama.cpp proves {' and '.join(unproven)}"))
    return vocabulary, proof


def unproven_parts(decoder: LlamaDecoder, options: EngineOptions) -> tuple[str, ...]:
    """What of a file only a run of llama.cpp proves.

    Proven by construction is the model in the architecture of its own name (Mistral: llama), all layers alike, with
    plain rotary embeddings and matrices as they are stored: the same numbers under the names of llama.cpp.
    """
    container, plainest = decoder.container, FAMILIES[decoder.model_type][0]
    biased = any(layer.biases for layer in decoder.layers)
    found = {
        f"{decoder.model_type} as architecture {container.name}": container is not plainest,
        "layers without heads": any(not layer.heads for layer in decoder.layers),
        "scaled rotary embeddings": not decoder.rotary(container).plain,
        "biases that this architecture may have": biased and container is LLAMA,
        "a sliding window": context_length(decoder.config) < decoder.config.max_position_embeddings,
        f"{options.quantize} matrices": options.quantize != "none",
    }
    return tuple(name for name, present in found.items() if present)


def _refuse_unproven(unproven: tuple[str, ...], options: EngineOptions, why: str, advice: str) -> None:
    """ConfigError where nothing proves a file and nobody asked for it."""
    if unproven and not options.unverified:
        raise ConfigError(
            f"--export gguf: {why}, and only a run proves {' and '.join(unproven)}; nothing was saved; "
            f"{advice}, or give --unverified (prune remove, convert)"
        )


def _limits(decoder: LlamaDecoder, vocabulary: GgufVocabulary) -> tuple[str, ...]:
    limits = []
    if not vocabulary.splits_text:
        limits.append(f"`{FILE}` lists its tokens, but llama.cpp cannot split text as this tokenizer does: give it ids")
    if (length := context_length(decoder.config)) < decoder.config.max_position_embeddings:
        limits.append(f"`{FILE}` has a context of {length} tokens, the sliding window: it is exact within it")
    return tuple(limits)


# What llama.cpp computes of the file, along greedy continuations of texts, against what the model does.


STEPS, TOP, TEXTS, LONGEST = 8, 1000, 8, 48
QUANTIZED = 0.1
"""How far quantization may move them, as a share of their range: 0.01 to 0.07 was measured on random models."""


@dataclass(frozen=True)
class Continuation:
    """A prompt with the first 0, 1, … greedy tokens of a model, and log-probabilities [steps V] of what follows."""

    prompts: list[list[int]]
    rows: Tensor


@dataclass(frozen=True)
class Asked:
    """A file, its vocabulary, and the continuations that llama.cpp is asked about."""

    path: Path
    vocabulary: GgufVocabulary
    continued: list[Continuation]

    def answer(self, texts: list[str] | None = None) -> llama_cpp.Reply:
        """What llama.cpp says of them, and how it splits texts."""
        prompts = [prompt for continuation in self.continued for prompt in continuation.prompts]
        top = min(TOP, len(self.vocabulary.tokens))
        return llama_cpp.ask(
            llama_cpp.Request(
                file=str(self.path), prompts=prompts, texts=texts or [], top=top, said=self.vocabulary.letter
            )
        )


@dataclass(frozen=True)
class Proof:
    """The largest difference of log-probabilities (None: nothing was compared), what is let pass, and remarks."""

    difference: float | None = None
    limit: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogitsAgreement:
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


def proved(checkpoint: Checkpoint, asked: Asked, data: InputTexts, *, dtype: torch.dtype) -> Proof:
    """What llama.cpp computes with matrices of `dtype`; CheckpointError where that is something else."""
    texts = list(data.sources[:TEXTS]) if asked.vocabulary.splits_text else []
    answer = asked.answer(texts)
    measured = compared(asked.continued, answer)
    if not measured.steps:
        return Proof(notes=("llama.cpp runs it, but gave no log-probabilities",))
    limit = LIMIT.get(dtype, FULL) * max(1.0, measured.largest)
    refuse_difference(measured.difference, limit, "llama.cpp", QUANTITY)
    notes = [measured.greedy]
    if texts:
        ids = [checkpoint.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[attr-defined]
        same = sum(a == b for a, b in zip(answer.ids, ids, strict=True))
        notes.append(f"llama.cpp splits {same} of {len(texts)} sentences into the same tokens")
    return Proof(measured.difference, limit, tuple(notes))


def moved(asked: Asked, proof: Proof) -> Proof:
    """How far quantization moves log-probabilities; what the file holds was proved before it was quantised."""
    measured = compared(asked.continued, asked.answer())
    if not measured.steps:
        return proof
    limit = QUANTIZED * measured.range
    if not measured.difference <= limit:
        raise CheckpointError(
            f"quantization moves log-probabilities by {measured.difference:.1e}, and at most {limit:.1e} is let pass "
            "(a tenth of their range); nothing was saved. Leave out --quantize"
        )
    before = f"before quantization log-probabilities differed by {proof.difference or 0.0:.1e}"
    return Proof(measured.difference, limit, (before, f"quantised, {measured.greedy}", *proof.notes[1:]))


def compared(continued: list[Continuation], answer: llama_cpp.Reply) -> LogitsAgreement:
    """What llama.cpp says along a model's greedy continuations, and what the model says.

    CheckpointError where llama.cpp computes NaN or infinite numbers.
    """
    difference, largest, same, steps = 0.0, 0.0, 0, 0
    rows = torch.cat([continuation.rows for continuation in continued])
    for found, row in zip(answer.log_probabilities, rows, strict=True):
        if not found:
            continue
        if not all(map(math.isfinite, found.values())):
            raise CheckpointError(
                "llama.cpp computes NaN or infinite numbers with this file, and the model does not: it rounds to the "
                "type of the matrices before it multiplies, in which they are too large; nothing was saved. Save the "
                "model in bfloat16 or float32 first"
            )
        ids, values = torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)
        difference = max(difference, float((values - row[ids]).abs().max()))
        largest = max(largest, float(row[ids].abs().max()))
        same += int(ids[values.argmax()]) == int(row.argmax())
        steps += 1
    return LogitsAgreement(difference, largest, float((rows.amax(1) - rows.amin(1)).max()), same, steps)


def continuations(checkpoint: Checkpoint, data: InputTexts, context: int) -> list[Continuation]:
    """Greedy continuations of the first tokens of a few texts that llama.cpp has room for in a `context`.

    NumericalError where the model computes NaN or infinite numbers.
    """
    most = min(LONGEST, context) - 1  # llama.cpp keeps one token of the context for what follows
    steps = min(STEPS, most)
    continued = []
    for prompt in prompts(data, most - steps + 1):
        ids, rows = torch.tensor([prompt], device=checkpoint.device), []
        for _ in range(steps):
            rows.append(_last_logits(checkpoint, ids).double().log_softmax(-1).cpu())
            ids = torch.cat([ids, rows[-1].argmax().to(ids).view(1, 1)], dim=1)
        whole = ids[0].tolist()
        continued.append(Continuation([whole[: len(prompt) + step] for step in range(steps)], torch.stack(rows)))
    return continued


def _last_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Logits [V] of what follows ids [1 t]."""

    def run() -> Any:
        with torch.no_grad():
            return checkpoint.model(input_ids=ids, use_cache=False).logits[0, -1]

    logits: Tensor = run()
    if not is_finite(logits, masked=True):
        refuse_overflow(checkpoint, run)
    return logits
