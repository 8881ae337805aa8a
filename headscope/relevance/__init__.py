"""Relevance of attention heads: propagation rules, and the named rule sets composed of them.

- `readout`: what every rule set gives per (site, layer), and the normalisation over the heads of a layer;
- `rulesets`: the registry of rule sets; a new one is a new registration;
- `rules`, `functions`, `recording`: rule sets that are modified backward passes of one forward graph
  (`epsilon`, `cp`, `attnlrp`, `gradient`);
- `voita*`: the closed form of Voita et al. 2019.
"""
