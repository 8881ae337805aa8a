"""What ships of the checkpoints and numbers of the original programs: `tests/data/oracles`.

`python -m scripts.cut_fixtures` cuts it anew out of the shared folder: two sentences of each program, all layers,
and of the vocabularies the pieces that these sentences have. That changes no logit, which depends on the embeddings of
its own piece and of those that are read; sums over the vocabulary (likelihoods, losses) would change, and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.makers.shared import SHIPPED_FOLDER, shared_folder

STORY_SENTENCES = (0, 1)
STORY_SITES = ("enc_self", "dec_self", "dec_enc")
STORY_TOKENS = ("src_tok_abs", "dst_tok_abs", "dst_tok_abs_nocrop", "R_enc_out")
MHR_SENTENCES = (0, 2)
MHR_SPECIAL = 4  # pieces that come before those of fairseq's dictionary file


def cut_story(original: Path, out: Path) -> None:
    """The model, its sentences, what it computes for them, and the gates."""
    out.mkdir(parents=True)
    for name in ("hp.json", "gates.npz"):
        shutil.copyfile(original / name, out / name)
    texts = [json.loads((original / "sentences.json").read_text())["sentences"][n] for n in STORY_SENTENCES]
    source = kept_rows(range(3), *(text["src_ids"] for text in texts))
    target = kept_rows(range(3), *(text[name] for text in texts for name in ("dst_ids", "top1_ids")))
    sides = {"src_ids": source, "dst_ids": target, "top1_ids": target}
    ids = [{name: renumber(text[name], rows).tolist() for name, rows in sides.items()} for text in texts]
    cut_texts = [{"src": text["src"], "dst": text["dst"], **more} for text, more in zip(texts, ids, strict=True)]
    content = json.dumps({"sentences": cut_texts}, ensure_ascii=False) + "\n"
    (out / "sentences.json").write_text(content, encoding="utf-8")
    for name, rows in (("src.voc.txt", source), ("dst.voc.txt", target)):
        copy_lines(original / name, out / name, rows)
    arrays = dict(np.load(original / "model.npz"))
    arrays["mod/emb_inp/mat:0"] = arrays["mod/emb_inp/mat:0"][source]
    arrays["mod/emb_out/mat:0"] = arrays["mod/emb_out/mat:0"][target]
    arrays["loss_xent_lm/logits/W:0"] = arrays["loss_xent_lm/logits/W:0"][:, target]
    np.savez_compressed(out / "model.npz", **arrays)
    cut_story_numbers(original, out, source, target)


def cut_story_numbers(original: Path, out: Path, source: list[int], target: list[int]) -> None:
    """Logits and attention weights, and the relevance under each set of rules."""
    keys = [f"s{n:02}" for n in STORY_SENTENCES]
    forward = np.load(original / "forward.npz")
    arrays = {f"{key}/attn_{site}": forward[f"{key}/attn_{site}"] for key in keys for site in STORY_SITES}
    arrays |= {f"{key}/inp": renumber(forward[f"{key}/inp"], source) for key in keys}
    arrays |= {f"{key}/logits": forward[f"{key}/logits"][:, target] for key in keys}
    np.savez_compressed(out / "forward.npz", **arrays)
    names = {f"{key}/{kind}/{site}" for key in keys for kind in ("head_raw", "head_pos") for site in STORY_SITES}
    names |= {f"{key}/{name}" for key in keys for name in STORY_TOKENS}
    for path in original.glob("lrp_[ae]*.npz"):
        relevance = np.load(path)
        np.savez_compressed(out / path.name, **{name: relevance[name] for name in relevance.files if name in names})


def cut_mhr(original: Path, out: Path) -> None:
    """The model, its sentences, what it computes for them, its alphas as the fork wrote them, a schedule of swaps."""
    for folder in ("data", "alpha/oracle", "alpha/generate"):
        (out / folder).mkdir(parents=True)
    for name in ("data/swap.json", "alpha/generate/alphas_eval.pkl"):
        shutil.copyfile(original / name, out / name)
    logits = np.load(original / "alpha/oracle/tf_logits.npz")
    source = kept_rows(range(MHR_SPECIAL), *(logits[f"src_{n}"] for n in MHR_SENTENCES))
    target = kept_rows(range(MHR_SPECIAL), *(logits[f"{name}_{n}"] for name in ("prev", "tgt") for n in MHR_SENTENCES))
    for language, rows in (("de", source), ("en", target)):
        numbers = [row - MHR_SPECIAL for row in rows[MHR_SPECIAL:]]
        copy_lines(original / f"data/dict.{language}.txt", out / f"data/dict.{language}.txt", numbers)
        copy_lines(original / f"data/test.bpe.{language}", out / f"data/test.bpe.{language}", MHR_SENTENCES)
    with torch.serialization.safe_globals([argparse.Namespace]):
        checkpoint = torch.load(original / "alpha" / "checkpoint_best.pt", weights_only=True)
    state = checkpoint["model"]
    state["encoder.embed_tokens.weight"] = state["encoder.embed_tokens.weight"][source]
    tied = state["decoder.embed_tokens.weight"][target]
    state |= {"decoder.embed_tokens.weight": tied, "decoder.output_projection.weight": tied}
    torch.save(checkpoint, out / "alpha" / "checkpoint_best.pt")
    cut_mhr_numbers(original / "alpha" / "oracle", out / "alpha" / "oracle", source, target)


def cut_mhr_numbers(original: Path, out: Path, source: list[int], target: list[int]) -> None:
    """Logits, attention weights, and the confidences and distances of heads."""
    logits, attention, stats = (np.load(original / f"tf_{name}.npz") for name in ("logits", "attention", "stats"))
    arrays: dict[str, Any] = {}
    for new, n in enumerate(MHR_SENTENCES):
        arrays[f"src_{new}"] = renumber(logits[f"src_{n}"], source)
        arrays[f"prev_{new}"] = renumber(logits[f"prev_{n}"], target)
        arrays[f"logits_{new}"] = logits[f"logits_{n}"][:, target]
    np.savez_compressed(out / "tf_logits.npz", **arrays)
    modules = [name.removeprefix("0/") for name in attention.files if name.startswith("0/")]
    arrays = {
        f"{new}/{module}": attention[f"{n}/{module}"] for new, n in enumerate(MHR_SENTENCES) for module in modules
    }
    np.savez_compressed(out / "tf_attention.npz", **arrays)
    np.savez_compressed(out / "tf_stats.npz", **{name: stats[name][list(MHR_SENTENCES)] for name in stats.files})


def kept_rows(*ids: Iterable[int]) -> list[int]:
    """The pieces that stay, in their order."""
    return sorted({int(number) for numbers in ids for number in numbers})


def renumber(ids: Any, rows: list[int]) -> np.ndarray:
    """Ids of the whole vocabulary as ids of the pieces that stay."""
    numbers: np.ndarray = np.searchsorted(rows, ids)
    return numbers


def copy_lines(original: Path, out: Path, rows: Iterable[int]) -> None:
    """Some lines of a text file, which are counted from 0."""
    lines = original.read_text(encoding="utf-8").split("\n")
    out.write_text("".join(f"{lines[row]}\n" for row in rows), encoding="utf-8")


CUTS = {"mhr": cut_mhr, "story-of-heads": cut_story}

if __name__ == "__main__":
    original = shared_folder({"CI": "1", **os.environ}) / "oracles"
    for name, cut_fixture in CUTS.items():
        shutil.rmtree(SHIPPED_FOLDER / name, ignore_errors=True)
        cut_fixture(original / name, SHIPPED_FOLDER / name)
