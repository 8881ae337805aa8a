"""A checkpoint whose model is the native Transformer, whatever file format it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headscope.config.commands import TranslateOptions, Translation
from headscope.data.encoded import Batch, Encoded, NothingReadError, Side, SideName, pad_side
from headscope.data.vocabulary import Vocabulary
from headscope.errors import CheckpointError, NumericalError, flag
from headscope.formats.base import FORMATS, Checkpoint, Predicts
from headscope.formats.diagnosis import refuse_weights, size_text
from headscope.formats.exports import Probe
from headscope.model.forward import finite, refuse_overflow
from headscope.model.native.beams import Hypothesis, SearchConfig, search
from headscope.model.native.layers import shapes_only
from headscope.model.native.transformer import Transformer, shrink_transformer, zeroed_transformer
from headscope.model.native.transformer_config import TransformerConfig


class TransformerCheckpoint(Checkpoint):
    """The whole `Checkpoint` contract for a `Transformer` and its vocabularies (of a decoder alone: `target`).

    `search` is the default way to translate; `file_types` has the types of weights in the file.
    """

    model: Transformer
    is_native = True
    predicts: Predicts = "words"
    alterations: ClassVar = {"shrink": shrink_transformer, "zero": zeroed_transformer}

    def __init__(
        self,
        *,
        path: str,
        format: str,
        model: Transformer,
        model_type: str,
        digest: str | None,
        source: Vocabulary | None,
        target: Vocabulary | None,
        search: SearchConfig | None = None,
        file_types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(path=path, format=format, model=model, model_type=model_type, digest=digest)
        self.source, self.target = source, target
        self.search = search or SearchConfig()
        self.file_types = file_types or {}
        limits = [stack.max_positions for stack in self.model.config.stacks if stack.max_positions is not None]
        self.two_sided, self.limit = self.model.config.encoder is not None, min(limits, default=None)
        for side, stack in self.model.config.sides.items():
            name, vocabulary = ("source", self.source) if side == "encoder" else ("target", self.target)
            if vocabulary is not None and len(vocabulary) != stack.vocabulary:
                sizes = f"{len(vocabulary)} subwords, the embeddings {stack.vocabulary}"
                raise CheckpointError(f"{self.path}: the {name} vocabulary has {sizes}; it is another checkpoint's")

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self.file_types.get(name)

    @property
    def source_limit(self) -> int | None:
        encoder = self.model.config.encoder
        return None if encoder is None else encoder.max_positions

    @property
    def vocabulary(self) -> int:
        return max(stack.vocabulary for stack in self.model.config.stacks)

    def encode(self, texts: Sequence[str], *, side: SideName, limit: int) -> list[Encoded]:
        vocabulary = self._side(side)
        reading = side == "source" and self.two_sided
        encodings = [_encode(text, vocabulary, limit, reading=reading) for text in texts]
        for index, (text, sentence) in enumerate(zip(texts, encodings, strict=True)):
            if all(sentence.special):
                raise NothingReadError(text, index)
        return encodings

    def why_unknown(self, side: SideName) -> str:
        splitter = self._side(side).splitter
        if splitter.codes is not None:
            return f"is it tokenised and cased as the training text, and are the codes ({flag.bpe}) this model's?"
        codes = (
            f"give {flag.bpe} CODES" if "bpe" in FORMATS.get(self.format).takes else "split it with the model's codes"
        )
        return f"it was taken as already split into subwords: {codes}, or split, tokenise and case it as in training"

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """Labels of every text: the next id after each input of the decoder that `encode` makes."""
        vocabulary = self._side("target")
        return [[*vocabulary.begin, *vocabulary.encode(text), vocabulary.end][:limit] for text in texts]

    def spans(self, text: str, ids: Sequence[int], *, side: SideName) -> list[tuple[int, int] | None] | None:
        return self._side(side).spans(text, ids)

    def subwords(self, ids: Sequence[int], *, side: SideName) -> list[str]:
        vocabulary = self._side(side)
        return [vocabulary.subwords[number] for number in ids]

    def id_of(self, subword: str, *, side: SideName) -> int | None:
        return self._side(side).id_of(subword)

    def plain_ids(self, *, side: SideName) -> list[int]:
        vocabulary = self.source if side == "source" and self.two_sided else self.target
        if vocabulary is None:  # none of its ids is known to be special
            return list(range(self.vocabularies[side == "target"]))
        return vocabulary.plain_ids()

    def decode(self, ids: Sequence[int], *, side: SideName) -> str:
        vocabulary = self._side(side)
        return vocabulary.decode(ids, keep_pieces=vocabulary.splitter.codes is None)

    def start_ids(self) -> list[int]:
        return [] if self.two_sided else [self._side("target").start]

    @property
    def vocabularies(self) -> tuple[int, int]:
        config = self.model.config
        return (config.encoder or config.decoder).vocabulary, config.decoder.vocabulary

    def arguments(self, source: Side, target: Side | None) -> dict[str, Tensor]:
        if target is None:
            return {"target": source.ids, "target_mask": source.real}
        return {"source": source.ids, "target": target.ids, "source_mask": source.real, "target_mask": target.real}

    def forward(self, batch: Batch) -> None:
        self.states(batch)

    @finite
    def states(self, batch: Batch) -> Tensor:
        return final_states(self.model, batch)

    @finite
    def memory(self, batch: Batch) -> Tensor | None:
        return self.model.encode(batch.source.ids, _mask(batch.source.real)) if self.two_sided else None

    @finite
    def logits_at(self, batch: Batch, positions: Tensor) -> Tensor:
        states = self.states(batch)
        rows = torch.arange(len(states), device=states.device)
        return self.model.logits(states[rows, positions][:, None])[:, 0]

    @finite
    def logits(self, batch: Batch, memory: Tensor | None = None) -> Tensor:
        assert batch.target is not None or not self.two_sided, "an encoder's output has no logits without targets"
        return self.model.logits(final_states(self.model, batch, memory))

    def unembedding(self) -> tuple[nn.Module, Tensor]:
        model = self.model
        if model.before_output is None:
            return model.output, model.output.weight.detach()
        return model.before_output, (model.output.weight @ model.before_output.weight).detach()

    def join_subwords(self, text: str) -> str:
        splitter = self._side("target").splitter
        return splitter.join(text.split()) if splitter.codes is None else text

    def translations(self, texts: Sequence[str], options: TranslateOptions) -> list[list[Translation]]:
        search_texts = partial(self.translate, texts, self._searching(options), longest=options.max_length)
        try:
            hypotheses = search_texts()
        except NumericalError:
            refuse_overflow(self, search_texts)
        decode = partial(self._side("target").decode, keep_pieces=options.keep_bpe)
        return [[Translation(decode(best.ids), best.score) for best in of_text] for of_text in hypotheses]

    def search_facts(self, options: TranslateOptions) -> dict[str, str]:
        config = self._searching(options)
        lengths = f"{config.min_ratio:g}n{config.min_extra:+d}..{config.max_ratio:g}n{config.max_extra:+d}"
        facts = {"search": config.rule, "beam": str(config.beam), "lenpen": f"{config.power:g}", "tgt-len": lengths}
        return facts if config.spread is None else facts | {"spread": f"{config.spread:g}"}

    def _searching(self, options: TranslateOptions) -> SearchConfig:
        names = {"beam": "beam", "power": "lenpen", "max_ratio": "max_len_a", "max_extra": "max_len_b"}
        settings = {name: value for name, own in names.items() if (value := getattr(options, own)) is not None}
        if options.exact is not None:  # the rule of story-of-heads would stop early
            lengths = {"max_ratio": 0.0, "min_ratio": 0.0, "max_extra": options.exact, "min_extra": options.exact}
            settings |= {"rule": "fairseq", **lengths}
        return replace(self.search, **settings, best=options.nbest)

    def translate(
        self, texts: Sequence[str], config: SearchConfig | None = None, *, longest: int | None = None
    ) -> list[list[Hypothesis]]:
        """Search translations of texts, all in one batch, best first; `self.target.decode` makes text of them."""
        if not self.two_sided:
            raise CheckpointError(f"{self.path} is decoder-only; it cannot translate")
        source, limit, config = self._side("source"), self.source_length(longest), config or self.search
        batch = pad_side([_encode(text, source, limit, reading=True) for text in texts]).to(self.device)
        return self.beam_search(batch, config)

    def beam_search(self, source: Side, config: SearchConfig) -> list[list[Hypothesis]]:
        """Search translations of encoded texts, within the positions that the decoder has."""
        target, limit = self._side("target"), self.model.config.decoder.max_positions
        if limit is not None:
            config = replace(config, limit=min(limit - 1, limit - 1 if config.limit is None else config.limit))
        return search(
            self.model,
            source.ids,
            _mask(source.real),
            start=target.start,
            begin=target.begin,
            end=target.end,
            pad=target.pad,
            unknown=target.unknown,
            config=config,
        )

    def tokenizer_facts(self) -> dict[str, Any] | None:
        vocabularies = [vocabulary for vocabulary in (self.source, self.target) if vocabulary is not None]
        if not vocabularies:
            return None
        return {
            "class": " + ".join(dict.fromkeys(vocabulary.splitter.kind for vocabulary in vocabularies)),
            "vocabulary": max(map(len, vocabularies)),
            "special": sorted({own.subwords[n] for own in vocabularies for n in own.special_ids}),
        }

    def _side(self, name: SideName) -> Vocabulary:
        vocabulary = self.source if name == "source" and self.two_sided else self.target
        if vocabulary is None:
            advice = f"put its files beside it or give {flag.dicts}"
            raise CheckpointError(f"{self.path} has no {name} vocabulary to read text with; {advice}")
        return vocabulary


def final_states(model: Transformer, batch: Batch, memory: Tensor | None = None) -> Tensor:
    """States [b t d] after the last layer: the decoder's; the encoder's for a batch without target."""
    source_mask = _mask(batch.source.real)
    if model.encoder is None:
        return model.decode(batch.source.ids, target_mask=source_mask)
    memory = model.encode(batch.source.ids, source_mask) if memory is None else memory
    if batch.target is None:
        return memory
    return model.decode(batch.target.ids, memory, memory_mask=source_mask, target_mask=_mask(batch.target.real))


def probe_logits(model: Transformer, probe: Probe) -> Tensor:
    """Logits [2 t V] of a probe; a decoder-only model reads its targets alone."""
    with torch.no_grad():
        if model.config.encoder is None:
            return model(target=probe.target)
        return model(probe.source, probe.target, source_mask=probe.real)


def _encode(text: str, vocabulary: Vocabulary, limit: int, *, reading: bool) -> Encoded:
    """Ids of an encoder's text (`reading`), or of a decoder's inputs: the start, then the text shifted right."""
    words = vocabulary.encode(text)
    before = vocabulary.prefix if reading else (vocabulary.start, *vocabulary.begin)
    after = vocabulary.closing if reading else ()
    room = max(limit - len(before) - len(after), 0)
    ids = [*before, *words[:room], *after]
    special = [number in vocabulary.special_ids for number in ids]
    unknown = 0 if vocabulary.unknown is None else words[:room].count(vocabulary.unknown)
    return Encoded(ids, special, max(len(words) - room, 0), unknown)


def _mask(real: Tensor) -> Tensor | None:
    """The mask of real positions; None without padding on a CPU, which is faster. Asking a GPU would cost more."""
    return None if real.device.type == "cpu" and bool(real.all()) else real


def build_transformer(path: str, config: TransformerConfig, state: Mapping[str, Tensor]) -> Transformer:
    """The model of a config with the weights `state`, which may lack tied copies; CheckpointError if they do not fit.

    Memory is allocated only after the weights are known to fit, so a config with absurd sizes costs nothing.
    """
    with shapes_only():
        model = Transformer(config)
    whole_state = dict(state)
    for copy, original in model.tied().items():
        values = whole_state.setdefault(copy, state.get(original, torch.empty(0)))
        stored = whole_state.get(original, values)
        if values is not stored and not torch.equal(values, stored):
            raise CheckpointError(f"{path}: {copy} and {original} differ, but the config says that they are one")
    check_state(path, model, whole_state)
    model.tie()
    return model.eval()


def check_state(path: str, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict; CheckpointError names missing, left-over and wrongly sized weights."""
    expected = model.state_dict()
    pairs = {key: (state[key], own) for key, own in expected.items() if key in state}
    problems = {
        "missing": [key for key in expected if key not in state],
        "left over": [key for key in state if key not in expected],
        "of another size than the config says": [
            f"{key} ({size_text(values.shape)} instead of {size_text(own.shape)})"
            for key, (values, own) in pairs.items()
            if values.shape != own.shape
        ],
        "of another type": [
            f"{key} ({values.dtype})"
            for key, (values, own) in pairs.items()
            if values.is_floating_point() != own.is_floating_point()
        ],
    }
    refuse_weights(path, problems)
    model.load_state_dict(dict(state), assign=any(tensor.is_meta for tensor in expected.values()))
