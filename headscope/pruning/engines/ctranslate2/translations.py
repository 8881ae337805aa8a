"""What CTranslate2 translates, against the model's own numbers and against headscope's own translations.

Every token that it chooses greedily must be the likeliest by the model's logits, of those that may come there. So where
headscope's translations differ, that is because its search follows settings that CTranslate2 has not: these are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.model.decoding.beams import SearchConfig
from headscope.pruning.engines.base import refuse_difference
from headscope.pruning.engines.ctranslate2.translators import Translator, TranslatorTokens
from headscope.pruning.model_inputs import InputTexts

TEXTS, BEAM, LONGEST = 16, 4, 60
Pairs = list[tuple[Any, Translation]]
CHOICE = "logits of its choices are below the largest by"
PLAIN_SETTINGS = frozenset(
    [
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"),
        *("max_length", "max_new_tokens", "num_beams", "length_penalty", "early_stopping", "bad_words_ids"),
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "min_p", "num_return_sequences"),
        *("use_cache", "cache_implementation", "renormalize_logits", "_from_model_config", "transformers_version"),
        *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    ]
)
"""Entries of a generation_config.json that CTranslate2 is given, or that change no greedy translation."""


@dataclass(frozen=True, kw_only=True)
class Restraints:
    """How headscope's search of a checkpoint is restrained.

    `never` are the tokens that it never says, `shortest` how many come before the end at least. `others` are settings
    that CTranslate2 has not.
    """

    never: tuple[str, ...]
    shortest: int
    others: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """What CTranslate2 is told of it; nothing where its own defaults are these."""
        shortest: dict[str, Any] = {} if self.shortest == 1 else {"min_decoding_length": self.shortest}
        return shortest | ({"suppress_sequences": [[token] for token in self.never]} if self.never else {})

    @property
    def typed(self) -> str:
        """The options as they are typed."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def restraints_of(checkpoint: Any, tokens: TranslatorTokens) -> Restraints:
    """The restraints of a native checkpoint's search, or of a Marian's generation config."""
    if checkpoint.is_native:
        search: SearchConfig = checkpoint.search
        plain = SearchConfig()
        names = ("rule", "min_ratio", "min_extra", "unknown_penalty")
        others = [f"{name} {value}" for name in names if (value := getattr(search, name)) != getattr(plain, name)]
        return Restraints(never=() if tokens.pad is None else (tokens.pad,), shortest=1, others=tuple(others))
    config = checkpoint.model.generation_config
    words: list[list[int]] = config.bad_words_ids or []
    changed = {name: value for name, value in config.to_diff_dict().items() if name not in PLAIN_SETTINGS and value}
    others = [f"{name} {value}" for name, value in changed.items()]
    others += ["bad_words_ids of several tokens"] if any(len(word) > 1 for word in words) else []
    never = tuple(tokens.target[word[0]] for word in words if len(word) == 1)
    return Restraints(never=never, shortest=0, others=tuple(others))


def translated(
    engine: Any, checkpoint: Checkpoint, translator: Translator, data: InputTexts, *, limit: float
) -> tuple[str, ...]:
    """Lines on how many sentences are translated alike, greedily and with a beam.

    CheckpointError where a greedy choice of the engine is not the model's own (by `limit`, a share of the largest
    logit), or where most greedy translations differ and no setting says why.
    """
    texts, tokens = list(data.sources[:TEXTS]), translator.tokens
    if not texts:
        return ()
    longest = min(LONGEST, (translator.config.decoder.max_positions or LONGEST + 2) - 2)
    encoded = checkpoint.encode(texts, side="source", limit=checkpoint.reads(None))
    sources, restraints = [source_tokens(each.ids, tokens) for each in encoded], restraints_of(checkpoint, tokens)
    shared: dict[str, Any] = {"length_penalty": 1.0, "max_decoding_length": longest, "return_scores": True}
    search: Any = getattr(checkpoint, "search", None)
    lines, scores = [], search is None or search.rule == "fairseq"  # the mean of log-probabilities ranks in both
    for beam, way in ((1, "greedily"), (BEAM, f"with a beam of {BEAM}")):
        options = TranslateOptions(
            beam=beam, power=1.0, max_ratio=0, max_extra=longest, keep_pieces=True, scores=scores
        )
        ours = [translations[0] for translations in checkpoint.translations(texts, options)]
        bare = same_texts(checkpoint, tokens, engine.translate_batch(sources, beam_size=beam, **shared), ours)
        found = engine.translate_batch(sources, beam_size=beam, **shared, **restraints.options)
        pairs = max(bare, same_texts(checkpoint, tokens, found, ours), key=len)
        lines.append(_line(bare, pairs, len(texts), way, restraints, scores=scores))
        if beam == 1:
            _check_choices(checkpoint, tokens, encoded, found, restraints, longest=longest, limit=limit)
            if 2 * len(pairs) < len(texts) and not restraints.others:
                raise CheckpointError(
                    f"CTranslate2 translates {len(texts) - len(pairs)} of {len(texts)} sentences otherwise than the "
                    "model, with the same log-probabilities and the same settings; nothing was saved. Please report "
                    "this with the output of `headscope show`"
                )
    return tuple(lines)


