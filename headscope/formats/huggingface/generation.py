"""What a Hugging Face model predicts and translates: the part of its checkpoint that evaluation needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from headscope.data.encoded import Batch, Encoded, Side, side
from headscope.errors import CheckpointError, ConfigError, NumericalError
from headscope.formats.base import IGNORED, Checkpoint, Predicts
from headscope.formats.finite import finite, refuse_overflow
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.heads import Site
from headscope.model.discovery import base_of, text_config
from headscope.model.interface import suppress_warnings, through_attend
from headscope.model.nonfinite import is_finite
from headscope.model.threads import threads_for_pass

LONGEST = 200  # tokens of a translation where the checkpoint sets no bound; transformers itself stops after 20


class Predicting(Checkpoint):
    """What a transformers model says and translates; `config` is its own, `_tokenizer` refuses where there is none."""

    config: Any

    @abstractmethod
    def _tokenizer(self) -> Any: ...

    @property
    def predicts(self) -> Predicts:
        return predicts(self)

    def forward(self, batch: Batch) -> None:
        self._without_head(batch)

    @finite
    def _without_head(self, batch: Batch) -> Any:
        return without_head(self, batch)

    @finite
    def states(self, batch: Batch) -> Tensor:
        return states(self, batch)

    @finite
    def class_scores(self, batch: Batch) -> Tensor:
        return class_scores(self, batch)

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        return labels(self, texts, limit=limit)

    @finite
    def memory(self, batch: Batch) -> Any:
        return memory(self, batch)

    @finite
    def logits(self, batch: Batch, memory: Any = None) -> Tensor:
        return logits(self, batch, memory)

    def unembedding(self) -> tuple[nn.Module, Tensor]:
        return unembedding(self)

    def mask_id(self) -> int:
        return mask_id(self)

    def joined(self, text: str) -> str:
        return text

    def translations(self, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
        return translations(self, texts, options)

    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        return search_facts(self, options)


def predicts(checkpoint: Predicting) -> Predicts:
    """Words where there is an output layer over the vocabulary, classes where the class says so."""
    model: Any = checkpoint.model
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "classes"
    return "nothing" if model.get_output_embeddings() is None else "words"


def without_head(checkpoint: Predicting, batch: Batch) -> Any:
    """One pass through the model without its task head: the output object."""
    source = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
    model: Any = checkpoint.model
    if not checkpoint.two_sided:
        return base_of(model)(**source, use_cache=False)
    if batch.target is None:
        return model.get_encoder()(**source)
    target = {"decoder_input_ids": batch.target.ids, "decoder_attention_mask": batch.target.real.long()}
    return base_of(model)(**source, **target, use_cache=False)


def states(checkpoint: Predicting, batch: Batch) -> Tensor:
    """The last hidden state."""
    with through_attend(checkpoint.model):
        found: Tensor | None = getattr(without_head(checkpoint, batch), "last_hidden_state", None)
    if found is None:
        raise CheckpointError(f"{checkpoint.path} is a {type(checkpoint.model).__name__}, which gives no final states")
    return found


def class_scores(checkpoint: Predicting, batch: Batch) -> Tensor:
    """The logits of a model with a sequence classification head."""
    if checkpoint.predicts != "classes":
        raise CheckpointError(f"{checkpoint.path} is a {type(checkpoint.model).__name__}, which is no classifier")
    with through_attend(checkpoint.model):
        output = checkpoint.model(input_ids=batch.source.ids, attention_mask=batch.source.real.long())
    found: Tensor = output.logits
    return found


def labels(checkpoint: Predicting, texts: Sequence[str], *, limit: int) -> list[list[int]]:
    """The tokenizer's own ids of a target text; a decoder-only model says each id after the one before."""
    tokenizer = checkpoint._tokenizer()
    given = {"text_target" if checkpoint.two_sided else "text": list(texts)}
    whole = tokenizer(**given, verbose=False)["input_ids"]
    ids = tokenizer(**given, truncation=True, max_length=limit, verbose=False)["input_ids"]
    if not checkpoint.two_sided:
        return [[*own[1:], IGNORED] for own in ids]
    # the end that truncation puts behind a cut text is not what comes next there
    return [own if len(own) == len(full) else [*own[:-1], IGNORED] for own, full in zip(ids, whole, strict=True)]


