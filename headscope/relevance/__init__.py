"""Relevance of attention heads: propagation rules, and the named rule sets composed of them.

- `readout`: the result per (site, layer), and the normalisation over the heads of a layer;
- `rulesets`: the contract and the registry of rule sets;
- `backward` and `gradient/`: rule sets that are modified backward passes of one forward graph (`epsilon`, `cp`,
  `attnlrp`, `gradient`), and `gim`, another one;
- `voita/`: the closed form of Voita et al. 2019.
"""
