"""A smaller model in memory with its verification, and the content of its `pruning.json` and model card."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headscope.config.option import option_name, typed_words
from headscope.errors import command_flag
from headscope.evaluation.before_after import QualityChange
from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import EngineFile
from headscope.formats.base import Checkpoint, Export
from headscope.formats.exports import Card, SavedFiles, hub_metadata
from headscope.formats.size import Size, measure_size
from headscope.heads import SITES, SiteLayer
from headscope.model.removal_plan import RemovalPlan
from headscope.pruning.closed_form.compensate import Compensated
from headscope.pruning.options.removal import RemoveConfig, ShrinkConfig
from headscope.pruning.removal.verify import Timing, Verification, speedup_bound
from headscope.pruning.removal.whole_layers import WholeLayers
from headscope.results.answer import Answer
from headscope.results.removal import Removal, merged_text
from headscope.signature import Signature, count_of
from headscope.version import VERSION


@dataclass(frozen=True)
class Shrunk:
    """A model without some heads, in memory, verified against the whole one with these heads masked.

    `source` and `before` describe the whole model (the refitted one, if there is a `compensation`), `data` are the
    inputs for the comparison. `quality` is on held-out text, `elsewhere` on a second one, `why_unmeasured` the reason
    if there is none. `layers` is the loss of a model without whole layers of as many parameters.
    """

    checkpoint: Checkpoint
    export: Export
    source: Mapping[str, str]
    removal: RemovalPlan
    verification: Verification
    data: InputTexts
    before: Size
    signature: Signature
    compensation: Compensated | None = None
    quality: QualityChange | None = None
    elsewhere: QualityChange | None = None
    why_unmeasured: str = ""
    layers: WholeLayers | None = None
    remarks: tuple[str, ...] = ()


def padding_note(shrunk: Shrunk) -> tuple[str, ...]:
    """A remark on the heads of zeros that fill up layers."""
    layout, layout_before = shrunk.checkpoint.layout, shrunk.removal.layout
    zeros = sum(layout[site_layer] - layout_before[site_layer] for site_layer in layout_before)
    if not zeros or shrunk.export.name == "masked":
        return ()
    counts = sorted(set(layout.values()))
    saving = ": nothing is saved" if sum(layout.values()) == shrunk.before.attention_heads else ""
    return (
        f"filled up with {count_of(zeros, 'head')} of zeros, to {', '.join(map(str, counts))} heads a layer{saving}",
    )


def removal_card(removal: Removal) -> Card:
    """The folder's README: the answers, and for the hub its base model and what opens it."""
    record = removal.record
    name = Path(record["source"]["path"]).name
    before, after = record["before"]["attention_heads"], record["after"]["attention_heads"]
    return Card(
        title=f"{name}: {merged_text(record) or f'{after} of {before} heads'}",
        command=record["command"],
        facts=tuple(line for answer in removal.answers() for line in answer_lines(answer)),
        opens=tuple(record["opens"]),
        limits=tuple(record["limits"]),
        metadata=hub_metadata(
            record["source"]["path"],
            library="transformers" if record["output"]["format"] == "huggingface" else "headscope",
            tags=("attention-head-pruning",),
        ),
    )


def answer_lines(answer: Answer) -> Iterator[str]:
    """The lines of an answer in a list: one for each row of its table, and its sentence."""
    if answer.table is not None:
        columns = answer.table.columns[1:]
        for title, *cells in answer.table.rows:
            pairs = zip(columns, cells, strict=True)
            values = [f"{column} {cell}".removeprefix("change ") for column, cell in pairs if cell]
            yield f"{title}: {', '.join(values)}"
    if answer.sentence and answer.question not in ("Opens with", "Notes"):
        yield f"{answer.question}: {answer.sentence}" if answer.question and not answer.table else answer.sentence


