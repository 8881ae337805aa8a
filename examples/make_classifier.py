"""Make a small classifier and its labels, to try headscope on: which captions speak of a woman or girl?

    python examples/make_classifier.py

Writes classifier (a BertForSequenceClassification on the small BERT of `pip install "headscope[demo]"`; its head alone
is trained, on every third caption), classifier.txt and classifier.labels to analyse and prune by, classifier-test.txt
and classifier-test.labels to judge on, a third each, and says how often the classifier is right there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.utils import logging

import headscope as hs

WOMEN = {"woman", "women", "girl", "girls", "lady", "ladies", "she", "her"}

logging.set_verbosity_error()  # the head is new, as it should be
path = hs.assets.demo_checkpoint()
torch.manual_seed(1)
classifier = BertForSequenceClassification.from_pretrained(path, id2label={0: "other", 1: "woman"}).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
texts = Path(hs.assets.captions("en")).read_text(encoding="utf-8").splitlines()
labels = torch.tensor([int(bool(WOMEN & set(text.lower().rstrip(".").split()))) for text in texts])

with torch.no_grad():
    pooled = classifier.bert(**tokenizer(texts[::3], padding=True, return_tensors="pt")).pooler_output
adam = torch.optim.Adam(classifier.classifier.parameters(), lr=0.05)
for _ in range(200):
    loss = torch.nn.functional.cross_entropy(classifier.classifier(pooled), labels[::3])
    adam.zero_grad()
    loss.backward()
    adam.step()

classifier.save_pretrained("classifier")
tokenizer.save_pretrained("classifier")
names = [classifier.config.id2label[label] for label in labels.tolist()]
for name, part in (("classifier", slice(1, None, 3)), ("classifier-test", slice(2, None, 3))):
    Path(f"{name}.txt").write_text("\n".join(texts[part]) + "\n", encoding="utf-8")
    Path(f"{name}.labels").write_text("\n".join(names[part]) + "\n", encoding="utf-8")
scores = hs.evaluate("classifier", "classifier-test.txt", labels="classifier-test.labels")
print(f"accuracy {scores['accuracy'].value:.3f}, macro-F1 {scores['macro-f1'].value:.3f} on {len(texts) // 3} captions")
