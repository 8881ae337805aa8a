#!/usr/bin/env bash
# Every picture of docs/figures.md, drawn from committed runs at the root of the repository; `make gallery` types these.

headscope analyze $MODEL --parse headscope/assets/sample.conllu --importance --also ablation --no-figures --force \
  --out docs/figures/runs/gallery-bert
headscope plot heads docs/figures/runs/gallery-bert --measure confidence --measure sink --width 8 --dpi 80 \
  --force --out docs/figures/gallery-bert.png
headscope analyze headscope/assets/en-de --source headscope/assets/captions.en --target headscope/assets/captions.de \
  --parse headscope/assets/captions.conllu --target-parse headscope/assets/captions.de.conllu \
  --set alignment.alignments=headscope/assets/captions.align --importance --also ablation --no-figures --force \
  --out docs/figures/runs/gallery-en-de
headscope plot heads docs/figures/runs/gallery-en-de --measure confidence --width 8 --dpi 80 --force \
  --out docs/figures/gallery-en-de.png
headscope plot heads docs/figures/runs/bert --width 11 --dpi 90 --force --out docs/figures/heads.png
headscope plot heads docs/figures/runs/translation --measure ablation --width 11 --dpi 90 \
  --force --out docs/figures/ablation.png
headscope plot functions docs/figures/runs/bert --width 10 --dpi 90 --force \
  --out docs/figures/functions.png
headscope plot positional docs/figures/runs/bert --width 11 --dpi 80 --force \
  --out docs/figures/positional.png
headscope plot syntactic docs/figures/runs/bert --width 11 --dpi 80 --force \
  --out docs/figures/syntactic.png
headscope plot alignment docs/figures/runs/aligned --width 11 --dpi 80 --force \
  --out docs/figures/alignment.png
headscope plot explained docs/figures/runs/explained --width 11 --dpi 80 --force \
  --out docs/figures/explained.png
headscope plot similarity docs/figures/runs/bert --width 9 --dpi 80 --force \
  --out docs/figures/similarity.png
headscope plot attention docs/figures/runs/translation --heads cross.1.0,cross.2.2,cross.2.6 \
  --sentence "A man in a blue shirt is standing on a ladder." \
  --target "Ein Mann in einem blauen Hemd steht auf einer Leiter." --width 14 --dpi 70 --force \
  --out docs/figures/attention.png
headscope plot glance docs/figures/runs/translation \
  --sentence "A man in a blue shirt is standing on a ladder." \
  --target "Ein Mann in einem blauen Hemd steht auf einer Leiter." --width 13 --dpi 70 --force \
  --out docs/figures/glance.png
headscope plot needs docs/figures/runs/gallery-en-de docs/figures/runs/gallery-bert --width 13 --dpi 70 --force \
  --out docs/figures/needs.png
headscope plot rankings docs/figures/runs/translation --width 10 --dpi 90 --force \
  --out docs/figures/rankings.png
headscope plot faithfulness docs/figures/runs/translation --width 13 --dpi 70 --force \
  --out docs/figures/faithfulness.png
headscope plot compare docs/figures/runs/experts docs/figures/runs/mixed --width 11 --dpi 80 \
  --force --out docs/figures/compare.png
headscope plot pruning benchmarks/pruning/all --width 10 --dpi 90 --force \
  --out docs/figures/quality.png
headscope plot pruning benchmarks/pruning/all --figure sites --width 12 --dpi 70 --force \
  --out docs/figures/sites.png
headscope plot pruning benchmarks/pruning/encoder --figure layers --width 12 --dpi 60 --force \
  --out docs/figures/kept-layers.png
headscope plot pruning benchmarks/pruning/relabelled --figure functions --width 12 --dpi 70 --force \
  --out docs/figures/survivors.png
headscope plot pruning docs/figures/runs/l0 --figure gates --width 7 --dpi 90 --force \
  --out docs/figures/l0.png
headscope plot training docs/figures/runs/baseline docs/figures/runs/mae docs/figures/runs/mixing \
  --width 14.8 --dpi 64 --force --out docs/figures/training.png
headscope plot confidence docs/figures/runs/mixing --width 9 --dpi 80 --force \
  --out docs/figures/confidence.png
headscope plot discrepancy docs/figures/runs/heads-baseline docs/figures/runs/heads-mixing \
  --width 9 --dpi 80 --force --out docs/figures/discrepancy.png
headscope plot transfer docs/figures/runs/transfer/gates-0.25 docs/figures/runs/transfer/gates-1 \
  docs/figures/runs/transfer/gates-output-0.25 docs/figures/runs/transfer/gates-output-1 --width 7 --dpi 80 --force \
  --out docs/figures/transfer.png
headscope plot alphas tests/data/oracles/mhr/alpha/checkpoint_best.pt --width 9 --dpi 80 --force \
  --out docs/figures/alphas.png
headscope plot gates docs/figures/runs/mae --width 11 --dpi 80 --force --out docs/figures/gates.png
headscope plot experts docs/figures/runs/experts --width 11 --dpi 80 --force \
  --out docs/figures/experts.png