def shrunk_record(
    shrunk: Shrunk,
    config: RemoveConfig | ShrinkConfig,
    *,
    files: SavedFiles | None = None,
    engines: Sequence[EngineFile] = (),
    times: Sequence[Timing] = (),
    seconds: float = 0.0,
) -> dict[str, Any]:
    """The content of `pruning.json`: the smaller model, its options and its files."""
    checkpoint, plan = shrunk.checkpoint, shrunk.removal
    after = measure_size(checkpoint, shrunk.data.feeds)
    files_written: list[SavedFiles | EngineFile] = [*([] if files is None else [files]), *engines]
    companions = {} if files is None else config.companion_values()
    return {
        "headscope": VERSION,
        "source": {**shrunk.source, **{name: str(value) for name, value in companions.items()}},
        "removed": [str(head) for head in plan.removed],
        "kept": _by_site(plan.kept),
        "merged": _by_site(plan.merged),
        "verified": asdict(shrunk.verification),
        "compensation": shrunk.compensation and shrunk.compensation.record(),
        "quality": shrunk.quality and shrunk.quality.record(),
        "elsewhere": shrunk.elsewhere and shrunk.elsewhere.record(),
        "layers": shrunk.layers and asdict(shrunk.layers),
        "before": asdict(shrunk.before),
        "after": asdict(after),
        "signature": str(shrunk.signature),
        "output": {
            "format": checkpoint.format,
            "export": shrunk.export.name,
            "file": files.path.name if files is not None and files.path.is_file() else ".",
        },
        "heads": list_typed(config, shrunk),
        "command": typed_command(config),
        "engines": [asdict(file) for file in engines],
        "opens": [line for part in files_written for line in part.opens],
        "limits": [line for part in files_written for line in part.limits],
        "times": [{**asdict(timing), "at_most": speedup_bound(timing, shrunk.before, after)} for timing in times],
        "notes": [
            *(() if files is None else files.notes),
            *padding_note(shrunk),
            *shrunk.remarks,
            *filter(None, [shrunk.verification.rounds, shrunk.why_unmeasured]),
            *(() if shrunk.compensation is None else shrunk.compensation.remarks()),
            *(() if shrunk.quality is None else shrunk.quality.unread),
            *(note for file in engines for note in file.notes),
        ],
        "seconds": seconds,
    }


def _by_site(values: Mapping[SiteLayer, Sequence[Any]]) -> dict[str, dict[str, list[Any]]]:
    by_site: dict[str, dict[str, list[Any]]] = {}
    for (site, layer), value in sorted(values.items(), key=lambda item: (SITES.index(item[0][0]), item[0][1])):
        by_site.setdefault(site.value, {})[str(layer)] = list(value)
    return by_site


def list_typed(config: RemoveConfig | ShrinkConfig, shrunk: Shrunk) -> dict[str, str | None]:
    """The option that names heads with its value, and the digest of the file if the value is one."""
    if isinstance(config, ShrinkConfig):
        return {"option": command_flag("heads"), "list": ",".join(map(str, shrunk.removal.removed)), "sha256": None}
    if config.merge_kv:
        path, counts = config.merge_by, [str(len(groups)) for groups in shrunk.removal.groups.values()]
        table = path / "heads.csv" if path is not None and path.is_dir() else path
        counts_text = ",".join(counts[:1] if len(set(counts)) == 1 else counts)
        digest = None if table is None else hashlib.sha256(table.read_bytes()).hexdigest()
        return {"option": command_flag("merge_kv"), "list": counts_text, "sha256": digest}
    heads = config.heads or config.keep_only or ""
    is_file = "," not in heads and os.path.isfile(heads)
    digest = hashlib.sha256(Path(heads).read_bytes()).hexdigest() if is_file else None
    return {"option": command_flag("heads" if config.heads else "keep_only"), "list": heads, "sha256": digest}


def typed_command(config: RemoveConfig | ShrinkConfig) -> str:
    """The command with the options that decide the result, without output folder and device; files without folders."""
    words = ["prune", "shrink" if isinstance(config, ShrinkConfig) else "remove", Path(config.checkpoint).name]
    for entry in fields(config):
        value = getattr(config, entry.name)
        decides = entry.metadata.get("identity") and value != entry.default
        if decides and value not in (None, (), "", False) and not isinstance(value, list):  # lists are texts in memory
            parts = value if isinstance(value, tuple) else (value,)
            names = [Path(part).name if os.path.isfile(str(part)) else part for part in parts]
            typed_value = names if isinstance(value, tuple) else names[0]
            words += typed_words(option_name(entry), typed_value, flagless=entry.metadata["flagless"])
    return shlex.join(words)
