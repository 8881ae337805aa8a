"""The site and layer of every call of `attend`, found by probing the model, not from names of modules.

A probe of a few tokens is sent through the model. Sites follow from shapes and weights: source and target of the probe
differ in length, and a decoder's weights are lower triangular. This works for every architecture that calls the
attention interface, also if layers share one module (ALBERT) or only some layers have attention. The same probe
compares `attend` with the model's own eager attention; a model that bypasses the interface, or gives another output, is
refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError, reason_of
from headscope.heads import SITES, Layout, Site, SiteLayer
from headscope.model.attention import CONTEXTS, AttentionCall, holding, is_half, refuse_head_masks, tap_contexts
from headscope.model.interface import (
    features_shape,
    reads_sound,
    suppress_warnings,
    takes,
    text_config,
    through_attend,
    vocabulary_size,
    watch_modules,
    why_no_call,
)
from headscope.model.nonfinite import is_finite
from headscope.model.stored_weights import computing_dtype, execution_device, quantised_by

SOURCE_LENGTH, TARGET_LENGTH = 5, 3
ADVICE = "open a part of it: save that with save_pretrained, and the tokenizer"


@dataclass(frozen=True)
class AttentionSite:
    """One attention call of a forward pass: `heads` query heads, `groups` key/value groups, `width` per head."""

    site: Site
    layer: int
    heads: int
    groups: int
    width: int
    name: str

    @property
    def site_layer(self) -> SiteLayer:
        """Site and layer."""
        return self.site, self.layer

    def group_heads(self, group: int) -> range:
        """The numbers of the query heads of a key/value group; of all heads where there are no groups."""
        shared = self.heads // max(self.groups, 1)
        return range(group * shared, (group + 1) * shared)


@dataclass(frozen=True)
class AttentionSites:
    """All attention calls of a model, in the order of a forward pass.

    `calls` maps the id of an attention module to the sites of its successive calls (several if layers share it).
    `tied` are groups of sites with different modules but the same weights (Zamba2).
    """

    order: tuple[AttentionSite, ...]
    calls: dict[int, tuple[AttentionSite, ...]]
    tied: tuple[tuple[AttentionSite, ...], ...] = ()

    @property
    def layout(self) -> Layout:
        """Number of heads of every (site, layer)."""
        return {attention_site.site_layer: attention_site.heads for attention_site in self.order}

    @property
    def modules(self) -> list[tuple[AttentionSite, ...]]:
        """The sites of each set of weights: those of one module, or of several tied modules."""
        tied = {attention_site for sites in self.tied for attention_site in sites}
        return [*self.tied, *(calls for calls in self.calls.values() if calls[0] not in tied)]

    def at(self, site: Site) -> list[AttentionSite]:
        """The attention of one site, by layer."""
        return sorted(
            (attention_site for attention_site in self.order if attention_site.site is site),
            key=lambda attention_site: attention_site.layer,
        )


@dataclass
class CallTracker:
    """Maps each attention call of a forward pass to its site, by the order of calls."""

    attention_sites: AttentionSites
    turns: Counter[int] = field(default_factory=Counter)

    def attention_site(self, module: nn.Module) -> AttentionSite | None:
        """The site of this call. Returns None if `module` is not of this model."""
        sites = self.attention_sites.calls.get(id(module))
        if sites is None:
            return None
        turn = self.turns[id(module)] % len(sites)
        self.turns[id(module)] += 1
        return sites[turn]

    def restart(self, _: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        """A forward pre-hook: the next call of each module is its first of a new pass."""
        refuse_head_masks(arguments)
        self.turns.clear()


@contextmanager
def track_calls(model: nn.Module) -> Iterator[CallTracker]:
    """Within the block `model` computes attention with `attend`, and the tracker maps each call to its site."""
    attention_sites = find_attention(model)
    if any(part.training and getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise CheckpointError("gradient checkpointing runs layers a second time, unseen; call model.eval() first")
    tracker = CallTracker(attention_sites)
    with ExitStack() as stack:
        stack.enter_context(through_attend(model))
        for part in {id(part): part for part in (model, base_of(model))}.values():
            stack.callback(part.register_forward_pre_hook(tracker.restart, with_kwargs=True).remove)
        yield tracker


_SITES_OF_MODELS: WeakKeyDictionary[nn.Module, tuple[list[Any], AttentionSites]] = WeakKeyDictionary()


def find_attention(model: nn.Module) -> AttentionSites:
    """The attention sites of a model: as it declares them, else found by a probe.

    They are cached until a module changes, or the shape of a weight; biases do not matter.
    """
    declares: Callable[[], AttentionSites] | None = getattr(model, "declared_attention", None)
    if declares is not None:  # a native Transformer
        return declares()
    build = [
        (id(part), [weights.shape for weights in part.parameters(recurse=False) if weights.dim() > 1])
        for part in model.modules()
    ]
    entry = _SITES_OF_MODELS.get(model)
    if entry is None or entry[0] != build:
        entry = _SITES_OF_MODELS[model] = (build, probe(model))
    return entry[1]


def base_of(model: nn.Module) -> nn.Module:
    """The model without its task head, since a vocabulary-wide output layer costs as much as a small encoder.

    The whole model if its `base_model` does not take the model's inputs, being only its layers (DINOv3).
    """
    base: nn.Module = getattr(model, "base_model", model)
    return base if takes(base, getattr(base, "main_input_name", "input_ids")) else model


def is_two_sided(model: nn.Module) -> bool:
    """Whether a model has an encoder and a decoder; the config alone may say so for an encoder cut out of both."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and takes(base_of(model), "decoder_input_ids")


