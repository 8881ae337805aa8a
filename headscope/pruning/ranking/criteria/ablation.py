"""What is lost without a head."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Ablation(MeasuredColumn):
    """Heads whose removal alone harms the objective most stay (Michel et al. 2019, §3.2)."""

    name = "ablation"
    summary = "how much worse the objective gets without the head"
    column = "ablation"
    analysis = "ablation"
