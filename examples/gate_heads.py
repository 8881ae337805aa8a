"""Capture and gate the heads of a transformers model that your own program has in memory.

python examples/gate_heads.py
"""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoTokenizer

import headscope as hs

path = hs.assets.demo_checkpoint()
bert, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
inputs = tokenizer("The cat sat on the mat.", return_tensors="pt")
model = hs.load(bert, tokenizer=tokenizer)

with torch.no_grad(), model.capture("weights") as heads:
    intact = bert(**inputs).last_hidden_state[:, 0]
tokens = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
for query, weights in zip(tokens, heads["encoder-self.0.2"]["weights"][0], strict=True):  # weights [s]
    print(f"{query:>6} looks at {tokens[int(weights.argmax())]} with {float(weights.max()):.2f}")

changes = {}
for head in model.heads:
    with torch.no_grad(), model.gated([head]):
        without = bert(**inputs).last_hidden_state[:, 0]
    changes[head] = 1 - float(torch.cosine_similarity(intact, without))
for head in sorted(changes, key=changes.__getitem__, reverse=True)[:5]:
    print(f"without {head} the sentence's vector turns by {changes[head]:.4f} (1 - cosine)")

gates = torch.ones(model.layout[hs.Site.ENCODER_SELF, 2], requires_grad=True)  # gradients with respect to gates [h]
with model.gated({("encoder-self", 2): gates}):
    bert(**inputs).last_hidden_state.norm().backward()
print("gradient by the gates of layer 2:", gates.grad)
