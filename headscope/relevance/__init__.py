"""Relevance of attention heads: propagation rules, and the named rule sets composed of them.

- `rulesets`: the contract of a rule set, its result per (site, layer), and the registry;
- `backward` and `gradient/`: rule sets that are modified backward passes of one forward graph (`gradient`, `cp`,
  `attnlrp`, `epsilon`, `gim`);
- `voita/`: the rules of Voita et al. 2019 in closed form.
"""
