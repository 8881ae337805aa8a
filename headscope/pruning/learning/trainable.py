"""Which parameters learn while gates do: the sides of a model that `--freeze` holds still."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.mixing.base import mixings_of
from headscope.model.native.transformer import Transformer
from headscope.model.storage.stored_weights import why_not_changed

Freeze = Literal["none", "encoder", "decoder", "model"]


def trained_parameters(checkpoint: Checkpoint, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters that learn.

    "decoder" leaves the encoder and its embeddings (Voita et al. 2019, §5.2, for heads of the encoder alone, so that
    their work cannot move to the decoder), "encoder" the rest, "model" none. A parameter that both sides use, such as
    shared embeddings, is frozen with either. Gates that the checkpoint brings along never learn. ConfigError where
    a model has one side only, and where its weights are quantised or offloaded.
    """
    model = checkpoint.model
    if freeze == "model":
        return []
    if why := why_not_changed(model):
        raise ConfigError(f"{checkpoint.path}: {why}, so they do not learn; gates alone do with --freeze model")
    gates = [mixing for _, _, mixing in mixings_of(model) if mixing.gates() is not None]
    own_gates = {id(parameter) for mixing in gates for parameter in mixing.parameters()}
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in own_gates]
    if freeze == "none":
        return parameters
    if not checkpoint.two_sided:
        raise ConfigError(f"--freeze {freeze}: this model has one side only; choose none or model")
    encoder = {id(parameter) for parameter in _encoder(model).parameters()}
    outside = _outside(model, _encoder(model))
    if freeze == "decoder":
        return [parameter for parameter in parameters if id(parameter) in encoder and id(parameter) not in outside]
    return [parameter for parameter in parameters if id(parameter) not in encoder]


def default_freeze(checkpoint: Checkpoint, sites: set[Site]) -> Freeze:
    """The paper's: the decoder where only heads of the encoder of a two-sided model are gated, else nothing."""
    return "decoder" if checkpoint.two_sided and sites == {Site.ENCODER_SELF} else "none"


def _encoder(model: nn.Module) -> nn.Module:
    if isinstance(model, Transformer):
        assert model.encoder is not None
        return model.encoder
    transformer: Any = model
    encoder: nn.Module = transformer.get_encoder()
    return encoder


def _outside(model: nn.Module, encoder: nn.Module) -> set[int]:
    """Parameters that modules outside the encoder hold."""
    inside = {id(part) for part in encoder.modules()}
    parts = [part for part in model.modules() if id(part) not in inside]
    return {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}
