"""Validation: -log p of the validation text, and BLEU of its translations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headscope.evaluation.metrics.base import TextMode
from headscope.evaluation.metrics.perplexity import perplexity
from headscope.evaluation.quality import text_score
from headscope.evaluation.translation import translate_lines
from headscope.formats.translate_options import TranslateOptions
from headscope.training.files.checkpoints import checkpoint
from headscope.training.losses.cross_entropy import Sums
from headscope.training.run_state import TrainingRun

LENGTHS = TranslateOptions(max_ratio=1.2, max_extra=10)  # an untrained model would not stop by itself


@dataclass(frozen=True)
class Validation:
    """Mean -log p per target token in nats and sacreBLEU's BLEU; None where there is no text, or not this time."""

    nll: float | None = None
    bleu: float | None = None

    @property
    def perplexity(self) -> float | None:
        """exp(nll)."""
        return None if self.nll is None else float(perplexity(self.nll))

    def value(self, by: Literal["loss", "bleu"]) -> float:
        """What is compared, lower is better."""
        if by == "bleu" and self.bleu is not None:
            return -self.bleu
        assert self.nll is not None
        return self.nll


def validate(run: TrainingRun, *, number: int) -> Validation:
    """The `number`-th validation (from 1) of a run; the first process works, all get the result."""
    validation = None
    if run.processes.main:
        total = Sums()
        for batch in run.validation():
            total = total.plus(run.measure(batch))
        interval = run.config.bleu_every
        bleu_due = bool(interval) and number % interval == 0 and run.data.valid_texts is not None
        validation = Validation(
            total.nll / total.tokens if total.tokens else None, validation_bleu(run) if bleu_due else None
        )
    return run.processes.broadcast(validation)


def validation_bleu(run: TrainingRun) -> float:
    """BLEU of the validation text: of raw text as it is, or of text that `--normalise moses` has tokenised."""
    assert run.data.valid_texts is not None
    sources, references = (texts[: run.config.bleu_sentences] for texts in run.data.valid_texts)
    run.model.eval()
    with run.autocast():
        translated = translate_lines(checkpoint(run), sources, options=LENGTHS, tokens=min(run.config.max_tokens, 4096))
        hypotheses = [translation[0].text for translation in translated]
    low = run.config.normalise in ("lowercase", "moses-lowercase")
    if low:
        hypotheses, references = [text.lower() for text in hypotheses], [text.lower() for text in references]
    mode: TextMode = "tokenised-lowercase" if run.config.normalise.startswith("moses") else "raw"
    return text_score("bleu", hypotheses, references, text=mode).value
