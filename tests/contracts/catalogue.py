"""The list of architectures in architectures.toml: their tiny models and their outcomes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from headscope.files.reading import read_toml

TABLE = Path(__file__).with_name("architectures.toml")
TASKS = {
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "picture": "AutoModelForImageClassification",
    "picture states": "AutoModel",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture: what builds it, and its outcome with the reason that headscope gives."""

    name: str
    model_type: str
    task: str
    sizes: dict[str, Any]
    outcome: Literal["works", "masked only", "refused"] = "works"
    because: str = ""
    since: str = ""
    groups: bool = True
    note: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether it is refused: in itself, or by a transformers before `since`."""
        import transformers

        too_old = bool(self.since) and Version(transformers.__version__) < Version(self.since)
        return self.outcome == "refused" or too_old

    def model(self) -> Any:
        """The tiny model with its task head, in evaluation mode, with random weights of one seed."""
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.sizes)
        kind = getattr(transformers, TASKS.get(self.task, self.task))
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        return model.eval()


def catalogue() -> dict[str, Entry]:
    """Every architecture of the list by its name."""
    table = read_toml(TABLE)
    templates = {name: _fill_templates(sizes, {}) for name, sizes in table["templates"].items()}
    entries = {}
    for name, row in table["architectures"].items():
        sizes: dict[str, Any] = {}
        for template in row.pop("like", []):
            sizes |= templates[template]
        sizes |= _fill_templates(row.pop("sizes", {}), templates)
        entries[name] = Entry(name=name, model_type=row.pop("model_type", name), sizes=sizes, **row)
    return entries


def _fill_templates(value: Any, templates: dict[str, Any]) -> Any:
    """A value of the file with "none" and the names of templates replaced by their values."""
    if isinstance(value, dict):
        return {name: _fill_templates(part, templates) for name, part in value.items()}
    if isinstance(value, str) and value.startswith("@"):
        return templates[value[1:]]
    return None if value == "none" else value
