"""The languages of multilingual and speech checkpoints, and the vocabularies of their two sides.

Without a named language, tokenizers of NLLB, M2M-100 and mBART encode targets as source text, and Whisper's `generate`
guesses; published Whisper models list languages in generation settings, not in the tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from headscope.config import Companions
from headscope.data.encoded import SideName
from headscope.errors import CheckpointError, ConfigError, flag, shortlist

TOKENIZERS = ("NllbTokenizer", "M2M100Tokenizer", "MBartTokenizer", "MBart50Tokenizer")
"""Tokenizers that need a language; PLBart's does not."""
TOKENISING = RLock()
"""Held while one of two threads uses a tokenizer: tokenizers of the library `tokenizers` keep the last settings."""
_SPECIAL = ("bos", "eos", "sep", "cls", "pad", "mask")


class Language(NamedTuple):
    """A language as its tokenizer calls it, and the id of its token."""

    name: str
    number: int


def target_language(tokenizer: Any, model: nn.Module, path: str) -> Language | None:
    """The language that the model writes, None without languages; CheckpointError if none is named, or two."""
    if str(getattr(model.config, "model_type", "")).startswith("seamless"):
        raise CheckpointError(f"{path} is told its language by its own generate only; analyse it without {flag.target}")
    if not (numbers := language_numbers(tokenizer)):
        return None
    tokenizer_language, first_language = tokenizer.tgt_lang, _first_language(model, numbers)
    names = {name for name in (tokenizer_language, first_language) if name is not None}
    if len(names) != 1 or not names <= {*numbers}:
        raise CheckpointError(
            f"{path} knows {len(numbers)} languages ({shortlist([*numbers])}); its tokenizer writes "
            f"{str(tokenizer_language)[:40]} (tgt_lang), and its generation settings begin with "
            f"{first_language}: give {flag.tgt_lang} and {flag.src_lang}"
        )
    return Language(name := names.pop(), numbers[name])


def languages(tokenizer: Any, model: nn.Module) -> dict[str, Any] | None:
    """The languages to read and to write, and the number of known ones; None without languages."""
    if not (numbers := language_numbers(tokenizer)):
        return None
    return {
        "reads": tokenizer.src_lang,
        "writes": tokenizer.tgt_lang or _first_language(model, numbers),
        "known": len(numbers),
    }


def set_languages(tokenizer: Any, model: nn.Module, companions: Companions, path: str) -> None:
    """Set the languages to read and to write, also in saved files; ConfigError for unknown ones."""
    language_options = companions.companion_values()
    if language_options.pop("task", None):
        raise ConfigError(f"{flag.task} means nothing for {path}, which reads no recordings; leave it out")
    if hasattr(model, "set_default_language"):
        known_languages: Any = [*model.config.languages]  # type: ignore[union-attr, misc]
        language = language_options.pop("src_lang", None) or model.config.default_language  # type: ignore[union-attr]
        if language not in known_languages:
            raise ConfigError(f"{flag.src_lang} {language}: {path} knows {shortlist(known_languages)}")
        model.set_default_language(language)  # type: ignore[operator]
    numbers = language_numbers(tokenizer)
    for name, language in language_options.items():
        if language not in numbers:
            alike = sorted(numbers, key=lambda candidate: not candidate.lower().startswith(language[:2].lower()))
            choices = shortlist(alike) if alike else "no languages; leave it out"
            raise ConfigError(f"{flag(name)} {language}: {path} knows {choices}")
        setattr(tokenizer, name, language)
        tokenizer.init_kwargs[name] = language
    if (target := language_options.get("tgt_lang")) is None:
        return
    settings = [of for of in (getattr(model, "generation_config", None), model.config) if of is not None]
    entries = [(of, entry) for of in settings for entry in ("decoder_start_token_id", "forced_bos_token_id")]
    naming_languages = [(of, entry) for of, entry in entries if getattr(of, entry, None) in numbers.values()]
    for of, entry in naming_languages or entries[1:2]:
        setattr(of, entry, numbers[target])


@contextmanager
def in_target_language(tokenizer: Any, model: nn.Module, path: str) -> Iterator[None]:
    """Within the block the tokenizer reads targets in the model's language, and no other thread uses it."""
    language = target_language(tokenizer, model, path)
    with TOKENISING:
        if language is None:
            yield
            return
        before, tokenizer.tgt_lang = tokenizer.tgt_lang, language.name
        try:
            yield
        finally:
            tokenizer.tgt_lang = before


