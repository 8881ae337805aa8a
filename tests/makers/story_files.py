"""Files of story-of-heads checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np

TOLD: dict[str, Any] = {"res_steps": "nlda", "rescale_emb": False}  # what arrays do not tell, beside the heads
HP: dict[str, Any] = TOLD | {"num_layers": 2, "num_heads": 2, "hid_size": 10, "normalize_out": True}


def written(folder: Path, hp: dict[str, Any], arrays: dict[str, Any], words: tuple[int, int] = (7, 11)) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "model.npz", **arrays)
    (folder / "hp.json").write_text(json.dumps(hp))
    for name, count in zip(("src", "dst"), words, strict=True):
        pieces = ["_BOS_", "_EOS_", "_UNK_", *(f"{name}{n}" for n in range(3, count))]
        (folder / f"{name}.voc.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return folder / "model.npz"
