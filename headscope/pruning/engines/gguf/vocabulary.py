"""A tokenizer of transformers as llama.cpp stores it: SentencePiece-like BPE, or BPE over bytes.

llama.cpp knows by a name how a vocabulary splits text before merging (src/llama-vocab.cpp). Any other tokenizer is
listed without its rules, and `GgufVocabulary.splits_text` says so.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headscope.formats.huggingface.native_models.from_native import quiet_transformers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
SPLITS = {
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}": "llama-bpe",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}": "qwen2",
    rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""Regular expressions that text is split by, and llama.cpp's names of them."""


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """Tokens in the order of their ids, with llama.cpp's types and, for SentencePiece-like BPE, scores.

    `kind` and `split` are its names for how text is tokenised; `merges` those of BPE over bytes, `space_prefix` whether
    text gets a space in front. `splits_text`: llama.cpp can turn text into these tokens.
    """

    kind: str
    split: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    space_prefix: bool | None = None
    splits_text: bool = True

    @property
    def letter(self) -> int | None:
        """A token that is whole characters: of letters of English; None where there is none."""
        plain = (number for number, token in enumerate(self.tokens) if re.fullmatch("[A-Za-z]+", token))
        return next((number for number in plain if self.types[number] == NORMAL), None)


def vocabulary_of(tokenizer: Any, size: int) -> GgufVocabulary:
    """The vocabulary of a tokenizer for a model of `size` embeddings; numbered tokens where there is no tokenizer."""
    if tokenizer is None:
        return _listed({}, size)
    parts = _parts(tokenizer)
    model: dict[str, Any] = parts.get("model") or {}
    ids = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = {token["id"]: bool(token["special"]) for token in parts.get("added_tokens", [])}
    tokens, types = _tokens(ids, size, added={**added, **dict.fromkeys(special, True)})
    if model.get("type") != "BPE":
        return _listed(ids, size)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        return _sentencepiece(parts, model, merges, tokens, types, unknown=tokenizer.unk_token_id)
    split = _split_name(parts)
    return GgufVocabulary(
        kind="gpt2",
        split=split or "default",
        tokens=tokens,
        types=types,
        merges=[" ".join(part.replace(" ", chr(ord(" ") + 256)) for part in merge) for merge in merges],
        splits_text=bool(split),
    )


def _parts(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json; empty where the tokenizer is written in another way."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        tokenizer.save_pretrained(folder)
        path = Path(folder) / "tokenizer.json"
        parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return parts


def _tokens(ids: dict[str, int], size: int, *, added: dict[int, bool]) -> tuple[list[str], list[int]]:
    """Tokens and types of `size` ids; those without a token are unused."""
    by_id = {number: token for token, number in ids.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    types = [NORMAL if number in by_id else UNUSED for number in range(size)]
    for number, special in added.items():
        if number < size:
            types[number] = CONTROL if special else USER_DEFINED
    return tokens, types


def _listed(ids: dict[str, int], size: int) -> GgufVocabulary:
    """Tokens without rules, in the kind that llama.cpp writes text of without any."""
    tokens, types = _tokens(ids, size, added={})
    return GgufVocabulary(
        kind="llama", split="default", tokens=tokens, types=types, scores=[0.0] * size, splits_text=False
    )


def _sentencepiece(
    parts: dict[str, Any],
    model: dict[str, Any],
    merges: list[tuple[str, ...]],
    tokens: list[str],
    types: list[int],
    *,
    unknown: int | None,
) -> GgufVocabulary:
    """SentencePiece-like BPE: a token's score falls with the rank of the first merge that makes it.

    llama.cpp joins the two neighbours whose result has the highest score, transformers those of the lowest rank.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    types = [
        BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else kind for token, kind in zip(tokens, types, strict=True)
    ]
    if unknown is not None:
        types[unknown] = UNKNOWN
    prefix = _space_prefix(parts)
    return GgufVocabulary(
        kind="llama",
        split="default",
        tokens=tokens,
        types=types,
        scores=[-float(ranks.get(token, len(merges))) for token in tokens],
        space_prefix=bool(prefix),
        splits_text=prefix is not None,
    )


def _space_prefix(parts: dict[str, Any]) -> bool | None:
    """Whether text gets a space in front before spaces become ▁; None where it is prepared in another way."""
    steps = _steps(parts.get("normalizer")) + _steps(parts.get("pre_tokenizer"))
    prefix, marks = False, False
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            prefix = True
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁":
            marks = True
        elif step["type"] == "Metaspace" and not step.get("split", True):
            prefix, marks = step.get("prepend_scheme", "always") != "never", True
        else:
            return None
    return prefix if marks else None


def _split_name(parts: dict[str, Any]) -> str:
    """llama.cpp's name of how text is split before merging; empty where it has none."""
    steps = _steps(parts.get("pre_tokenizer"))
    if parts.get("normalizer") not in (None, {"type": "NFC"}) or not steps or steps[-1]["type"] != "ByteLevel":
        return ""
    last = steps[-1]
    if last.get("add_prefix_space"):
        return ""
    if last.get("use_regex", True):
        digits = [{"type": "Digits", "individual_digits": True}]
        return {0: "gpt-2", 1: "smollm" if steps[:-1] == digits else ""}.get(len(steps) - 1, "")
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[0].get("behavior") == "Isolated":
        return SPLITS.get(steps[0]["pattern"].get("Regex", ""), "")
    return ""


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, a sequence of which is one too."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part.get("normalizers", part.get("pretokenizers", [])) for step in _steps(inner)]
    return [part]