def probe(model: nn.Module) -> AttentionSites:
    """Find the attention sites by a probe through `attend`, and compare its output with that of eager attention.

    CheckpointError if there is no call, if the encoder or decoder bypasses the interface, if a layer calls attention
    more than once, or if the two outputs differ.
    """
    kind = attention_kind(model)
    calls, forwards = list[AttentionCall](), Counter[int]()
    inputs = probe_inputs(model)
    with eval_mode(model), suppress_warnings(), torch.no_grad():
        with (
            holding(CONTEXTS, None),
            through_attend(model),
            watch_modules(model.modules(), lambda module, *_: forwards.update([id(module)])),
            tap_contexts(lambda call, _: calls.append(call)),
        ):
            output = _run_probe(model, inputs, kind)
        with through_attend(model, implementation="eager"):
            expected = _run_probe(model, inputs, kind)
    if not calls:
        raise CheckpointError(why_no_call(model.config, kind))
    call_counts = Counter(id(call.module) for call in calls)
    for name, part in model.named_modules():
        if call_counts[id(part)] > max(forwards[id(part)], 1):  # terms of one attention: differential, as in DiffLlama
            why = f"its heads have no contexts of their own, as it calls attention more than once in a layer ({name})"
            raise CheckpointError(f"model type {kind!r} is not supported: {why}")
    half = is_half(computing_dtype(model)) or any(quantised_by(part) is not None for part in model.modules())
    if not is_finite(expected):
        hint = "its numbers may be too large for this type, try float32" if half else "its weights are damaged"
        raise CheckpointError(f"this {kind!r} model gives NaN or infinite numbers on a probe; {hint}")
    difference = (output - expected).abs().max().item()
    if not difference <= (0.05 if half else 1e-4) * (expected.abs().max().item() + 1e-6):  # NaN too
        why = f"outputs differ by {difference:.1e} on a probe"
        raise CheckpointError(f"model type {kind!r} is not supported: its attention is another one ({why})")
    return _name_calls(model, calls, kind)


def attention_kind(model: nn.Module) -> str:
    """The model type in the config, for messages."""
    return str(getattr(model.config, "model_type", type(model).__name__))


def _run_probe(model: nn.Module, inputs: dict[str, Any], kind: str) -> Tensor:
    try:
        output: Tensor = base_of(model)(**inputs)[0]
    except CheckpointError:
        raise
    except Exception as error:  # anything that a model's own code may raise
        kinds = {"pixel_values": "pictures", "input_features": "sound", "input_values": "sound"}
        inputs_beside = (kind for name, kind in kinds.items() if takes(base_of(model), name))
        second_input = " and ".join(dict.fromkeys(inputs_beside))
        if second_input and "input_ids" in inputs:
            raise CheckpointError(f"model type {kind!r} reads {second_input} beside the text; {ADVICE}") from error
        reason = reason_of(error, max_length=200)
        experts = "multiple of 16 bytes" in reason  # of torch's product of all experts
        then = 'call model.set_experts_implementation("eager") first' if experts else "it cannot be analysed"
        probe = f"a probe of {SOURCE_LENGTH} tokens"
        if "pixel_values" in inputs:
            probe = f"a picture of {'×'.join(map(str, inputs['pixel_values'].shape[2:]))} (image_size in its config)"
        raise CheckpointError(f"model type {kind!r} fails on {probe}: {reason}; {then}") from error
    if not isinstance(output, Tensor):
        raise CheckpointError(
            f"{type(model).__name__} (model type {kind!r}) gives states of several layers, and headscope reads "
            "one output; name in architectures of config.json the class of its final states (such as Dinov2Model)"
        )
    return output.float()


