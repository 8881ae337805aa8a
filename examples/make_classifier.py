"""Make a small classifier and its labels, to try headscope on: are the words of a caption in order?

    python examples/make_classifier.py

Every caption comes as it is written and with its words in random order, so what words there are says nothing, and heads
that see order are needed. Writes classifier (a BertForSequenceClassification on the lower four layers of the small BERT
of `pip install "headscope[demo]"`, whose upper ones forget order; its pooler and head alone are trained, on every third
caption), classifier.txt and classifier.labels to analyse and prune by, classifier-test.txt and classifier-test.labels
to judge on, a third each, and says how often the classifier is right there.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.utils import logging

import headscope as hs

NAMES = {0: "written", 1: "shuffled"}

logging.set_verbosity_error()  # the head is new, as it should be
path = hs.assets.demo_checkpoint()
torch.manual_seed(1)
classifier = BertForSequenceClassification.from_pretrained(path, num_hidden_layers=4, id2label=NAMES).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
rng = random.Random(1)


def shuffled_pair(caption: str) -> list[str]:
    """The caption as it is written, and its words in random order."""
    words = caption.lower().rstrip(".").split()
    return [caption, " ".join(rng.sample(words, len(words))) + "."]


captions = Path(hs.assets.captions("en")).read_text(encoding="utf-8").splitlines()
train, valid, test = ([text for caption in captions[part::3] for text in shuffled_pair(caption)] for part in range(3))

labels = torch.arange(len(train)) % 2
with torch.no_grad():
    states = classifier.bert(**tokenizer(train, padding=True, return_tensors="pt")).last_hidden_state
parameters = [*classifier.bert.pooler.parameters(), *classifier.classifier.parameters()]
adam = torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.1)
for _ in range(100):
    loss = torch.nn.functional.cross_entropy(classifier.classifier(classifier.bert.pooler(states)), labels)
    adam.zero_grad()
    loss.backward()
    adam.step()

classifier.save_pretrained("classifier")
tokenizer.save_pretrained("classifier")
for name, texts in (("classifier", valid), ("classifier-test", test)):
    Path(f"{name}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    Path(f"{name}.labels").write_text("\n".join(list(NAMES.values()) * (len(texts) // 2)) + "\n", encoding="utf-8")
scores = hs.evaluate("classifier", "classifier-test.txt", labels="classifier-test.labels")
print(f"accuracy {scores['accuracy'].value:.3f}, macro-F1 {scores['macro-f1'].value:.3f} on {len(test)} lines")
