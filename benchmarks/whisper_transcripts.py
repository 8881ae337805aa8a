"""Whether Whisper-base is read and scored as transformers does it: transcripts, BLEU and perplexity of recordings.

    pip install ".[bench]" && apt-get install espeak-ng
    python benchmarks/whisper_transcripts.py

Greedy search. transformers' loss is that of its forward pass, language and task among the labels.
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sacrebleu
import soundfile
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from whisper_base import RATE, write_recordings, write_whisper

import headscope as hs

RECORDINGS = 25


def main() -> None:
    """Print both programs' numbers, and on how many recordings their transcripts are the same."""
    with TemporaryDirectory() as name:
        folder = write_whisper(Path(name) / "model")
        texts = (Path(hs.__file__).parent / "assets" / "captions.en").read_text().splitlines()
        files = write_recordings(iter(texts), RECORDINGS, Path(name))
        recordings, references = (files[side].read_text().splitlines() for side in ("source", "target"))
        theirs, loss = run_transformers(folder, recordings, references)
        model = hs.load(folder, src_lang="en", task="transcribe")
        scores = model.evaluate(recordings, target=references, metrics=("bleu", "perplexity"), beam=1)
    ours = scores.sentences["hypothesis"]
    matches = sum(mine.strip() == text.strip() for mine, text in zip(ours, theirs, strict=True))
    bleu = sacrebleu.corpus_bleu([text.strip() for text in theirs], [references]).score
    print(f"{matches} of {len(theirs)} transcripts are the same")
    print(f"BLEU {scores['bleu'].value:.4f}, by transformers and sacrebleu {bleu:.4f}")
    print(f"perplexity {scores['perplexity'].value:.6f}, by transformers {math.exp(loss):.6f}")


def run_transformers(folder: Path, recordings: list[str], references: list[str]) -> tuple[list[str], float]:
    """Transcripts by Whisper's own `generate`, and the mean loss of a token of the references."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor: Any = WhisperProcessor.from_pretrained(folder)
    processor.tokenizer.set_prefix_tokens(language="en", task="transcribe")
    transcripts, total, count = list[str](), 0.0, 0
    with torch.no_grad():
        for recording, reference in zip(recordings, references, strict=True):
            sound, rate = soundfile.read(recording, dtype="float32")
            assert rate == RATE
            features = processor(sound, sampling_rate=rate, return_tensors="pt").input_features
            output = model.generate(features, language="en", task="transcribe", num_beams=1)
            transcripts += processor.batch_decode(output, skip_special_tokens=True)
            ids = processor.tokenizer(reference, return_tensors="pt").input_ids
            labels = ids[:, 1:]
            loss = model(features, decoder_input_ids=ids[:, :-1], labels=labels).loss
            total, count = total + float(loss) * labels.shape[1], count + labels.shape[1]
    return transcripts, total / count


if __name__ == "__main__":
    main()
