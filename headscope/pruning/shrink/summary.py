"""In one line: what a smaller model saves, what it costs, and how sure that is."""

from __future__ import annotations

from pathlib import Path

from headscope.evaluation.before_after import QualityChange, verdict_words
from headscope.pruning.removal.record import Removed


def summary(removed: Removed) -> str:
    """`36 of 72 heads stay, 7.8 % fewer parameters, 16.9 % fewer FLOPs; perplexity 12.1 before, 12.6 now, …`."""
    before, after = removed.before, removed.after
    saved = [f"{after.attention_heads} of {before.attention_heads} heads stay"]
    for title, name in (("parameters", "parameters"), ("FLOPs", "flops")):
        old, new = getattr(before, name), getattr(after, name)
        saved += [f"{100 * (1 - new / old):.1f} % fewer {title}"] if old else []
    whole = next((pace for pace in removed.timings if pace.what == "forward" and pace.sentences > 1), None)
    saved += [f"{whole.speedup:.2f} × as fast"] if whole else []
    parts = [", ".join(saved)]
    if removed.quality is not None:
        parts += [values(removed.quality), verdict_words(removed.quality.record())]
    if removed.elsewhere is not None:
        parts.append(f"on a second text {values(removed.elsewhere)}")
    return "; ".join(parts)


def values(quality: QualityChange) -> str:
    """The metric before and after, and on what."""
    text = f"{quality.sentences} sentences of {Path(quality.text).name}"
    return f"{quality.title} {quality.before.value:.4g} before, {quality.after.value:.4g} now ({text})"
