"""Predictions and translations of Hugging Face models: the base class of their checkpoints."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from headscope.config.commands import TranslateOptions, Translation
from headscope.data.encoded import IGNORED, SIDE_NAMES, Batch, Encoded, Side, SideName, map_tensors, pad_side
from headscope.errors import CheckpointError, ConfigError, NumericalError, flag, raise_first, reason_of
from headscope.formats.base import Checkpoint, Predicts
from headscope.formats.huggingface.companions.languages import of_side, special_ids, target_language
from headscope.formats.huggingface.companions.sentences import SentenceEncoder
from headscope.heads import Site
from headscope.model.discovery import base_of
from headscope.model.forward import finite, refuse_overflow
from headscope.model.interface import suppress_warnings, text_config, through_attend, vocabulary_size
from headscope.model.nonfinite import is_finite
from headscope.model.stored_weights import matrix_of, readable

_HEADS: Mapping[str, Predicts] = {"ForSequenceClassification": "classes", "ForTokenClassification": "tags"}
LONGEST = 200  # tokens of a translation where the checkpoint sets no bound; transformers itself stops after 20


class Predicting(Checkpoint):
    """Predictions and translations of a transformers model. `_tokenizer` raises a CheckpointError if there is none."""

    model: Any
    config: Any
    tokenizer: Any
    sentences: SentenceEncoder | None

    @abstractmethod
    def _tokenizer(self) -> Any: ...

    @cached_property
    def _sides(self) -> dict[SideName, Any]:
        read = self.tokenizer if self.sentences is None else self.sentences.tokenizer(self.tokenizer)
        return {side: of_side(read, side) for side in SIDE_NAMES}

    def _of_side(self, side: SideName) -> Any:
        self._tokenizer()
        return self._sides[side]

    @cached_property
    def _special(self) -> dict[SideName, frozenset[int]]:
        return {side: special_ids(of) if self.tokenizer else frozenset() for side, of in self._sides.items()}

    @property
    def predicts(self) -> Predicts:
        """Classes or tags by the name of the model's class, else words if it has an output layer over a vocabulary."""
        for ending, prediction in _HEADS.items():
            if type(self.model).__name__.endswith(ending):
                return prediction
        return "nothing" if self.model.get_output_embeddings() is None else "words"

    @property
    def label_names(self) -> tuple[str, ...]:
        if self.predicts not in _HEADS.values():
            return ()
        names = {int(number): str(name) for number, name in self.config.id2label.items()}
        return tuple(names.get(number, f"LABEL_{number}") for number in range(self.config.num_labels))

    @property
    def vocabularies(self) -> tuple[int, int]:
        source, target = (vocabulary_size(self.model.config, target=side) for side in (False, True))
        return source, target

    def arguments(self, source: Side, target: Side | None) -> dict[str, Tensor]:
        inputs = self._source(source)
        if target is not None:
            inputs |= {"decoder_input_ids": target.ids, "decoder_attention_mask": target.real.long()}
        return inputs

    @finite
    def forward(self, batch: Batch) -> Any:
        return self._output(batch)

    def _output(self, batch: Batch, **outputs: bool) -> Any:
        """Run the model without its task head and return its output object; `outputs` request further outputs."""
        if self.two_sided and batch.target is None:
            return self.model.get_encoder()(**self._source(batch.source))
        inputs = self.arguments(batch.source, batch.target if self.two_sided else None)
        return base_of(self.model)(**inputs, **outputs, use_cache=False)

    @staticmethod
    def _source(source: Side) -> dict[str, Tensor]:
        inputs = {"input_ids": source.ids, "attention_mask": source.real.long()}
        return inputs if source.segments is None else inputs | {"token_type_ids": source.segments}

    @finite
    def states(self, batch: Batch) -> Tensor:
        has_head = self.predicts == "words" and base_of(self.model) is self.model  # T5 has no part without its head
        with through_attend(self.model):
            output = self._output(batch, output_hidden_states=True) if has_head else self._output(batch)
        states: Tensor | None = getattr(output, "last_hidden_state", None)
        if states is None:
            layers = getattr(output, "decoder_hidden_states", None) or getattr(output, "hidden_states", None)
            if not layers:
                raise CheckpointError(f"{self.path} is a {type(self.model).__name__}, which gives no final states")
            states = layers[-1]
        return states

    def _classify(self, batch: Batch) -> Tensor:
        inputs, ids, real = self._source(batch.source), batch.source.ids, batch.source.real
        config, pad = text_config(self.config), text_config(self.config).pad_token_id
        end = config.eos_token_id if self.two_sided else None
        if pad is None or pad == end:  # the class finds the last token by padding, which must not be the end of a text
            free = torch.ones(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids[real], False)
            pad = int(free.to(torch.uint8).argmax())
            if not bool(free[pad]):
                raise CheckpointError(f"{self.path} has no pad_token_id, and the texts of a batch have all others")
        inputs["input_ids"] = ids.masked_fill(~real, pad)
        overrides: dict[str, Any] = {"pad_token_id": pad}
        if isinstance(
            end, int
        ):  # BART and T5 classify at the last end, and refuse texts with different numbers of ends
            ends = real & (ids == end)
            overrides["eos_token_id"] = ids.masked_fill(~ends | (ends.flip(1).cumsum(dim=1).flip(1) > 1), -1)
        with through_attend(self.model), patch.dict(vars(config), overrides):
            try:
                scores: Tensor = self.model(**inputs).logits
            except ValueError as error:  # a text without an end
                raise CheckpointError(f"{self.path} cannot classify these texts: {reason_of(error)}") from error
        return scores

    def _without_end(self, labels: list[int]) -> list[int]:
        """Labels of a cut text without the end (and language) that truncation appends: the text goes on otherwise."""
        length = len(labels)
        while length and labels[length - 1] in self._special["target"]:
            length -= 1
        return labels[:length] + [IGNORED] * (len(labels) - length)

    @finite
    def memory(self, batch: Batch) -> Any:
        """The encoder's output object."""
        if not self.needs_target:
            return None
        with through_attend(self.model):
            return self.model.get_encoder()(**self._source(batch.source))

    @finite
    def logits(self, batch: Batch, memory: Any = None) -> Tensor:
        """Logits from the whole model, or from its decoder alone if `memory` is given."""
        if self.predicts == "classes":
            return self._classify(batch)[:, None]
        if self.predicts == "tags":
            with through_attend(self.model):
                return self.model(**self._source(batch.source)).logits
        assert batch.target is not None or not self.two_sided, "a decoder has no logits without targets"
        inputs = self.arguments(batch.source, batch.target if self.two_sided else None)
        if memory is not None:
            inputs |= {"encoder_outputs": memory}
            inputs.pop("input_ids", None)
        has_cache = self.two_sided or all(entry.site is not Site.ENCODER_SELF for entry in self.attention_sites.order)
        with through_attend(self.model):
            output = self.model(**inputs, **({"use_cache": False} if has_cache else {}))
        logits: Tensor | None = getattr(output, "logits", getattr(output, "prediction_logits", None))
        if logits is None or logits.ndim != 3 or logits.shape[-1] < self.vocabularies[1]:
            why = f"is a {type(self.model).__name__}, which predicts no words"
            raise CheckpointError(f"{self.path} {why}; give the model with its head (…ForMaskedLM, …ForCausalLM, …)")
        return logits

    @finite
    def logits_at(self, batch: Batch, positions: Tensor) -> Tensor:
        """As `Checkpoint.logits_at`; causal models that support it compute no logits of other positions."""
        if self.two_sided or "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return super().logits_at(batch, positions)
        kept_positions, rows = positions.unique(return_inverse=True)
        with through_attend(self.model):
            logits: Tensor = self.model(
                **self._source(batch.source), use_cache=False, logits_to_keep=kept_positions
            ).logits
        if logits.shape[1] != len(kept_positions):
            return super().logits_at(batch, positions)
        return logits[torch.arange(len(logits), device=logits.device), rows]

    def unembedding(self) -> tuple[nn.Module, Tensor]:
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, nn.Linear) or not readable(layer):
            raise CheckpointError(f"{self.path} has no linear output layer over the vocabulary that can be read")
        return layer, matrix_of(layer)

    def mask_id(self) -> int:
        mask: int | None = self._tokenizer().mask_token_id
        if mask is None:
            raise CheckpointError(f"the tokenizer of {self.path} has no mask token, so no token can be hidden")
        return mask

    def translations(self, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
        """Translate with transformers' `generate`, with all attention through `attend`, so that masks work."""
        config, model = self._generation_config(options), self.model
        source = pad_side(self.encode(texts, side="source", limit=self.source_length(options.max_length))).to(
            self.device
        )

        def generate() -> Tensor:
            with through_attend(model), suppress_warnings(), torch.no_grad():
                processors = LogitsProcessorList([_OnlyNumbers()])
                return self._generate(source, generation_config=config, logits_processor=processors)

        try:
            ids = generate()
        except NumericalError:
            refuse_overflow(self, generate)
        except IndexError as error:  # its cache has as many layers as the encoder, and a T5's decoder may have more
            fewer = f"; {flag.max_len_b} {self.limit - 2}" if self.limit else ""
            raise CheckpointError(f"{self.path} cannot generate so much ({reason_of(error)}){fewer}") from error
        with through_attend(model), suppress_warnings(), torch.no_grad():
            scores = self._scores(source, ids, config) if options.scores else [0.0] * len(ids)
        tokenizer, written_ids = self._of_side("target"), ids[:, self._prefix_length() :].tolist()
        texts_written = [text.strip() for text in tokenizer.batch_decode(written_ids, skip_special_tokens=True)]
        if options.keep_bpe:
            tokens = (tokenizer.convert_ids_to_tokens(row, skip_special_tokens=True) for row in written_ids)
            texts_written = [*map(" ".join, tokens)]
        translations = [Translation(*pair) for pair in zip(texts_written, scores, strict=True)]
        return [translations[first : first + options.nbest] for first in range(0, len(translations), options.nbest)]

    def _generate(self, source: Side, **settings: Any) -> Tensor:
        return self.model.generate(**self._source(source), **settings)

    def _prefix_length(self) -> int:
        return 1

    def _generation_config(self, options: TranslateOptions) -> GenerationConfig:
        model = self.model
        if not (self.two_sided and model.can_generate()):
            advice = "a model with an encoder and a decoder can (…ForConditionalGeneration, MarianMTModel)"
            raise CheckpointError(f"{self.path} is a {type(model).__name__}, which cannot translate; {advice}")
        settings = model.generation_config.to_dict()
        beams = options.beam or settings["num_beams"] or 1
        problems = {
            f"{flag.max_len_a} is not for Hugging Face checkpoints; take {flag.max_len_b}": options.max_len_a,
            f"{flag.nbest} {options.nbest} needs a wider {flag.beam} than {beams}": options.nbest > beams,
            f"{flag.max_len_b} 0 lets a Hugging Face model write nothing; it must be at least 1": options.max_len_b
            == 0,
        }
        raise_first(ConfigError, problems)
        for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
            if settings.get(name) is None:  # generation_config.json does not say it
                settings[name] = getattr(self.config, name, None)
        if settings["decoder_start_token_id"] is None and settings["bos_token_id"] is None:
            raise CheckpointError(f"{self.path} says no decoder_start_token_id; add it to config.json")
        settings.update(do_sample=False, num_return_sequences=options.nbest, num_beams=beams)
        if options.lenpen is not None:
            settings["length_penalty"] = options.lenpen
        language = target_language(self._tokenizer(), model, self.path)
        if language is not None and settings.get("decoder_start_token_id") != language.number:
            settings["forced_bos_token_id"] = language.number
        n_forced = sum(settings.get(f"forced_{name}_token_id") is not None for name in ("bos", "eos"))  # no subwords
        if options.max_len_b is not None:
            settings.update(max_new_tokens=options.max_len_b + n_forced, max_length=None)
        elif not (settings.get("max_length") or settings.get("max_new_tokens")):
            settings["max_new_tokens"] = min(LONGEST, (self.limit or LONGEST + 1) - 1)
        if options.exact is not None:
            number = options.exact + n_forced
            settings.update(max_new_tokens=number, min_new_tokens=number, max_length=None)
        for name in ("temperature", "top_k", "top_p", "typical_p", "min_p"):
            settings.pop(name, None)  # for sampling; transformers warns of them
        if beams == 1:
            settings.pop("length_penalty", None), settings.pop("early_stopping", None)
        return GenerationConfig.from_dict(settings)

    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        """The settings of `generate`: beam, length penalty and the longest translation."""
        config = self._generation_config(options)
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        longest = config.max_new_tokens or config.max_length
        language = target_language(self._tokenizer(), self.model, self.path)
        return {
            **({} if language is None else {"language": language.name}),
            "search": "generate",
            "beam": str(config.num_beams),
            "lenpen": f"{penalty:g}",
            "tgt-len": f"..{longest}",
        }

    def _scores(self, source: Side, ids: Tensor, config: GenerationConfig) -> list[float]:
        """Scores Σ log p / length ** penalty, from another pass: `generate` would keep all logits; p = 1 if forced."""
        wide = len(ids) // len(source.ids)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        is_end = torch.isin(ids[:, 1:], torch.tensor([end for end in ends if end is not None], device=ids.device))
        until_end = (is_end.long().cumsum(dim=1) - is_end.long()) == 0  # up to the first end, that one included
        inputs = [
            Encoded(row[: int(n)], [False] * int(n)) for row, n in zip(ids.tolist(), until_end.sum(dim=1), strict=True)
        ]
        wide_source = map_tensors(source, lambda tensor: tensor.repeat_interleave(wide, 0))
        target = pad_side(inputs).to(ids.device)
        log_p = self.logits(Batch(torch.arange(len(ids)), 0, wide_source, target)).float().log_softmax(-1)
        width = target.ids.shape[1]
        begin, longest = self._prefix_length(), config.max_length or 0
        until_end[:, : begin - 1] = False
        is_counted = until_end[:, :width].clone()
        if config.forced_bos_token_id is not None:
            is_counted[:, begin - 1 : begin] = False
        last = longest - 2 if config.max_new_tokens is None else config.max_new_tokens + begin - 2
        if config.forced_eos_token_id is not None and 0 <= last < width:
            is_counted[:, last] = False
        token_log_p = log_p.gather(-1, ids[:, 1 : width + 1, None])[..., 0] * is_counted
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        return (token_log_p.sum(dim=1) / until_end.sum(dim=1) ** penalty).tolist()


class _OnlyNumbers(LogitsProcessor):
    """Ends `generate` with a NumericalError at the first step with NaN scores; -inf marks forbidden tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not is_finite(scores, masked=True):
            raise NumericalError("the scores of the next token are no numbers")
        return scores