def memory(checkpoint: Predicting, batch: Batch) -> Any:
    """The encoder's output object."""
    if not checkpoint.two_sided:
        return None
    model: Any = checkpoint.model
    with through_attend(model):
        return model.get_encoder()(input_ids=batch.source.ids, attention_mask=batch.source.real.long())


def logits(checkpoint: Predicting, batch: Batch, memory: Any) -> Tensor:
    """One pass through the whole model, or through its decoder where `memory` is given."""
    mask = batch.source.real.long()
    if not checkpoint.two_sided:
        given = {"input_ids": batch.source.ids, "attention_mask": mask}
    else:
        assert batch.target is not None, "a decoder has no logits without targets"
        given = {
            "decoder_input_ids": batch.target.ids,
            "decoder_attention_mask": batch.target.real.long(),
            "attention_mask": mask,
            **({"input_ids": batch.source.ids} if memory is None else {"encoder_outputs": memory}),
        }
    causal = not checkpoint.two_sided and Site.ENCODER_SELF not in {
        attention_site.site for attention_site in checkpoint.attention_sites.order
    }
    with through_attend(checkpoint.model):
        output = checkpoint.model(**given, **({"use_cache": False} if causal or checkpoint.two_sided else {}))
    found = getattr(output, "logits", None)
    if found is None:
        found = getattr(output, "prediction_logits", None)
    if found is None or found.ndim != 3 or found.shape[-1] < text_config(checkpoint.config, target=True).vocab_size:
        raise CheckpointError(
            f"{checkpoint.path} is a {type(checkpoint.model).__name__}, which predicts no words; perplexity and "
            "accuracy need the model with its language-model head (…ForMaskedLM, …ForCausalLM, …)"
        )
    return found  # type: ignore[no-any-return]


def unembedding(checkpoint: Predicting) -> tuple[nn.Module, Tensor]:
    """The output embeddings."""
    model: Any = checkpoint.model
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise CheckpointError(f"{checkpoint.path} has no linear output layer over the vocabulary")
    return layer, layer.weight.detach()


def mask_id(checkpoint: Predicting) -> int:
    """The tokenizer's mask token."""
    found: int | None = checkpoint._tokenizer().mask_token_id
    if found is None:
        raise CheckpointError(f"the tokenizer of {checkpoint.path} has no mask token, so no token can be hidden")
    return found