def language_numbers(tokenizer: Any) -> dict[str, int]:
    """The languages of a tokenizer that needs one, with the ids of their tokens; empty for other tokenizers."""
    if not any(cls.__name__ in TOKENIZERS for cls in type(tokenizer).__mro__):
        return {}
    if (codes := getattr(tokenizer, "lang_code_to_id", None)) is not None:
        return dict(codes)
    other_ids = {getattr(tokenizer, f"{name}_token_id") for name in (*_SPECIAL, "unk")}
    return {
        tokenizer.convert_ids_to_tokens(number): number
        for number in tokenizer.all_special_ids
        if number not in other_ids
    }


def _first_language(model: nn.Module, numbers: Mapping[str, int]) -> str | None:
    names = {number: name for name, number in numbers.items()}
    settings = getattr(model, "generation_config", None), model.config
    for entry in ("forced_bos_token_id", "decoder_start_token_id"):
        for of in settings:
            if (number := getattr(of, entry, None)) in names:
                return names[number]
    return None


def of_side(tokenizer: Any, side: SideName) -> Any:
    """The tokenizer with the vocabulary of one side; itself if it has one vocabulary for both.

    Marian's with `separate_vocabs` and FSMT's encode by the source's vocabulary and decode by the target's.
    """
    target = side == "target"
    if getattr(tokenizer, "separate_vocabs", False):
        ids = tokenizer.target_encoder if target else tokenizer.encoder
        pieces = tokenizer.spm_target if target else tokenizer.spm_source
        attributes = {name: pieces for name in ("spm_source", "spm_target", "current_spm")}
        attributes |= {"separate_vocabs": False, "current_encoder": ids}
    elif any(cls.__name__ == "FSMTTokenizer" for cls in type(tokenizer).__mro__):
        ids = {piece: number for number, piece in tokenizer.decoder.items()} if target else tokenizer.encoder
        attributes = dict.fromkeys(("src_lang", "tgt_lang"), tokenizer.tgt_lang if target else tokenizer.src_lang)
    else:
        return tokenizer
    duplicate = copy.copy(tokenizer)
    names = {number: piece for piece, number in ids.items()}
    added_tokens = tokenizer._added_tokens_decoder  # with the ids of the source, which may be those of other pieces
    own_tokens = {
        n: one for n, one in added_tokens.items() if n == tokenizer.eos_token_id or names.get(n, str(one)) == str(one)
    }
    numbers = {str(one): n if n in own_tokens else ids.get(str(one), n) for n, one in added_tokens.items()}
    vars(duplicate).update(
        attributes, encoder=ids, decoder=names, _added_tokens_decoder=own_tokens, _added_tokens_encoder=numbers
    )
    return duplicate


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that do not stand for text: start, end, padding, separators; the unknown subword does."""
    tokens = set(tokenizer.all_special_tokens)
    special = {n for n in tokenizer.all_special_ids if tokenizer.convert_ids_to_tokens(n) in tokens}
    other_ids = {getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
    unknown_id = tokenizer.unk_token_id
    return frozenset(special if unknown_id in other_ids else special - {unknown_id})


ENGLISH = "en"
TASKS = ("transcribe", "translate")
MULTILINGUAL = 51865
"""The smallest vocabulary of a multilingual Whisper; vocabularies of English-only ones have language tokens too."""


class Spoken(NamedTuple):
    """The code of the language of recordings, and the task: transcription or translation."""

    language: str
    task: str

    @property
    def description(self) -> str:
        """The language of the transcripts: translations are English."""
        return ENGLISH if self.task == "translate" else self.language


class Prompts:
    """The tokens of languages and tasks that a multilingual Whisper's transcripts begin with.

    `languages` is empty for other models.
    """

    def __init__(self, model: Any, tokenizer: Any, path: str) -> None:
        settings, self._config = model.generation_config, model.config
        self._settings: dict[str, Any] = {} if settings is None else vars(settings)
        self._ids: dict[str, int] = tokenizer.get_vocab() if tokenizer else {}
        self._tokenizer, self._path = tokenizer, path
        ids_by_token = self._settings.get("lang_to_id") or {}
        tokens = [f"<|{code}|>" for code in sorted({*TO_LANGUAGE_CODE.values()})]
        ids = ids_by_token or {token: self._ids.get(token) for token in tokens}
        languages = {token.strip("<|>"): number for token, number in ids.items() if number is not None}
        ids_by_task = self._settings.get("task_to_id") or {task: self._ids.get(f"<|{task}|>") for task in TASKS}
        self.tasks: dict[str, int] = {task: number for task, number in ids_by_task.items() if number is not None}
        # `forced_decoder_ids`, the older way to name language and task
        forced_ids = self._settings.get("forced_decoder_ids") or getattr(self._config, "forced_decoder_ids", None) or ()
        self.forced_ids = {int(position): number for position, number in forced_ids}
        if (multilingual := self._settings.get("is_multilingual")) is None:
            begins = 1 in self.forced_ids and self.forced_ids[1] in (None, *languages.values())
            multilingual = bool(ids_by_token) or begins or (languages and self._config.vocab_size >= MULTILINGUAL)
        self.languages: dict[str, int] = languages if multilingual else {}

    def spoken(self) -> Spoken | None:
        """The language and task by settings, `forced_decoder_ids` or the tokenizer; CheckpointError if these differ."""
        language, task = self._code(self._settings.get("language")), self._settings.get("task")
        if language is None and task is None:
            forced_ids = self.forced_ids.values()
            language = next((code for code, number in self.languages.items() if number in forced_ids), None)
            task = next((name for name, number in self.tasks.items() if number in forced_ids), None)
        token_language = self._code(getattr(self._tokenizer, "language", None))
        if language is not None and token_language not in (None, language):
            names = f"its tokenizer names the language {token_language}, its generation settings {language}"
            raise CheckpointError(f"{self._path}: {names}; correct one of them")
        language = token_language if language is None else language
        task = task or getattr(self._tokenizer, "task", None) or TASKS[0]
        return None if language is None else Spoken(language, task)

    def _code(self, name: Any) -> str | None:
        """The code of a language in any of Whisper's spellings: `en`, `English` or `<|en|>`."""
        if not isinstance(name, str):
            return None
        bare = name.lower().strip("<|>")
        return str(TO_LANGUAGE_CODE.get(bare, bare))

    def choose(self, companions: Companions) -> Spoken | None:
        """The language and task of `companions`, else of the files; ConfigError if the model lacks them."""
        names = {name: getattr(companions, name) for name in ("src_lang", "tgt_lang")}
        codes = {name: self._code(value) for name, value in names.items()}
        for name, code in codes.items():
            if code is not None and code not in self.languages:
                raise ConfigError(f"{flag(name)} {names[name]}: {self._path} knows {shortlist([*self.languages])}")
        default, target = self.spoken(), codes["tgt_lang"]
        language = codes["src_lang"] or (default.language if default else None) or target
        if language is None:
            return None
        task = companions.task or (TASKS[target != language] if target else default.task if default else TASKS[0])
        spoken = Spoken(language, task)
        if target not in (None, spoken.description):
            tasks = f"{language}, as the recording ({flag.task} transcribe), or English ({flag.task} translate)"
            raise ConfigError(f"{flag.tgt_lang} {target}: {self._path} writes {tasks}")
        return spoken

    def prefix(self, spoken: Spoken) -> list[int]:
        """The ids that a transcript begins with; CheckpointError where the model lacks one of them."""
        times = self._settings.get("no_timestamps_token_id") or self._ids.get("<|notimestamps|>")
        start = self._settings.get("decoder_start_token_id") or self._config.decoder_start_token_id
        ids = [start, self.languages.get(spoken.language), self.tasks.get(spoken.task), times]
        if None in ids[:3]:
            names = " and ".join(spoken)
            raise CheckpointError(f"{self._path} has no token for {names}; correct generation_config.json")
        return [number for number in ids if number is not None]


def set_spoken(tokenizer: Any, model: Any, companions: Companions, path: str) -> None:
    """Make transcripts begin with the language and task of `companions` or the files; ConfigError for invalid ones."""
    prompts = Prompts(model, tokenizer, path)
    if not prompts.languages:
        for name in companions.companion_values():
            raise ConfigError(f"{flag(name)} means nothing for {path}, which knows one language; leave it out")
        return
    if (spoken := prompts.choose(companions)) is None:
        return
    model.generation_config.language, model.generation_config.task = spoken
    if tokenizer is not None:
        tokenizer.language, tokenizer.task = spoken
        tokenizer.init_kwargs.update(spoken._asdict())
        ids, end = prompts.prefix(spoken), tokenizer.eos_token
        begin = tokenizer.convert_ids_to_tokens(ids)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[*begin, "$A", end],
            pair=[*begin, "$A", "$B:1", end],
            special_tokens=[*zip(begin, ids, strict=True), (end, tokenizer.eos_token_id)],
        )
