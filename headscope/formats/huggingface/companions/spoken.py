"""The tokens that a transcript of Whisper begins with: start, language, task, and that no times are written.

Published models list them in generation settings, not in the tokenizer, and `generate` guesses the language.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers.processors import TemplateProcessing
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from headscope.config import Companions, flag
from headscope.errors import CheckpointError, ConfigError, shortlist

ENGLISH = "en"
TASKS = ("transcribe", "translate")
MULTILINGUAL = 51865
"""The smallest vocabulary of a multilingual Whisper; English-only ones have the tokens of languages in theirs too."""


class Spoken(NamedTuple):
    """The language of recordings, by its code, and whether it is transcribed or translated."""

    language: str
    task: str

    @property
    def written(self) -> str:
        """The language of the transcripts: translations are English."""
        return ENGLISH if self.task == "translate" else self.language


class Prompts:
    """The tokens of languages and tasks that a multilingual Whisper begins with; `languages` is empty for others."""

    def __init__(self, model: Any, tokenizer: Any, path: str) -> None:
        self._settings, self._config = model.generation_config, model.config
        self._tokenizer, self._path = tokenizer, path
        named = self._settings_of("lang_to_id") or {}
        codes = sorted({*TO_LANGUAGE_CODE.values()})
        ids = named or {token: self._id(token) for token in (f"<|{code}|>" for code in codes)}
        languages = {token.strip("<|>"): number for token, number in ids.items() if number is not None}
        self.languages: dict[str, int] = languages if self._is_multilingual(named, languages) else {}

    def _settings_of(self, name: str) -> Any:
        return getattr(self._settings, name, None)

    def _id(self, token: str) -> int | None:
        number: int | None = self._tokenizer.get_vocab().get(token) if self._tokenizer else None
        return number

    def _is_multilingual(self, named: dict[str, int], languages: dict[str, int]) -> bool:
        said = self._settings_of("is_multilingual")
        if said is not None or named:
            return bool(named) if said is None else bool(said)
        forced = dict(self._forced())
        begins = 1 in forced and (forced[1] is None or forced[1] in languages.values())
        return begins or (bool(languages) and self._config.vocab_size >= MULTILINGUAL)

    def _forced(self) -> list[tuple[int, int | None]]:
        """Positions and tokens of `forced_decoder_ids`, the older way to name language and task."""
        for of in (self._settings, self._config):
            if (forced := getattr(of, "forced_decoder_ids", None)) is not None:
                return [(int(place), number) for place, number in forced]
        return []

    def _tasks(self) -> dict[str, int]:
        named = self._settings_of("task_to_id") or {task: self._id(f"<|{task}|>") for task in TASKS}
        return {task: number for task, number in named.items() if number is not None}

    def spoken(self) -> Spoken | None:
        """What settings, `forced_decoder_ids` or the tokenizer name; CheckpointError for two languages."""
        language, task = self._code(self._settings_of("language")), self._settings_of("task")
        if language is None and task is None:
            forced = {number for _, number in self._forced()}
            language = next((code for code, number in self.languages.items() if number in forced), None)
            task = next((name for name, number in self._tasks().items() if number in forced), None)
        own = self._code(getattr(self._tokenizer, "language", None))
        if language is not None and own not in (None, language):
            raise CheckpointError(
                f"{self._path}: its tokenizer names the language {own}, its generation settings {language}; "
                "correct the one or the other"
            )
        language = own if language is None else language
        task = task or getattr(self._tokenizer, "task", None) or TASKS[0]
        return None if language is None else Spoken(language, task)

    def _code(self, name: Any) -> str | None:
        """The code of a language that is named as Whisper names it: `en`, `English` or `<|en|>`."""
        if not isinstance(name, str):
            return None
        bare = name.lower().strip("<|>")
        return TO_LANGUAGE_CODE.get(bare, bare)

    def choose(self, companions: Companions) -> Spoken | None:
        """What `companions` name, and the files where these name nothing; ConfigError for what the model cannot."""
        names = {name: getattr(companions, name) for name in ("src_lang", "tgt_lang")}
        codes = {name: self._code(value) for name, value in names.items()}
        for name, code in codes.items():
            if code is not None and code not in self.languages:
                raise ConfigError(f"{flag(name)} {names[name]}: {self._path} knows {shortlist([*self.languages])}")
        known, wanted = self.spoken(), codes["tgt_lang"]
        language = codes["src_lang"] or (known.language if known else None) or wanted
        if language is None:
            return None
        task = companions.task or (TASKS[wanted != language] if wanted else known.task if known else TASKS[0])
        chosen = Spoken(language, task)
        if wanted not in (None, chosen.written):
            raise ConfigError(
                f"--tgt-lang {wanted}: {self._path} writes the language of the recording ({language}; --task "
                "transcribe), or English (--task translate)"
            )
        return chosen

    def refuse_unnamed(self) -> None:
        """CheckpointError for a multilingual model whose files name no language."""
        if self.languages and self.spoken() is None:
            raise CheckpointError(
                f"{self._path} knows {len(self.languages)} languages ({shortlist([*self.languages])}) and nothing says "
                "which one the recordings are in; give --src-lang LANGUAGE, and --task translate for English "
                "translations"
            )

    def prefix(self, spoken: Spoken) -> list[int]:
        """The ids that a transcript begins with; CheckpointError where the model lacks one of them."""
        times = self._settings_of("no_timestamps_token_id") or self._id("<|notimestamps|>")
        start = self._settings_of("decoder_start_token_id") or self._config.decoder_start_token_id
        ids = [start, self.languages.get(spoken.language), self._tasks().get(spoken.task), times]
        if None in ids[:3]:
            raise CheckpointError(
                f"{self._path} has no token for {' and '.join(spoken)}, which its settings name; correct "
                "generation_config.json"
            )
        return [number for number in ids if number is not None]


def set_spoken(tokenizer: Any, model: Any, companions: Companions, path: str) -> None:
    """Begin transcripts with the language and task of `companions` or the files; else ConfigError."""
    prompts = Prompts(model, tokenizer, path)
    if not prompts.languages:
        if named := [flag(name) for name in ("src_lang", "tgt_lang", "task") if getattr(companions, name) is not None]:
            raise ConfigError(f"{named[0]} means nothing for {path}, which knows one language; leave it out")
        return
    if (spoken := prompts.choose(companions)) is None:
        return
    model.generation_config.language, model.generation_config.task = spoken
    if tokenizer is not None:
        tokenizer.language, tokenizer.task = spoken
        tokenizer.init_kwargs.update(spoken._asdict())
        _begin_with(tokenizer, prompts.prefix(spoken))


def _begin_with(tokenizer: Any, ids: list[int]) -> None:
    begin, end = tokenizer.convert_ids_to_tokens(ids), tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", end],
        pair=[*begin, "$A", "$B:1", end],
        special_tokens=[*zip(begin, ids, strict=True), (end, tokenizer.eos_token_id)],
    )
