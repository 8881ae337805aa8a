"""An open model: its heads, forward passes, translations, and contexts that capture, gate and mask heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from headscope.api.arguments import Text, progress_of, public_methods, text_options
from headscope.config import Companions
from headscope.config.commands import TranslateConfig, Translation
from headscope.config.option import make_config
from headscope.data.corpus import open_corpus
from headscope.errors import ConfigError, HeadscopeError
from headscope.evaluation.opened import forward_pass
from headscope.evaluation.translation import translate_lines
from headscope.files.reading import lines_of_text
from headscope.formats.base import DTYPES, Checkpoint
from headscope.heads import HeadId, Layout, all_heads, describe_heads
from headscope.model.discovery import eval_mode
from headscope.model.mixing.experts import one_expert
from headscope.model.taps import Captured, GateValues, Heads, capture, gated, gates_name, gates_of, head_ids_of, masked

C = TypeVar("C")


@public_methods
class OpenModel:
    """An open checkpoint, and the gates that are active on it."""

    def __init__(self, checkpoint: Checkpoint, *, companions: Companions | None = None) -> None:
        self._checkpoint = checkpoint
        self._companions = companions or Companions()
        self._gates: list[str] = []

    @property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint, which functions of the library take."""
        if self._checkpoint.in_memory:
            self._checkpoint.forget_heads()
        return self._checkpoint

    @property
    def model(self) -> nn.Module:
        """The torch module: a transformers model, or headscope's own `Transformer`."""
        return self._checkpoint.model

    @property
    def _load_options(self) -> dict[str, Any]:
        """Options that load this model again, on its device."""
        checkpoint, dtype = self.checkpoint, str(self.checkpoint.dtype).removeprefix("torch.")
        dtype = "auto" if dtype not in DTYPES or (dtype == "float32" and checkpoint.device.type == "cpu") else dtype
        options = {"checkpoint": checkpoint.path, "device": str(checkpoint.device), "dtype": dtype}
        return options | self._companions.companion_values()

    def _options(self, cls: type[C], options: Mapping[str, Any], *, what: str) -> C:
        """The config of a command for this model; ConfigError for an option that `what` does not have."""
        return make_config(cls, {**self._load_options, **options}, what=what)

    @property
    def layout(self) -> Layout:
        """Number of heads of every (site, layer)."""
        return self.checkpoint.layout

    @property
    def heads(self) -> list[HeadId]:
        """Every head, in the order of sites, layers and heads."""
        return list(all_heads(self.layout))

    def select(self, heads: Heads) -> list[HeadId]:
        """The heads that names select ("encoder-self.2.*,cross.0.1"); ConfigError for a name that selects none."""
        return head_ids_of(heads, self.layout)

    @property
    def gates(self) -> str:
        """The active gates and masks, as in signatures; empty if there are none."""
        return "+".join(filter(None, self._gates))

    def __repr__(self) -> str:
        checkpoint = self.checkpoint
        description = f"{checkpoint.path} ({checkpoint.format}, {checkpoint.model_type})"
        try:
            return f"<{type(self).__name__} {description}: {describe_heads(checkpoint.layout)}>"
        except HeadscopeError:  # the heads cannot be seen; methods that need them raise this error
            return f"<{type(self).__name__} {description}>"

    def __call__(self, text: Text, *, target: Text | None = None) -> Tensor:
        """One forward pass, without gradients, over a few sentences as one batch: for use within `capture` and `gated`.

        Logits [b t V] of models that predict words (teacher-forced with `target`), logits [b classes] of classifiers,
        final states [b t d] of other models.
        """
        lines = text_options(text, {"target": target})
        if "source" not in lines:
            raise ConfigError("no text: give a list of sentences, or a file")
        return forward_pass(self.checkpoint, open_corpus(lines["source"], target=lines.get("target")))

    def translate(self, text: Text, **options: Any) -> list[str]:
        """The best translation of every sentence.

        options: `mask` (heads that are off meanwhile), `progress`, and those of `headscope translate`: `beam`, …
        """
        return [best[0].text for best in self._translations(text, {**options, "nbest": 1})]

    def translations(self, text: Text, *, nbest: int = 1, **options: Any) -> list[list[Translation]]:
        """The `nbest` best translations of every sentence, best first: `text` and `score` of each. See `translate`."""
        return self._translations(text, {**options, "nbest": nbest, "scores": True})

    def _translations(self, text: Text, options: dict[str, Any]) -> list[list[Translation]]:
        checkpoint, mask, report = self.checkpoint, options.pop("mask", None), options.pop("progress", False)
        config = self._options(TranslateConfig, options, what="translate")
        off = [] if mask is None else head_ids_of(mask, checkpoint.layout, name="mask")
        sides = text_options(text, {})
        if {*sides} != {"source"}:
            raise ConfigError("translate takes a text without its translation; leave that out")
        lines = sides["source"]
        total = 0 if isinstance(lines, (str, Path)) else len(lines)
        search = config.search
        with (
            eval_mode(checkpoint.model),
            masked(checkpoint.model, off),
            one_expert(checkpoint.model, config.expert, seed=config.seed),
            progress_of(report)("translating", total) as step,
        ):
            source, tokens = lines_of_text(lines), config.batch_tokens
            return list(translate_lines(checkpoint, source, options=search, tokens=tokens, progress=step))

    @contextmanager
    def capture(self, *names: str) -> Iterator[Captured]:
        """Keep tensors of every head while the block runs: "weights" [b h t s], "context" [b h t k], "query", …

        `heads["encoder-self", 2]["weights"]` are those of the last call of that layer, `heads["encoder-self.2.5"]` of
        one head. Memory grows with every call.
        """
        with capture(self.model, names or ("weights",)) as tensors:
            yield tensors

    @contextmanager
    def gated(self, gates: Heads | GateValues) -> Iterator[None]:
        """Within the block heads are closed (`["cross.0.*"]`), or their contexts multiplied by gates.

        gates: names, numbers by name (`{"encoder-self.2.5": 0.5}`), or tensors [h] or [b h] by (site, layer), through
            which gradients flow. They act on weights·V, before the output projection. Signatures name them.
        """
        by_layer = gates_of(gates, self.layout)
        with gated(self.model, by_layer), self._note_gates(gates_name(by_layer)):
            yield

    @contextmanager
    def masked(self, heads: Heads) -> Iterator[None]:
        """Within the block the contexts of these heads are zero before any mixing; without mixing as `gated`."""
        head_ids = head_ids_of(heads, self.layout)
        with masked(self.model, head_ids), self._note_gates(",".join(f"{head}=masked" for head in head_ids)):
            yield

    @contextmanager
    def _note_gates(self, gates: str) -> Iterator[None]:
        self._gates.append(gates)
        try:
            yield
        finally:
            self._gates.remove(gates)
