"""Make a small Whisper that writes down tones, to try what docs/serving.md says about recordings.

    python examples/make_whisper.py [--updates N]

Every word is a tone of its own pitch. Writes whisper (2 + 2 layers of 4 heads), recordings/*.wav that it has not heard,
recordings.txt that names them, transcripts.txt with what is said there, and words.csv: when each word begins and ends;
says its perplexity on them. It takes three minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import wave
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging

import headscope as hs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=1200)
args = parser.parse_args()
WORDS = ["do", "re", "mi", "fa", "sol", "la", "ti", "high", "low", "flat", "sharp", "rest"]
RATE, SECONDS, BATCH, HELD_OUT = 16000, 3, 32, 40
SPECIAL = ["<pad>", "<s>", "</s>"]

logging.disable_progress_bar()
torch.manual_seed(1)
rng = np.random.default_rng(1)
pitches = np.geomspace(250, 4000, len(WORDS))  # hertz


def make_recording() -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """Samples between -1 and 1 of at most three seconds, and every word with its begin and end in seconds."""
    sound, spans, begin = rng.normal(scale=0.002, size=RATE * SECONDS), [], rng.uniform(0, 0.2)
    for word in rng.integers(len(WORDS), size=rng.integers(2, 8)):
        end = begin + rng.uniform(0.12, 0.5)
        if end > SECONDS - 0.1:
            break
        times = np.arange(int(begin * RATE), int(end * RATE))
        fade = np.minimum(1, np.minimum(times - times[0], times[-1] - times) / (0.01 * RATE))
        sound[times] += 0.3 * fade * np.sin(2 * np.pi * pitches[word] * times / RATE)
        spans.append((WORDS[word], begin, end))
        begin = end + rng.uniform(0.02, 0.2)
    return sound[: int((spans[-1][2] + 0.1) * RATE)], spans


words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(SPECIAL + WORDS)}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
extractor = WhisperFeatureExtractor(feature_size=40, sampling_rate=RATE, chunk_length=SECONDS)
config = WhisperConfig(
    vocab_size=len(tokenizer), num_mel_bins=40, max_source_positions=50 * SECONDS, max_target_positions=32,
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
model = WhisperForConditionalGeneration(config)
adam = torch.optim.Adam(model.parameters(), lr=2e-3)
rates = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, total_steps=max(args.updates, 2))
for _ in range(args.updates):
    batch = [make_recording() for _ in range(BATCH)]
    features = extractor([sound for sound, _ in batch], sampling_rate=RATE, return_tensors="pt").input_features
    texts = tokenizer([" ".join(word for word, _, _ in spans) for _, spans in batch], padding=True, return_tensors="pt")
    labels = texts.input_ids.masked_fill(texts.attention_mask == 0, -100)
    loss = model(features, decoder_input_ids=texts.input_ids[:, :-1], labels=labels[:, 1:]).loss
    adam.zero_grad()
    loss.backward()
    adam.step()
    rates.step()

for part in (model, tokenizer, extractor):
    part.save_pretrained("whisper")
Path("recordings").mkdir(exist_ok=True)
rows: list[tuple[str, str, str, str]] = []
for number in range(1, HELD_OUT + 1):
    sound, spans = make_recording()
    name = f"recordings/{number}.wav"
    rows += [(name, word, f"{begin:.3f}", f"{end:.3f}") for word, begin, end in spans]
    with wave.open(name, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((sound * 32767).astype("<i2").tobytes())
transcripts = {name: " ".join(row[1] for row in rows if row[0] == name) for name, *_ in rows}
Path("recordings.txt").write_text("".join(f"{name}\n" for name in transcripts), encoding="utf-8")
Path("transcripts.txt").write_text("".join(f"{text}\n" for text in transcripts.values()), encoding="utf-8")
with Path("words.csv").open("w", encoding="utf-8", newline="") as table:
    csv.writer(table).writerows([("recording", "word", "begin", "end"), *rows])
perplexity = hs.evaluate("whisper", "recordings.txt", target="transcripts.txt")["perplexity"].value
print(f"perplexity {perplexity:.2f} on the words of {len(transcripts)} recordings")
