#!/usr/bin/env bash
# From a fresh copy of the source to a page about a checkpoint of your own: bash examples/first_hour.sh
# The checkpoint here is a classifier that transformers trains and saves; put your own and your text in its place.
set -euo pipefail
cd "$(dirname "$0")/.."

# Install into .venv, and see what there is.
make demo
. .venv/bin/activate

# A checkpoint of your own: what it is, what its heads do, which ones it needs.
python examples/make_classifier.py
headscope show classifier
headscope analyze classifier --source classifier.txt --labels classifier.labels --only confidence,positional,sink,ablation --report --out first --force

# Half of its heads, chosen and made up for without training, judged on text that nothing was chosen by.
headscope prune shrink classifier --keep 24 --source classifier.txt --labels classifier.labels --valid-source classifier-test.txt --set valid-labels=classifier-test.labels --out first-small --force
headscope evaluate first-small --source classifier-test.txt --labels classifier-test.labels

# transformers opens the smaller one, and one page shows it all.
python -c "from transformers import AutoModelForSequenceClassification as Auto; Auto.from_pretrained('first-small', trust_remote_code=True)"
headscope plot report first first-small --out first.html --force
echo "open first.html"
