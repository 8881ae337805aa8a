"""Run llama.cpp in a separate process, so that a failed assertion there does not end this one.

`python -m headscope.export.llama_cpp REQUEST ANSWER` reads and writes JSON files; it needs only xllamacpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError

LONGEST = 600  # seconds


def ask(
    file: Path, prompts: list[list[int]], texts: list[str], *, top: int, forced_token: int | None
) -> tuple[list[dict[int, float]], list[list[int]]]:
    """The `top` log-probabilities `{id: log p}` of the token after each of `prompts`, and llama.cpp's ids of `texts`.

    Keys and values are in float32. llama.cpp's server returns no log-probabilities with a token that is part of a
    character, so it is forced to generate `forced_token`, one of whole characters; the log-probabilities are those
    before forcing. They may be NaN. CheckpointError, with llama.cpp's message, where it does not run the file.
    """
    request = {"file": str(file), "prompts": prompts, "texts": texts, "top": top, "forced_token": forced_token}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("request.json", "answer.json")]
        paths[0].write_text(json.dumps(request), encoding="utf-8")
        module = [sys.executable, "-m", __name__, *map(str, paths)]
        process = subprocess.run(module, capture_output=True, text=True, errors="replace", timeout=LONGEST, check=False)
        if not paths[1].is_file():
            words = ("error", "ASSERT", "failed", "Error")
            lines = [line.strip() for line in process.stderr.splitlines() if any(word in line for word in words)]
            why = " ".join((lines or ["it ended without a message"])[0].split())[:200]
            raise CheckpointError(f"llama.cpp does not run the GGUF file ({why}); nothing was saved")
        answer = json.loads(paths[1].read_text(encoding="utf-8"))
    nan = float("nan")  # null in JSON
    tops = [{int(key): nan if value is None else value for key, value in prompt} for prompt in answer["prompts"]]
    return tops, answer["ids"]


def main(request_path: str, answer_path: str) -> None:
    """Run the prompts and texts of a request, and write the answer."""
    import xllamacpp as llama

    request, params = json.loads(Path(request_path).read_text(encoding="utf-8")), llama.CommonParams()
    params.model.path = request["file"]
    params.n_ctx = max(map(len, request["prompts"])) + 8
    params.n_parallel, params.warmup = 1, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    prompts = [_log_probabilities(server, prompt, request) for prompt in request["prompts"]]
    answer = {"prompts": prompts, "ids": [_tokenize(server, text) for text in request["texts"]]}
    Path(f"{answer_path}.part").write_text(json.dumps(answer), encoding="utf-8")
    os.replace(f"{answer_path}.part", answer_path)


def _log_probabilities(server: Any, prompt: list[int], request: dict[str, Any]) -> list[tuple[int, float]]:
    """The ids and log-probabilities of the likeliest tokens after a prompt."""
    top = request["top"]
    completion = {"prompt": prompt, "max_tokens": 1, "n_probs": top, "logprobs": top}
    completion |= {"temperature": -1, "cache_prompt": False}
    if request["forced_token"] is not None:
        completion["logit_bias"] = [[request["forced_token"], 1000.0]]
    answer = server.handle_completions(completion)
    choice = (json.loads(answer) if isinstance(answer, str) else answer)["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or [{"top_logprobs": []}]
    return [(entry["id"], entry["logprob"]) for entry in content[0]["top_logprobs"]]


def _tokenize(server: Any, text: str) -> Any:
    """llama.cpp's ids of a text."""
    from urllib.request import Request as Post
    from urllib.request import urlopen

    content = json.dumps({"content": text, "add_special": True}).encode()
    post = Post(f"{server.listening_address}/tokenize", data=content, headers={"Content-Type": "application/json"})
    with urlopen(post) as answer:
        return json.loads(answer.read())["tokens"]


if __name__ == "__main__":
    main(*sys.argv[1:])
