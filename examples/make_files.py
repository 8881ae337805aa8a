"""Make the files that pages and recipes name, from what the repository has: CKPT, train.en, val.de and the others.

    python examples/make_files.py
    python examples/make_files.py --train 24 --val 6 --test 3

CKPT is the translation model that ships. train, val and test are parts of the captions, in English, German and (of
val.conllu) parsed; recipe.toml trains such a model from scratch. checkpoint_best.pt (with data and codes) and
model.npz (with hp.json, voc, story.en and story.de) are small checkpoints of the MHR fork and of story-of-heads.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import headscope as hs

ORACLES = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracles"
MHR, STORY, PAIR = ORACLES / "mhr", ORACLES / "story-of-heads", Path(hs.assets.trained_model())
FILES = {
    "CKPT": PAIR,
    "codes": PAIR / "source.codes",
    "checkpoint_best.pt": MHR / "alpha" / "checkpoint_best.pt",
    "data": MHR / "data",
    "model.npz": STORY / "model.npz",
    "hp.json": STORY / "hp.json",
    "voc/src.voc.txt": STORY / "src.voc.txt",
    "voc/dst.voc.txt": STORY / "dst.voc.txt",
}
RECIPE = 'preset = "small"\nd-model = 128\nd-ffn = 256\nupdates = 200\nbleu-every = 0\n'

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for part, count in (("train", 140), ("val", 60), ("test", 40)):
    parser.add_argument(f"--{part}", type=int, default=count, help="sentences")
sizes = vars(parser.parse_args())

for name, path in FILES.items():
    Path(name).parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, name, dirs_exist_ok=True)
    else:
        shutil.copy(path, name)

captions = hs.assets.captions("en")
for kind, end in (("en", "\n"), ("de", "\n"), ("conllu", "\n\n")):
    sentences = captions.with_suffix(f".{kind}").read_text(encoding="utf-8").strip().split(end)
    first = 0
    for part, count in sizes.items():
        Path(f"{part}.{kind}").write_text(end.join(sentences[first : first + count]) + end, encoding="utf-8")
        first += count

pairs = json.loads((STORY / "sentences.json").read_text(encoding="utf-8"))["sentences"]
for language, side in (("en", "src"), ("de", "dst")):
    Path(f"story.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
Path("recipe.toml").write_text(RECIPE, encoding="utf-8")
print("made", ", ".join(sorted([*FILES, "recipe.toml", "story.en", "story.de", *(f"{part}.en" for part in sizes)])))
