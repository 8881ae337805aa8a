"""How well heads time the words of recordings: OpenAI's, those that word times choose, and all of the upper half.

    pip install ".[bench]" && apt-get install espeak-ng
    python benchmarks/word_times.py

Heads are chosen on one half of the recordings, and time the words of the other half; both ways.
"""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from whisper_base import write_recordings, write_whisper

import headscope as hs
from headscope.export.alignment import aligning_heads
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import alignment_heads

RECORDINGS, HEADS, CLOSE = 50, 6, 0.2


def main() -> None:
    """Print the mean error of word begins in seconds, and the share of words that are within 0.2 seconds."""
    with TemporaryDirectory() as name:
        model = hs.load(write_whisper(Path(name) / "model"), src_lang="en", task="transcribe")
        texts = (Path(hs.__file__).parent / "assets" / "captions.en").read_text().splitlines()
        files = write_recordings(iter(texts), RECORDINGS, Path(name))
        with files["words"].open() as table:
            begins: dict[str, list[float]] = {}
            for row in csv.DictReader(table):
                begins.setdefault(row["recording"], []).append(float(row["begin"]))
        pairs = list(zip(files["source"].read_text().split(), files["target"].read_text().splitlines(), strict=True))
        upper = [HeadId(Site.CROSS, layer, head) for layer in range(3, 6) for head in range(8)]
        errors: dict[str, list[float]] = {}
        for selection, other in ((pairs[::2], pairs[1::2]), (pairs[1::2], pairs[::2])):
            recordings, transcripts = zip(*selection, strict=True)
            study = model.analyze(
                [*recordings], target=[*transcripts], only="alignment", bootstrap=100, word_times=files["words"]
            )
            best, _ = aligning_heads(study.heads, HEADS, speech=True)
            sets = {"OpenAI's": alignment_heads(model.checkpoint.model), "by word times": best, "upper half": upper}
            for kind, heads in sets.items():
                for recording, transcript in other:
                    words = model.checkpoint.word_times(recording, transcript, heads)  # type: ignore[attr-defined]
                    apart = (abs(word.begin - begin) for word, begin in zip(words, begins[recording], strict=True))
                    errors.setdefault(kind, []).extend(apart)
    for kind, values in errors.items():
        off = np.array(values)
        print(f"{kind}\t{off.mean():.3f} s\t{(off <= CLOSE).mean():.3f} within {CLOSE} s")


if __name__ == "__main__":
    main()
