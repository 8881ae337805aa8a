"""What ships of the checkpoints and numbers of the original programs: `tests/data/oracles`.

`python -m tests.makers.cut_fixtures` cuts it anew out of the shared folder: a few sentences, all layers, and of the
vocabularies the pieces that these sentences have. That changes no logit, which depends on the embeddings of its own
piece and of those that are read; sums over the vocabulary (likelihoods, losses) would change, and are left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.makers.shared import SHIPPED, shared_folder

STORY_SENTENCES = (0, 1)
STORY_SITES = ("enc_self", "dec_self", "dec_enc")
STORY_TOKENS = ("src_tok_abs", "dst_tok_abs", "dst_tok_abs_nocrop", "R_enc_out", "src_tok", "dst_tok")


def cut_story(whole: Path, out: Path) -> None:
    """The model, its sentences, what it computes for them, and the gates."""
    out.mkdir(parents=True)
    for name in ("hp.json", "gates.npz"):
        shutil.copyfile(whole / name, out / name)
    texts = [json.loads((whole / "sentences.json").read_text())["sentences"][n] for n in STORY_SENTENCES]
    source = kept(range(3), *(text["src_ids"] for text in texts))
    target = kept(range(3), *(text[name] for text in texts for name in ("dst_ids", "top1_ids")))
    sides = {"src_ids": source, "dst_ids": target, "top1_ids": target}
    ids = [{name: renumbered(text[name], rows).tolist() for name, rows in sides.items()} for text in texts]
    cut_texts = [{"src": text["src"], "dst": text["dst"], **more} for text, more in zip(texts, ids, strict=True)]
    content = json.dumps({"sentences": cut_texts}, ensure_ascii=False) + "\n"
    (out / "sentences.json").write_text(content, encoding="utf-8")
    for name, rows in (("src.voc.txt", source), ("dst.voc.txt", target)):
        copy_lines(whole / name, out / name, rows)
    arrays = dict(np.load(whole / "model.npz"))
    arrays["mod/emb_inp/mat:0"] = arrays["mod/emb_inp/mat:0"][source]
    arrays["mod/emb_out/mat:0"] = arrays["mod/emb_out/mat:0"][target]
    arrays["loss_xent_lm/logits/W:0"] = arrays["loss_xent_lm/logits/W:0"][:, target]
    np.savez_compressed(out / "model.npz", **arrays)
    cut_story_numbers(whole, out, source, target)


def cut_story_numbers(whole: Path, out: Path, source: list[int], target: list[int]) -> None:
    """Logits and attention weights, and the relevance under each set of rules."""
    keys = [f"s{n:02}" for n in STORY_SENTENCES]
    forward = np.load(whole / "forward.npz")
    arrays = {f"{key}/attn_{site}": forward[f"{key}/attn_{site}"] for key in keys for site in STORY_SITES}
    arrays |= {f"{key}/inp": renumbered(forward[f"{key}/inp"], source) for key in keys}
    arrays |= {f"{key}/logits": forward[f"{key}/logits"][:, target] for key in keys}
    np.savez_compressed(out / "forward.npz", **arrays)
    names = {f"{key}/{kind}/{site}" for key in keys for kind in ("head_raw", "head_pos") for site in STORY_SITES}
    names |= {f"{key}/{name}" for key in keys for name in STORY_TOKENS}
    for path in whole.glob("lrp_*.npz"):
        relevance = np.load(path)
        np.savez_compressed(out / path.name, **{name: relevance[name] for name in relevance.files if name in names})


def kept(*ids: Iterable[int]) -> list[int]:
    """The pieces that stay, in their order."""
    return sorted({int(number) for numbers in ids for number in numbers})


def renumbered(ids: Any, rows: list[int]) -> np.ndarray:
    """Ids of the whole vocabulary as ids of the pieces that stay."""
    return np.searchsorted(rows, ids)


def copy_lines(whole: Path, out: Path, rows: Iterable[int]) -> None:
    """Some lines of a text file, which are counted from 0."""
    lines = whole.read_text(encoding="utf-8").split("\n")
    out.write_text("".join(f"{lines[row]}\n" for row in rows), encoding="utf-8")


CUTS = {"story-of-heads": cut_story}

if __name__ == "__main__":
    whole = shared_folder({"CI": "1", **os.environ}) / "oracles"
    for name, cut in CUTS.items():
        shutil.rmtree(SHIPPED / name, ignore_errors=True)
        cut(whole / name, SHIPPED / name)
