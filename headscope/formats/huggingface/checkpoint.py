"""An opened Hugging Face checkpoint: any model of transformers 5 that calls the attention interface, used as it is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headscope.data.encoded import IGNORED, Encoded, NothingReadError, SideName
from headscope.data.offsets import subword_spans
from headscope.errors import CheckpointError, ConfigError, flag, raise_first
from headscope.formats.base import LONGEST, Alteration
from headscope.formats.huggingface.companions.folder import ENDS_WITH_EOS
from headscope.formats.huggingface.companions.languages import TOKENISING, in_target_language, languages
from headscope.formats.huggingface.companions.sentences import SentenceEncoder
from headscope.formats.huggingface.generation import Predicting
from headscope.formats.huggingface.selfcontained import is_narrowed, stored_types
from headscope.formats.huggingface.shrink import pooled_model, shrink_model, zeroed_model
from headscope.model.discovery import is_two_sided
from headscope.model.interface import is_pretrained, position_limit, reads_sound, text_config
from headscope.model.nonfinite import refuse_damaged_model
from headscope.model.removal_plan import RemovalPlan
from headscope.model.stored_weights import is_packing, why_not_changed


class TokenIds(NamedTuple):
    """The tokenizer's ids of a text, cut at a limit and uncut, and token types."""

    ids: list[int]
    uncut: list[int]
    segments: list[int]