def probe_inputs(model: nn.Module) -> dict[str, Any]:
    """A few tokens (source and target of different lengths), one picture for a vision model, sound for a Whisper."""
    config: Any = model.config
    device = execution_device(model)
    main = getattr(model, "main_input_name", "input_ids")
    noise = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    if reads_sound(model):
        sound = torch.randn(features_shape(config), generator=noise).to(device, computing_dtype(model))
        target = _ids(config, TARGET_LENGTH, device)
        return {"input_features": sound, "decoder_input_ids": target, "use_cache": False}
    if main == "pixel_values":
        if config.is_encoder_decoder:
            raise CheckpointError(f"model type {config.model_type!r} writes text for a picture; {ADVICE}")
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        shape = 1, getattr(vision, "num_channels", 3), height, width
        return {"pixel_values": torch.randn(shape, generator=noise).to(device, computing_dtype(model))}
    if main != "input_ids":
        advice = "headscope gives models text, pictures, or sound as Whisper reads it"
        raise CheckpointError(f"model type {config.model_type!r} takes {main}, not text; {advice}")
    if getattr(config, "add_cross_attention", False) and not config.is_encoder_decoder:
        why = f"this {config.model_type!r} model is a decoder that attends to an encoder outside of it"
        raise CheckpointError(f"{why}; open the whole encoder–decoder model")
    ids = _ids(config, SOURCE_LENGTH, device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if is_two_sided(model):
        inputs["decoder_input_ids"] = _ids(config, TARGET_LENGTH, device, target=True)
    return inputs


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; every module's own mode is restored after it."""
    modes = [(part, part.training) for part in model.modules()]
    if any(mode for _, mode in modes):
        model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:  # setting an attribute of a module is slow
                part.training = mode


def _ids(config: Any, length: int, device: torch.device, *, target: bool = False) -> Tensor:
    """Ids [1 length] without padding, start or end, all different if the vocabulary is large enough."""
    text, size = text_config(config, target=target), vocabulary_size(config, target=target)
    named_ids = (getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start"))
    special = {number for ids in named_ids for number in (ids if isinstance(ids, list) else [ids])}  # of several ends
    plain = [number for number in range(size) if number not in special][: 4 * length] or [0]
    return torch.tensor([[plain[(3 * i) % len(plain)] for i in range(length)]], device=device)


def _name_calls(model: nn.Module, calls: list[AttentionCall], kind: str) -> AttentionSites:
    """The attention sites of the calls of a probe."""
    names = {id(part): name for name, part in model.named_modules()}
    two_sided = is_two_sided(model)
    length = features_shape(model.config)[2] // 2 if reads_sound(model) else SOURCE_LENGTH
    sites = [_site(call, two_sided, kind, length) for call in calls]
    if two_sided and not {Site.ENCODER_SELF, Site.DECODER_SELF} <= set(sites):
        missing = "encoder" if Site.ENCODER_SELF not in sites else "decoder"
        why = "in its own code, past the attention interface of transformers 5; headscope cannot see or gate its heads"
        raise CheckpointError(f"the {missing} of model type {kind!r} computes attention {why}")
    order: list[AttentionSite] = []
    by_module: dict[int, list[AttentionSite]] = {}
    for site in SITES:
        of_site = [call for call, call_site in zip(calls, sites, strict=True) if call_site is site]
        for layer, call in zip(_layers([call.module for call in of_site]), of_site, strict=True):
            attention_site = AttentionSite(
                site, layer, call.query.shape[1], call.key.shape[1], call.query.shape[3], names.get(id(call.module), "")
            )
            order.append(attention_site)
            by_module.setdefault(id(call.module), []).append(attention_site)
    by_weight: dict[int, list[AttentionSite]] = {}
    for module in {id(call.module): call.module for call in calls}.values():
        matrix = next((parameter for parameter in module.parameters() if parameter.ndim == 2), None)
        by_weight.setdefault(id(module if matrix is None else matrix), []).extend(by_module[id(module)])
    tied = tuple(tuple(sites) for sites in by_weight.values() if len({site.name for site in sites}) > 1)
    return AttentionSites(tuple(order), {key: tuple(sites) for key, sites in by_module.items()}, tied)


def _site(call: AttentionCall, two_sided: bool, kind: str, length: int) -> Site:
    """The site of a call, by the numbers of its queries and keys, and for one stack by whether it is causal."""
    t, s = call.weights.shape[-2:]
    if two_sided:
        by_shape = {
            (length, length): Site.ENCODER_SELF,
            (TARGET_LENGTH, TARGET_LENGTH): Site.DECODER_SELF,
            (TARGET_LENGTH, length): Site.CROSS,
        }
        if (t, s) in by_shape:
            return by_shape[t, s]
    elif t == s:
        shown_weights = call.weights
        if not shown_weights.shape[1]:  # a layer without heads has no weights that would tell
            mask = torch.ones(t, s) if call.options.mask is None else call.options.mask
            shown_weights = mask if mask.dtype == torch.bool else mask > -1.0
        causal = not shown_weights.triu(1).any()
        return Site.DECODER_SELF if causal and t > 1 else Site.ENCODER_SELF
    raise CheckpointError(
        f"model type {kind!r} attends from {t} to {s} positions on a probe of {length} source and "
        f"{TARGET_LENGTH} target tokens; headscope cannot tell which site that is"
    )


def _layers(modules: list[nn.Module]) -> list[int]:
    """The layer of each call: the `layer_idx` of its module if all differ, else its place in the order of calls."""
    indices = [getattr(module, "layer_idx", None) for module in modules]
    if all(isinstance(number, int) for number in indices) and len(set(indices)) == len(indices):
        return [int(number) for number in indices if number is not None]
    return list(range(len(modules)))