def _line(bare: Pairs, pairs: Pairs, texts: int, way: str, restraints: Restraints, *, scores: bool) -> str:
    """How many are the same, and why others are not; `bare` are those of the engine's own defaults."""
    line = f"CTranslate2 translates {len(pairs)} of {texts} sentences the same {way}"
    if len(bare) < len(pairs):
        line += f" ({restraints.typed}; {len(bare)} without)"
    if scores and pairs:
        line += f"; their scores differ by {max(abs(a.scores[0] - b.score) for a, b in pairs):.1e}"
    if len(pairs) < texts and restraints.others:
        line += f"; headscope's search follows {', '.join(restraints.others)}, which CTranslate2 has not"
    elif 2 * len(pairs) < texts:
        line += "; its beam ranks by probabilities without what may not come, headscope's by the model's own"
    return line


def same_texts(checkpoint: Any, tokens: TranslatorTokens, found: Sequence[Any], ours: Sequence[Translation]) -> Pairs:
    """Pairs of the same text, which has no special tokens."""
    if checkpoint.is_native:
        special = {tokens.target[number] for number in checkpoint.target.special_ids}
    else:
        special = set(checkpoint.tokenizer.all_special_tokens)
    texts = [" ".join(token for token in result.hypotheses[0] if token not in special) for result in found]
    return [(theirs, mine) for theirs, text, mine in zip(found, texts, ours, strict=True) if text == mine.text]


def _check_choices(
    checkpoint: Any,
    tokens: TranslatorTokens,
    encoded: Sequence[Encoded],
    found: Sequence[Any],
    restraints: Restraints,
    *,
    longest: int,
    limit: float,
) -> None:
    """CheckpointError where a token that was chosen greedily is not the likeliest by the model's logits."""
    numbers = {token: number for number, token in enumerate(tokens.target)}
    end, never = numbers[tokens.end], [numbers[token] for token in restraints.never]
    difference, largest = 0.0, 1.0
    for sentence, result in zip(encoded, found, strict=True):
        chosen = [numbers[token] for token in result.hypotheses[0]]
        chosen += [end] if len(chosen) < longest else []
        read = Encoded([numbers[tokens.start], *chosen[:-1]], [False] * len(chosen))
        source, target = (pad_side([each]).to(checkpoint.device) for each in (sentence, read))
        with torch.no_grad():
            logits = checkpoint.logits(Batch(torch.arange(1), 0, source, target))[0].double().cpu()  # [t V]
        largest = max(largest, float(logits.masked_fill(logits.isinf(), 0.0).abs().max()))
        logits[:, never] = -torch.inf
        logits[: restraints.shortest, end] = -torch.inf
        behind = logits.amax(dim=1) - logits[torch.arange(len(chosen)), chosen]
        difference = max(difference, float(behind.max()))
    if not any(name.startswith("bad_words_ids") for name in restraints.others):
        refuse_difference(difference, 2 * limit * largest, "CTranslate2", CHOICE)


def source_tokens(ids: list[int], tokens: TranslatorTokens) -> list[str]:
    """Tokens of a source, without the end that the engine adds."""
    written = [tokens.source[number] for number in ids]
    return written[:-1] if tokens.adds_end and written[-1:] == [tokens.end] else written
