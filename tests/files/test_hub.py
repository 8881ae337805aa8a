"""Pushing to the model hub, with a client that records its calls and uses no network."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.makers.shared import Command, succeed, write_lines
from tests.oracles import classifiers

HEADS = "encoder-self.0.*,encoder-self.1.2"


class Hub:
    """Stands in for huggingface_hub's client: records `calls` and the uploaded `files`, and raises `fails` by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fails: dict[str, Exception] = {}
        self.files: set[str] = set()

    def whoami(self) -> dict[str, Any]:
        self._record("whoami", {})
        return {"name": "someone"}

    def create_repo(self, name: str, **options: Any) -> str:
        self._record("create_repo", {"name": name, **options})
        return f"https://hub.test/{name}"

    def upload_folder(self, *, folder_path: Path, **options: Any) -> None:
        self.files = {path.name for path in folder_path.iterdir()}
        self._record("upload_folder", {"folder_path": folder_path, **options})

    def _record(self, name: str, options: dict[str, Any]) -> None:
        self.calls.append((name, options))
        if name in self.fails:
            raise self.fails[name]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    return stand_in


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifiers.folder(tmp_path_factory.mktemp("hub") / "bert", "bert")


def removal(bert: Path, out: Path, *more: object) -> list[object]:
    return ["prune", "remove", bert, "--heads", HEADS, "--out", out, "--rounds", 0, "--device", "cpu", *more]


@pytest.mark.slow
def test_the_complete_folder_is_pushed_with_its_card(hub: Hub, bert: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "small"
    labels, text = tmp_path / "labels", tmp_path / "text"
    write_lines(text, classifiers.texts(23))
    write_lines(labels, [classifiers.NAMES[label] for label in classifiers.labels(23)])
    options = ["--source", text, "--labels", labels, "--compensate", "mean"]
    output = succeed(command, *removal(bert, out, "--hub-name", "someone/small", *options))
    assert "Pushed to https://hub.test/someone/small" in output
    assert hub.names == ["whoami", "create_repo", "upload_folder"]
    (_, creation), (_, upload) = hub.calls[1:]
    assert creation == {"name": "someone/small", "private": True, "exist_ok": True, "repo_type": "model"}
    assert upload["folder_path"] == out and upload["repo_id"] == "someone/small"
    assert "2 of 6 attention heads" in upload["commit_message"]
    assert {"config.json", "model.safetensors", "README.md", "pruning.json"} <= hub.files  # it was whole by then
    assert "pruning.json" in upload["ignore_patterns"]  # it names paths of this machine
    assert_card(out, tmp_path)


def assert_card(out: Path, folder: Path) -> None:
    """The card has the removed heads, the proof, the metric before and after and the command, but no local path."""
    card = (out / "README.md").read_text(encoding="utf-8")
    head = card.split("---\n")[1]
    assert 'library_name: "transformers"' in head and "base_model" not in head
    assert "Heads removed: encoder-self.0: all; encoder-self.1: 2" in card
    assert "outputs equal those of the refitted model" in card
    record = json.loads((out / "pruning.json").read_text(encoding="utf-8"))
    for performance in record["compensation"]["performance"].values():
        assert f"{performance['value']:.4f}" in card
    command = card.split("`headscope ")[1].split("`")[0]
    assert command.startswith("prune remove bert ")
    for option in (f"--heads '{HEADS}'", "--source text", "--labels labels", "--compensate mean"):
        assert option in command
    assert "hub" not in command and "--out" not in command
    assert str(folder) not in card


def test_without_a_token_nothing_is_begun(
    hub: Hub, bert: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    status, _, err = command(*removal(bert, tmp_path / "small", "--hub-name", "someone/small"))
    assert (status, err.count("\n")) == (2, 1)
    assert "`hf auth login`" in err and "HF_TOKEN" in err
    assert hub.calls == [] and not (tmp_path / "small").exists()
