"""What criteria of moments are derived from: a question, and the inputs of every output projection."""

from typing import Any

from headscope.heads import Site
from headscope.pruning.closed_form.output_projections import OutputProjection, output_projections
from headscope.pruning.ranking.criterion import ScoringContext
from tests.oracles import closed_form as oracle
from tests.oracles import speakers

KINDS = ("bert", "llama", "t5", "marian", "native-post")


def context_of(kind: str, *, count: int = 11, **options: Any) -> ScoringContext:
    return ScoringContext(speakers.checkpoint(kind), speakers.corpus(kind, count=count), **options)


def measured(kind: str) -> tuple[dict[tuple[Site, int], Any], dict[tuple[Site, int], OutputProjection]]:
    """Inputs [n m] of every output projection that has heads, and the projection."""
    checkpoint = speakers.checkpoint(kind)
    rows = oracle.contexts(kind, checkpoint, speakers.corpus(kind))
    projections = {projection.places[0]: projection for projection in output_projections(checkpoint)}
    return {place: rows[place] for place in projections}, projections
