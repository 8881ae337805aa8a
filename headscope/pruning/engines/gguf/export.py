"""`--export gguf`: one file for llama.cpp and what is built on it, run there before it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.writing import with_stored_dtype
from headscope.pruning.engines.base import EngineExport, EngineFile, EngineOptions, engine
from headscope.pruning.engines.gguf import llama_cpp
from headscope.pruning.engines.gguf.layers import FAMILIES, LLAMA, Decoder, check_family, context_length
from headscope.pruning.engines.gguf.proof import QUANTITY, Asked, Proof, continuations, moved, proved
from headscope.pruning.engines.gguf.vocabulary import Vocabulary
from headscope.pruning.engines.gguf.writer import write_gguf
from headscope.pruning.removal.model_inputs import InputTexts

FILE = "model.gguf"


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

    def adds_bias(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.model_type != "qwen3"

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        decoder = Decoder(checkpoint.with_model(with_stored_dtype(checkpoint)))
        vocabulary, proof = _written(checkpoint, decoder, data, folder / FILE, options)
        quantized = options.quantize != "none"
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=llama_cpp.installed(),
            quantity="log-probabilities moved by quantization by" if quantized else QUANTITY,
            difference=proof.difference,
            limit=proof.limit,
            sizes=f"architecture {decoder.container.name}" + (f", {options.quantize} matrices" if quantized else ""),
            opens=(f"`{FILE}`: llama.cpp and programs built on it (llama-cli, llama-server)", *_usage(decoder)),
            limits=_limits(decoder, vocabulary),
            notes=proof.notes,
        )


def _written(
    checkpoint: Checkpoint, decoder: Decoder, data: InputTexts, path: Path, options: EngineOptions
) -> tuple[Vocabulary, Proof]:
    """Write the file, quantised after it was proved; the vocabulary that it has, and what proves it."""
    tokenizer, unproven = getattr(checkpoint, "tokenizer", None), unproven_parts(decoder, options)
    runs, proof = bool(llama_cpp.installed()), Proof()
    if not runs:
        package = llama_cpp.PACKAGE
        advice = f'install it (pip install "{Gguf.install}")'
        _refuse_unproven(unproven, options, f"{package}, which runs the file, is not installed", advice)
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


def unproven_parts(decoder: Decoder, options: EngineOptions) -> tuple[str, ...]:
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