def translations(checkpoint: Predicting, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
    """`generate` with every head going through `attend`, so that masks work."""
    config = generation_settings(checkpoint, options)
    model: Any = checkpoint.model
    encoded = checkpoint.encode(texts, side="source", limit=checkpoint.reads(options.longest))
    source = side(encoded).to(checkpoint.device)
    rows = len(texts) * (config.num_beams or 1)

    def generated() -> Tensor:
        with through_attend(model), suppress_warnings(), torch.no_grad(), threads_for_pass(model, rows):
            return model.generate(  # type: ignore[no-any-return]
                source.ids,
                attention_mask=source.real.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([_OnlyNumbers()]),
            )

    try:
        ids = generated()
    except NumericalError:
        refuse_overflow(checkpoint, generated)
    except IndexError as error:  # its cache has as many layers as the encoder, and the decoder of a T5 may have more
        raise CheckpointError(
            f"{checkpoint.path}: transformers cannot generate with this model ({' '.join(str(error).split())[:160]})"
        ) from error
    with through_attend(model), suppress_warnings(), torch.no_grad():
        scores = _scores(checkpoint, source, ids, config) if options.scores else [0.0] * len(ids)
    tokenizer = checkpoint._tokenizer()
    if options.keep_pieces:
        written = [" ".join(tokenizer.convert_ids_to_tokens(row, skip_special_tokens=True)) for row in ids.tolist()]
    else:
        written = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    found = [Translation(*each) for each in zip(written, scores, strict=True)]
    return [found[first : first + options.best] for first in range(0, len(found), options.best)]


class _OnlyNumbers(LogitsProcessor):  # type: ignore[misc]
    """Ends `generate` at the first step whose scores are no numbers; -inf stands for what must not be said."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not is_finite(scores, masked=True):
            raise NumericalError("the scores of the next token are no numbers")
        return scores


def generation_settings(checkpoint: Predicting, options: TranslateOptions) -> GenerationConfig:
    """The checkpoint's own generation config, without sampling, with what `options` says instead."""
    model: Any = checkpoint.model
    if not (checkpoint.two_sided and model.can_generate()):
        raise CheckpointError(
            f"{checkpoint.path} is a {type(model).__name__}, which cannot translate; a model with an encoder and a "
            "decoder can (…ForConditionalGeneration, MarianMTModel)"
        )
    if options.max_ratio:
        raise ConfigError("--max-len-a means nothing for a Hugging Face checkpoint; bound lengths by --max-len-b")
    own = model.generation_config.to_dict()
    own.update(do_sample=False, num_return_sequences=options.best, num_beams=options.beam or own["num_beams"] or 1)
    if options.best > own["num_beams"]:
        raise ConfigError(f"--nbest {options.best} needs a wider beam than {own['num_beams']}; give --beam")
    if options.power is not None:
        own["length_penalty"] = options.power
    if options.max_extra is not None:
        own.update(max_new_tokens=options.max_extra + 1, max_length=None)
    elif not (own.get("max_length") or own.get("max_new_tokens")):
        own["max_new_tokens"] = min(LONGEST, (checkpoint.limit or LONGEST + 1) - 1)
    for name in ("temperature", "top_k", "top_p", "typical_p", "min_p"):
        own.pop(name, None)  # for sampling; transformers warns of them
    if own["num_beams"] == 1:
        own.pop("length_penalty", None), own.pop("early_stopping", None)
    return GenerationConfig.from_dict(own)


def search_facts(checkpoint: Predicting, options: TranslateOptions) -> dict[str, str]:
    """Beam, length penalty and the longest translation, as `generate` gets them."""
    config = generation_settings(checkpoint, options)
    penalty = 1.0 if config.length_penalty is None else config.length_penalty
    longest = config.max_new_tokens or config.max_length
    return {"search": "generate", "beam": str(config.num_beams), "lenpen": f"{penalty:g}", "tgt-len": f"..{longest}"}


def _scores(checkpoint: Predicting, source: Side, ids: Tensor, config: GenerationConfig) -> list[float]:
    """Σ log p / length ** penalty of generated ids, from one more pass: `generate` would keep every step's logits."""
    wide = len(ids) // len(source.ids)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ended = torch.isin(ids[:, 1:], torch.tensor([end for end in ends if end is not None], device=ids.device))
    said = (ended.long().cumsum(dim=1) - ended.long()) == 0  # up to the first end, that one included
    inputs = [Encoded(row[: int(n)], [False] * int(n)) for row, n in zip(ids.tolist(), said.sum(dim=1), strict=True)]
    repeated = Side(*(each.repeat_interleave(wide, 0) for each in (source.ids, source.real, source.special)))
    target = side(inputs).to(ids.device)
    log_p = logits(checkpoint, Batch(torch.arange(len(ids)), 0, repeated, target), None).float().log_softmax(-1)
    width = target.ids.shape[1]
    each = log_p.gather(-1, ids[:, 1 : width + 1, None])[..., 0] * said[:, :width]
    penalty = 1.0 if config.length_penalty is None else config.length_penalty
    found: list[float] = (each.sum(dim=1) / said.sum(dim=1) ** penalty).tolist()
    return found