class HuggingFaceCheckpoint(Predicting):
    """A transformers model with its tokenizer, or None with the reason `why_no_tokenizer`."""

    alterations: ClassVar = {"shrink": shrink_model, "zero": zeroed_model, "pool": pooled_model}

    def __init__(
        self,
        *,
        path: str,
        model: nn.Module,
        tokenizer: Any,
        digest: str | None,
        why_no_tokenizer: str = "there is none",
        sentences: SentenceEncoder | None = None,
    ) -> None:
        self.config = model.config
        super().__init__(path=path, format="huggingface", model=model, model_type=self.config.model_type, digest=digest)
        self.tokenizer = tokenizer
        self._without = why_no_tokenizer
        self.sentences = sentences
        self.exclusive_labels = getattr(self.config, "problem_type", None) != "multi_label_classification"
        self._reads = str(getattr(model, "main_input_name", "input_ids"))
        self.limit = position_limit(model) if self._reads == "input_ids" else None
        self.two_sided, self.reads_sound = is_two_sided(model), reads_sound(model)
        self.rereads_source = self.two_sided and self.predicts == "classes"
        languages = (tokenizer is not None and self._languages()) or {}
        self.writes = languages.get("writes") or getattr(tokenizer, "target_lang", None)  # Marian's has one language

    def with_model(self, model: nn.Module) -> HuggingFaceCheckpoint:
        duplicate = super().with_model(model)
        duplicate.config = duplicate.model.config
        duplicate.model_type = duplicate.config.model_type
        return duplicate

    def alter_heads(self, plan: RemovalPlan, how: Alteration) -> HuggingFaceCheckpoint:
        """As `Checkpoint.alter_heads`; ConfigError also for offloaded or quantised weights, which cannot be cut."""
        if how == "zero" and is_narrowed(self.config):
            raise ConfigError(f"{self.path} has fewer heads than its class; {flag.export} masked takes the whole model")
        if why := why_not_changed(self.model):
            advice = f"take the checkpoint before quantisation, on one {flag.device}, and quantise the result"
            raise ConfigError(f"{self.path}: {why}, and heads are cut out of plain weights; {advice}")
        return super().alter_heads(plan, how)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        ignored_names = getattr(self.model, "_keys_to_ignore_on_save", None) or ()  # Marian's positions
        head_prefix = f"{getattr(self.model, 'base_model_prefix', '')}."  # files may be of the model without its head
        names = () if name in ignored_names else (name, name.removeprefix(head_prefix), head_prefix + name, "")
        return next((self._stored_types[key] for key in names if key in self._stored_types), None)

    @cached_property
    def _stored_types(self) -> dict[str, torch.dtype]:
        return {key.removeprefix(self.prefix): dtype for key, dtype in stored_types(self.path).items()}

    @property
    def default_length(self) -> int | None:
        if self._reads != "input_ids":
            return None
        own = self.sentences and self.sentences.max_length  # SentenceTransformer takes it instead of the tokenizer's
        sides = (text_config(self.config, target=target) for target in (False, True))
        side_limits = [getattr(side, "max_position_embeddings", None) for side in sides]
        lengths = [self.limit, own or getattr(self.tokenizer, "model_max_length", None), *side_limits]
        return min((int(length) for length in lengths if length and 0 < length < 10**9), default=None)

    def source_length(self, longest: int | None) -> int:
        return super().source_length(longest) if longest else self.default_length or LONGEST

    @property
    def vocabulary(self) -> int:
        return max(len(self._tokenizer()), *self.vocabularies)

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        if side == "source":
            prompt = "" if self.sentences is None else self.sentences.prompt
            encodings = self._as_encoded(texts, self._ids({"text": [prompt + text for text in texts]}, limit), side)
            if not prompt:
                return encodings
            begin = self._of_side(side)(prompt)["input_ids"]
            for encoding in encodings:
                n_prefix = next((n for n, id in enumerate(begin) if encoding.ids[n : n + 1] != [id]), len(begin))
                encoding.special[:n_prefix] = [True] * n_prefix
            return encodings
        with in_target_language(self._of_side(side), self.model, self.path):
            return self._as_encoded(texts, self._ids({"text_target": list(texts)}, limit), side)

    def encode_pairs(self, texts: Sequence[tuple[str, str]], *, limit: int) -> list[Encoded]:
        """Encode pairs in the tokenizer's format, with token types if the model reads them."""
        if self.predicts == "words" and self.decodes:
            return super().encode_pairs(texts, limit=limit)
        first, second = ([pair[number] for pair in texts] for number in (0, 1))
        token_ids = self._ids({"text": first, "text_pair": second}, limit)
        return self._as_encoded(first, token_ids, "source")

    def _ids(self, arguments: dict[str, list[str]], limit: int) -> list[TokenIds]:
        tokenizer = self._of_side("target" if "text_target" in arguments or not self.two_sided else "source")
        with TOKENISING:
            uncut = fitting = tokenizer(**arguments, verbose=False)
            if any(len(ids) > limit for ids in uncut["input_ids"]):
                fitting = tokenizer(**arguments, truncation=True, max_length=limit, verbose=False)
        types: list[list[int]] = [[]] * len(uncut["input_ids"])
        if "text_pair" in arguments and "token_type_ids" in inspect.signature(self.model.forward).parameters:
            types = fitting.get("token_type_ids", types)
        return [TokenIds(*row) for row in zip(fitting["input_ids"], uncut["input_ids"], types, strict=True)]

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """The ids of a target text; for a decoder alone the ids after each input, with the end if it was trained so."""
        tokenizer = self._of_side("target")
        with in_target_language(tokenizer, self.model, self.path):
            rows = self._ids({"text_target" if self.two_sided else "text": list(texts)}, limit)
        if self.two_sided:
            return [row.ids if len(row.ids) == len(row.uncut) else self._without_end(row.ids) for row in rows]
        if tokenizer.init_kwargs.get(ENDS_WITH_EOS) is True:
            return [[*row.uncut, tokenizer.eos_token_id][1 : len(row.ids) + 1] for row in rows]
        return [[*row.ids[1:], IGNORED] for row in rows]

    def _as_encoded(self, texts: Sequence[str], token_ids: Sequence[TokenIds], side: SideName) -> list[Encoded]:
        size, unknown_id = self.vocabularies[side == "target"], self._of_side(side).unk_token_id
        special_ids, encodings = self._special[side], list[Encoded]()
        for text, (ids, uncut, segments) in zip(texts, token_ids, strict=True):
            if not ids:
                raise NothingReadError(text, len(encodings))
            if max(ids) >= size:
                why = f"its tokenizer gives id {max(ids)}, and the model has {size} embeddings"
                raise CheckpointError(f"{self.path}: {why}; take the tokenizer that the model was trained with")
            inputs = self._shift_right(ids) if side == "target" else list(ids)
            special = [number in special_ids for number in inputs]
            if side == "target":
                special[0] = True
            unknown = sum(pair == (unknown_id, False) for pair in zip(inputs, special, strict=True))
            encodings.append(Encoded(inputs, special, len(uncut) - len(ids), unknown, segments))
        return encodings

    def decoder_inputs(self, sources: Sequence[Encoded]) -> list[Encoded]:
        if not self.rereads_source:
            return []
        return [Encoded(self._shift_right(source.ids), [True, *source.special[:-1]]) for source in sources]

    def _shift_right(self, labels: list[int]) -> list[int]:
        """The decoder's inputs: labels shifted right by one, as the model itself does."""
        if self.model_type in ("mbart", "plbart"):  # the language, which a text ends with, comes first
            return [labels[-1], *labels[:-1]]
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if (start := self._start_id()) is None:
            raise CheckpointError(f"{self.path} says no decoder_start_token_id; add it to config.json")
        return [start, *labels[:-1]] if shift is None else shift(labels=torch.tensor([labels]))[0].tolist()

    def _start_id(self) -> int | None:
        """The first id that the decoder reads; a config of two parts (T5Gemma) may have it in its decoder's only."""
        start, decoder = "decoder_start_token_id", getattr(self.config, "decoder", None)
        candidates = ((self.config, start), (decoder, start), (decoder, "bos_token_id"))
        return next((number for of, name in candidates if (number := getattr(of, name, None)) is not None), None)

    def spans(self, text: str, ids: Sequence[int], *, side: SideName) -> list[tuple[int, int] | None] | None:
        has_start = side == "target" and self.two_sided and list(ids[:1]) == [self._start_id()]
        prompt = self.sentences.prompt if self.sentences is not None and side == "source" else ""
        with TOKENISING:  # the start may have the id of a subword of the target
            subword_offsets = subword_spans(self._of_side(side), prompt + text, ids[has_start:])
        if subword_offsets is None:
            return None
        n = len(prompt)
        own_spans = [
            span and ((max(span[0] - n, 0), span[1] - n) if span[1] > n or not n else None) for span in subword_offsets
        ]
        return [*[None] * has_start, *own_spans]

    def pool(self, states: Tensor, real: Tensor) -> Tensor:
        if self.sentences is None:
            return super().pool(states, real)
        return self.sentences.pool(states, real, tokenizer=self._of_side("source"))

    def subwords(self, ids: Sequence[int], *, side: SideName) -> list[str]:
        return list(self._of_side(side).convert_ids_to_tokens(list(ids)))

    def id_of(self, subword: str, *, side: SideName) -> int | None:
        return self._of_side(side).get_vocab().get(subword)

    def plain_ids(self, *, side: SideName) -> list[int]:
        size = self.vocabularies[side == "target"]
        ids = set(self._of_side(side).get_vocab().values()) if self.tokenizer else set(range(size))
        return sorted(number for number in ids - self._special[side] if number < size)

    def decode(self, ids: Sequence[int], *, side: SideName) -> str:
        return str(self._of_side(side).decode(list(ids)))

    def start_ids(self) -> list[int]:
        ids = self._tokenizer()("a")["input_ids"]
        special = self._special["source"]
        first = next((position for position, number in enumerate(ids) if number not in special), 0)
        return list(ids[:first])

    def tokenizer_facts(self) -> dict[str, Any] | None:
        if not self.tokenizer:
            return None
        special = [of.convert_ids_to_tokens([*self._special[side]]) for side, of in self._sides.items()]
        return {
            "class": type(self.tokenizer).__name__,
            "vocabulary": len(self.tokenizer),
            "special": sorted({name for names in special for name in names}),
            "languages": self._languages(),
        }

    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        return facts | {"dtype": f"{facts['dtype']} of {self.quantization}"} if self.quantization else facts

    def _languages(self) -> dict[str, Any] | None:
        return languages(self.tokenizer, self.model)

    def _tokenizer(self) -> Any:
        if self._reads != "input_ids" and not self.reads_sound:
            _ = self.attention_sites  # refuses what `show` and taps do not take either
            takes = f"{self.path} (model type {self.model_type!r}) takes {self._reads}, not text"
            raise CheckpointError(f"{takes}; `headscope show` and headscope.model.taps work on it")
        if self.tokenizer is None:
            advice = "load(model, tokenizer=…)" if self.in_memory else "put its tokenizer files beside the weights"
            raise CheckpointError(f"{self.path} has no tokenizer, so it cannot read text ({self._without}); {advice}")
        return self.tokenizer


