"""What we write opens in the field's own programs: judged by lm-eval, fitted with adapters by PEFT, where installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from headscope.formats.huggingface.format import adapter_limit
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from tests.makers import decoders

HEADS = {
    "self-contained": "decoder-self.1.*,decoder-self.0.0,decoder-self.0.1",
    "native": "decoder-self.*.0,decoder-self.*.1",
    "laguna": "decoder-self.0.0,decoder-self.0.2,decoder-self.0.4,decoder-self.0.6",
}
QUESTIONS = ("a b", ["c", "d e"], 0), ("b", ["a", "c"], 1)


@pytest.fixture
def lm_eval() -> Any:
    """The harness, asked for before a folder is written for it."""
    return pytest.importorskip("lm_eval", reason='lm-eval is not installed (pip install "headscope[bench]")')


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason='peft is not installed (pip install "headscope[bench]")')


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with fewer heads, of the kind that the test names."""
    kind = request.param
    whole = decoders.saved(tmp_path / "whole", "qwen3", tokenizer=decoders.byte_level())
    options: dict[str, Any] = {"heads": HEADS[kind], "rounds": 0, "max_sentences": 4, "export": (kind,)}
    run_removal(RemoveConfig(checkpoint=str(whole), out=tmp_path / "small", **options))
    return tmp_path / "small" / ("laguna" if kind == "laguna" else "")


@pytest.mark.filterwarnings("default")  # of what that package imports
@pytest.mark.parametrize("written", HEADS, indirect=True)
def test_lm_eval_judges_every_folder(
    lm_eval: Any, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "tiny", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "tiny.jsonl")}},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    arguments = f"pretrained={written},trust_remote_code=True,dtype=float32"
    found = lm_eval.simple_evaluate(
        model="hf", model_args=arguments, tasks=[task], device="cpu", batch_size=2, bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    assert found["results"]["tiny"]["acc,none"] in (0, 0.5, 1)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("written", ["self-contained"], indirect=True)
def test_the_card_says_how_peft_leaves_out_layers_without_heads(peft: Any, written: Path) -> None:
    card = (written / "README.md").read_text(encoding="utf-8")
    (pattern,) = re.findall(r'exclude_modules=r"(.*?)"', card)
    model = transformers.AutoModelForCausalLM.from_pretrained(written, trust_remote_code=True)
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], exclude_modules=pattern, task_type="CAUSAL_LM")
    assert peft.get_peft_model(model, config).get_nb_trainable_parameters()[0] > 0


def test_the_pattern_names_the_layers_without_heads() -> None:
    (line,) = adapter_limit(SimpleNamespace(narrowed={"empty": ["layers.1.self_attn"]}))
    (pattern,) = re.findall(r'exclude_modules=r"(.*?)"', line)
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1, 11)]
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [False, True, False]
    assert adapter_limit(SimpleNamespace(narrowed={"empty": []})) == ()
