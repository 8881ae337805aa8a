"""Build the model of a run: with new weights, or from the checkpoint of `--init`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from headscope.config import Companions
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, ConfigError, flag, raise_first, shortlist
from headscope.formats.base import open_checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig, TransformerConfig
from headscope.training.config import TrainConfig, default_of
from headscope.training.variant import Variant


def initialise_like_fairseq(model: Transformer) -> None:
    """Draw feed-forward layers, and biases of query, key and value, as torch does; other weights stay Glorot-uniform.

    fairseq does so since 0.10; until 0.9 ("glorot") all weights were Glorot-uniform, with zero biases. torch's `Linear`
    draws weights and biases from U(−1/√n, 1/√n) with n inputs: feed-forward weights are smaller than Glorot's, and a
    post-norm model learns faster (benchmarks/RESULTS.md).
    """
    from torch import nn

    from headscope.model.native.layers import Attention, FeedForward

    for module in model.modules():
        if isinstance(module, FeedForward):
            module.inner.reset_parameters()
            module.outer.reset_parameters()
        elif isinstance(module, Attention):
            for projection in (module.query, module.key, module.value):
                if projection.bias is not None and projection.in_features:
                    nn.init.uniform_(projection.bias, -(projection.in_features**-0.5), projection.in_features**-0.5)


INITIAL: Mapping[str, Callable[[Transformer], None]] = {
    "glorot": lambda model: None,
    "fairseq": initialise_like_fairseq,
}


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "context_dropout")


def fresh_config(config: TrainConfig, source: Vocabulary | None, target: Vocabulary) -> TransformerConfig:
    """The architecture that the options describe."""
    cross = config.kind == "translation"
    decoder = _stack(config, len(target), config.decoder_layers, cross=cross)
    if source is None:
        return TransformerConfig(decoder=decoder, tie_output=config.tie_output)
    return TransformerConfig(
        decoder=decoder,
        encoder=_stack(config, len(source), config.encoder_layers, cross=False),
        share_embeddings=config.vocabulary == "joint",
        tie_output=config.tie_output,
    )


def _stack(config: TrainConfig, vocabulary: int, layers: int, *, cross: bool) -> StackConfig:
    return StackConfig(
        vocabulary=vocabulary,
        d_model=config.d_model,
        d_ffn=config.d_ffn,
        d_head=config.d_model // config.heads,
        self_heads=(config.heads,) * layers,
        cross_heads=(config.heads,) * layers if cross else (),
        norm=config.norm,
        final_norm=config.norm == "pre",
        activation=config.activation,
        positions=config.positions,
        max_positions=config.max_length + 2 if config.positions == "learned" else None,
        **{name: getattr(config, name) for name in DROPOUTS},
    )


def open_init(config: TrainConfig) -> TransformerCheckpoint | None:
    """The checkpoint of `--init`, if given; CheckpointError or ConfigError for one that this run cannot train."""
    if config.init is None:
        return None
    opened = open_checkpoint(
        config.init, device="cpu", dtype="float32", companions=Companions(dicts=config.dicts, bpe=config.bpe)
    )
    if not opened.is_native:
        raise CheckpointError(
            f"{flag.init} {config.init} is {opened.format}; take one of native, fairseq, MHR or story-of-heads"
        )
    checkpoint = cast(TransformerCheckpoint, opened)
    if checkpoint.two_sided is not (config.kind == "translation"):
        kind = "translation" if checkpoint.two_sided else "lm"
        raise ConfigError(f"{flag.init} {config.init} is a model for {flag.kind} {kind}; {flag.kind} is {config.kind}")
    if checkpoint.target is None or (checkpoint.two_sided and checkpoint.source is None):
        raise CheckpointError(f"{flag.init} {config.init} has no vocabularies, so it cannot read text")
    if checkpoint.target.begin:
        raise CheckpointError(
            f"{flag.init} {config.init} begins targets with a language token, which training does not support"
        )
    init_parts = {
        "tokenizer": "its own vocabularies",
        "tokenizer_kind": "its own vocabularies",
        "initial": "its own weights, so none are drawn",
    }
    problems = {
        f"{flag.init} brings {what}; leave out {flag(name)}": getattr(config, name) != default_of(config, name)
        for name, what in init_parts.items()
    }
    shape, stack = checkpoint.model.config, checkpoint.model.config.decoder
    init_values: dict[str, Any] = {
        **{name: getattr(stack, name) for name in ("d_model", "d_ffn", "norm", "activation", "positions")},
        **{"heads": stack.most_heads, "decoder_layers": stack.layers},
        **{"vocab_size": len(checkpoint.target), "tie_output": shape.tie_output},
    }
    if shape.encoder is not None:
        init_values["encoder_layers"] = shape.encoder.layers
        init_values["vocabulary"] = "joint" if shape.share_embeddings else "separate"
    for name, value in init_values.items():
        option_value = getattr(config, name)
        problem = f"{flag.init} {config.init} has {flag(name)} {value}, not {option_value}; leave it out"
        problems[problem] = option_value not in (value, default_of(config, name))
    raise_first(ConfigError, problems)
    return checkpoint


def build_model(
    config: TrainConfig,
    variant: Variant,
    init: TransformerCheckpoint | None,
    source: Vocabulary | None,
    target: Vocabulary,
) -> Transformer:
    """The model of a variant, with the weights of `init` or new ones, and with the options' dropout."""
    if init is None:
        shape = variant.shape(fresh_config(config, source, target))
        model = Transformer(shape)
        INITIAL[config.initial](model)
    else:
        dropouts: dict[str, Any] = {name: getattr(config, name) for name in DROPOUTS}
        shape = variant.shape(init.model.config.with_stacks(partial(replace, **dropouts)))
        model = Transformer(shape)
        weights, expected = init.model.state_dict(), model.state_dict()
        missing = [key for key in expected if key not in weights and ".mixing." not in key]  # mixings may be new
        misshapen = [key for key in weights if key not in expected or expected[key].shape != weights[key].shape]
        if missing or misshapen:
            raise CheckpointError(
                f"{flag.init} {config.init} does not fit variant {variant.name}: it "
                f"{f'lacks {shortlist(missing)}' if missing else f'has other sizes of {shortlist(misshapen)}'}"
            )
        model.load_state_dict({**expected, **weights})
    variant.adapt(model, fresh=init is None)
    return model