def checkpoint_in_memory(source: nn.Module, tokenizer: Any) -> HuggingFaceCheckpoint:
    """A model in memory as a checkpoint; ConfigError for a model that cannot be used unchanged.

    It is neither copied nor moved, and its training mode is restored after each call.
    """
    if not is_pretrained(source):
        advice = "give a path, a hub id, or a transformers model (itself, not what wraps it)"
        raise ConfigError(f"source: a {type(source).__name__} cannot be loaded; {advice}")
    offloads = any(hasattr(part, "_hf_hook") for part in source.modules())  # accelerate's, with the weights elsewhere
    weights = [*source.parameters(), *source.buffers()]
    reasons = {
        "this model was loaded in torch.inference_mode(), and no gradient goes through such weights and buffers; load "
        "it outside of that block": any(weight.is_inference() for weight in weights),
        "weights of this model are on the meta device, without values; load it outside of torch.device('meta') and "
        "init_empty_weights(), or give its path": not offloads
        and any(weight.is_meta for weight in source.parameters()),
        f"tokenizer: a {type(tokenizer).__name__} is no tokenizer of transformers; give what "
        "AutoTokenizer.from_pretrained returns": tokenizer is not None and not hasattr(tokenizer, "all_special_ids"),
        "bitsandbytes packs the 4-bit weights of this model for the CPU, and no gradient goes through them then; load "
        "it by its path": is_packing(source),
    }
    raise_first(ConfigError, reasons)
    refuse_damaged_model(path := f"{type(source).__name__} in memory", source)
    return HuggingFaceCheckpoint(path=path, model=source, tokenizer=tokenizer, digest=None)
