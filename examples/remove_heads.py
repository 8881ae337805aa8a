"""Which heads of a translation model can go? Rank them in three ways, remove a third of them, compare.

    python examples/remove_heads.py [CHECKPOINT SOURCE TARGET]

Without arguments: the English–German model and the captions that ship with headscope.
"""

from __future__ import annotations

import sys

import headscope as hs

defaults = [hs.assets.trained_model(), hs.assets.captions("en"), hs.assets.captions("de")]
checkpoint, source, target = map(str, sys.argv[1:4] or defaults)

model = hs.load(checkpoint)
number = len(model.heads) // 3
intact = model.evaluate(source, target=target, metrics="perplexity")["perplexity"]
print(f"all {len(model.heads)} heads: perplexity {intact.value:.2f} ({intact.low:.2f} to {intact.high:.2f})")

for by in ("gradient", "confidence", "random"):
    ranking = model.rank(by=by, text=source, target=target, max_sentences=100)
    small = model.remove(ranking.lowest(number))
    score = small.evaluate(source, target=target, metrics="perplexity")["perplexity"]
    saving = 1 - small.sizes["after"]["parameters"] / small.sizes["before"]["parameters"]
    print(f"{number} heads fewer by {by}: perplexity {score.value:.2f}, {100 * saving:.0f} % fewer parameters")
    small.save(f"small-{by}", force=True)
