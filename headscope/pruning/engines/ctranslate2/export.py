"""`--export ctranslate2`: a folder for CTranslate2, which translates with it before it is kept."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.errors import CheckpointError, one_line
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.generation import alignment_heads
from headscope.model.forward import ModelInputs, outputs
from headscope.pruning.engines.base import (
    FULL,
    QUANTITY,
    EngineExport,
    EngineFile,
    EngineOptions,
    EngineRun,
    engine,
    refuse_difference,
)
from headscope.pruning.engines.ctranslate2.alignment import align
from headscope.pruning.engines.ctranslate2.specification import specification
from headscope.pruning.engines.ctranslate2.translations import source_tokens, translated
from headscope.pruning.engines.ctranslate2.translators import (
    TranslatorTokens,
    check_translator,
    translator_of,
    write_splitters,
)
from headscope.pruning.model_inputs import InputTexts

FOLDER = "ctranslate2"
TIMED = 32  # tokens that each translation has where it is timed


@engine
class CTranslate2(EngineExport):
    """Translation models whose stacks have one number of heads each."""

    name = "ctranslate2"
    summary = "a folder for CTranslate2, of translation models"
    install = "headscope[engines]"
    packages = ("ctranslate2",)
    endings = ("bin",)

    def check(self, checkpoint: Checkpoint) -> None:
        check_translator(checkpoint)

    def fits(self, checkpoint: Checkpoint) -> None:
        specification(translator_of(checkpoint))

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, options: EngineOptions) -> EngineFile:
        translator = translator_of(checkpoint)
        spec = specification(translator)
        path = folder / FOLDER
        path.mkdir()
        spec.save(str(path))
        aligned = align(path, named) if (named := alignment_heads(checkpoint.model)) else []
        splitters = write_splitters(checkpoint, path)
        with _running():
            engine = _opened(path)
            difference, largest = scored(engine, checkpoint, translator.tokens, data)
            limit = FULL * max(1.0, largest)
            refuse_difference(difference, limit, "CTranslate2", QUANTITY)
            notes = translated(engine, checkpoint, translator, data, limit=FULL)
        encoder, decoder = translator.config.encoder, translator.config.decoder
        assert encoder is not None
        return EngineFile(
            export=self.name,
            file=FOLDER,
            runtime=f"CTranslate2 {importlib.metadata.version('ctranslate2')}",
            quantity=QUANTITY,
            difference=difference,
            limit=limit,
            sizes=f"{encoder.most_heads} heads in the encoder, {decoder.most_heads} in the decoder",
            opens=(
                f"`{FOLDER}`: CTranslate2 (`ctranslate2.Translator`, on tokens)",
                *_usage(translator.tokens),
                f"`return_attention` is {'the mean over ' if aligned else ''}"
                f"{', '.join(map(str, aligned)) or 'the first head of the last layer (`analyze --write-alignment`)'}",
            ),
            limits=() if splitters else (f"`{FOLDER}` has no file that splits text: give tokens",),
            notes=notes,
        )

    @contextmanager
    def running(self, file: EngineFile, checkpoint: Checkpoint, data: InputTexts, folder: Path) -> Iterator[EngineRun]:
        translator = translator_of(checkpoint)
        ids, _ = _sides(checkpoint, data.feeds[len(data.feeds) // 2])
        sources = [source_tokens(each, translator.tokens) for each in ids]
        steps = min(TIMED, (translator.config.decoder.max_positions or TIMED + 2) - 2)
        length = {"min_decoding_length": steps, "max_decoding_length": steps}
        engine = _opened(folder / file.file, threads=torch.get_num_threads())

        def work() -> int:
            return sum(len(each.hypotheses[0]) for each in engine.translate_batch(sources, beam_size=1, **length))

        with _running():
            yield EngineRun(what=f"greedy, {steps} tokens each", sentences=len(sources), work=work)


def _usage(tokens: TranslatorTokens) -> tuple[str, ...]:
    end = "" if tokens.adds_end else f"; sources end with {tokens.end}, as the tokenizer gives them"
    never = "" if tokens.pad is None else f'; should it say {tokens.pad}: `suppress_sequences=[["{tokens.pad}"]]`'
    return (
        f"its tokens are those of the vocabularies beside it{end}{never}",
        "its scores leave out how probable an empty translation is; with `min_decoding_length=0` they are headscope's",
    )


@contextmanager
def _running() -> Iterator[None]:
    """CheckpointError for what CTranslate2 raises."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        detail = one_line(error)[:200]
        raise CheckpointError(f"CTranslate2 does not run what was written ({detail}); nothing was saved") from error


def _opened(path: Path, *, threads: int = 1) -> Any:
    engine = importlib.import_module("ctranslate2")
    return engine.Translator(str(path), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)


def scored(engine: Any, checkpoint: Checkpoint, tokens: TranslatorTokens, data: InputTexts) -> tuple[float, float]:
    """The largest difference of log-probabilities of whole texts, and the largest of them."""
    difference, largest = 0.0, 0.0
    end = tokens.target.index(tokens.end)
    for batch in data.feeds:
        sources, targets = _sides(checkpoint, batch)
        logits = outputs(checkpoint.model, batch).double().log_softmax(-1).cpu()
        following = torch.tensor([number for ids in targets for number in (*ids[1:], end)])
        wanted = logits.gather(1, following[:, None])[:, 0]
        found = engine.score_batch(
            [source_tokens(ids, tokens) for ids in sources], [[tokens.target[n] for n in ids[1:]] for ids in targets]
        )
        scores = torch.tensor([value for result in found for value in result.log_probs], dtype=torch.float64)
        difference = max(difference, float((scores - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return difference, largest


def _sides(checkpoint: Checkpoint, batch: ModelInputs) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of a batch without padding: sources, and what the decoder reads."""
    names = ("source", "source_mask", "target", "target_mask")
    if not checkpoint.is_native:
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    values = [batch.arguments[name].cpu() for name in names]
    return _rows(values[0], values[1]), _rows(values[2], values[3])


def _rows(ids: Tensor, real: Tensor) -> list[list[int]]:
    return [row[mask.bool()].tolist() for row, mask in zip(ids, real, strict=True)]
