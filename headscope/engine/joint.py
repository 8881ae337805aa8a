"""Joint ablation of the heads of a role, compared with random sets of as many heads in the same layers.

And the budget of forward passes for ablations, which limits their number of sentences.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

import pandas as pd
import torch

from headscope.attribution.gatevector import explained_batch
from headscope.bootstrap import Ratio
from headscope.config.analyze import AnalyzeOptions
from headscope.data.batching import DEFAULT_LIMIT, WINDOW
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import UNCUT, Batch, SideName
from headscope.engine.base import ANALYSES, Aggregates, Analysis, AnalysisReport, RunOptions
from headscope.engine.plan import RANDOM_BLOCK, RANDOM_SEQUENCES, analyze
from headscope.errors import CheckpointError, ConfigError, DataError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Layout, Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers
from headscope.progress import Progress, no_progress
from headscope.results.roles import role_of, roles_of
from headscope.results.study import Study

PASSES = 30
"""Forward passes over a text that `--importance` spends on ablations."""
SMALL_CORPUS, MIN_SENTENCES = 64, 8
"""A smaller text has the budget of `SMALL_CORPUS` sentences; fewer than `MIN_SENTENCES` say too little."""


def with_budget(options: AnalyzeOptions) -> AnalyzeOptions:
    """Options with the number of passes that `ablation` may take filled in: all if it was requested, else `PASSES`.

    A given number stays. Options without importances stay as they are.
    """
    requests_ablation = options.importance == "all" or {"ablation", "importance"} & {*options.only, *options.also}
    if options.importance == "none" and not requests_ablation and not options.faithfulness:
        return options
    passes_option = options.analysis_options["ablation_passes"]
    passes = passes_option if passes_option is not None else 0 if requests_ablation else PASSES
    return replace(options, analysis_options={**options.analysis_options, "ablation_passes": passes})


def affordable(corpus: Corpus, passes: float, budget: int) -> Corpus | str:
    """The sentences for which a budget allows so many `passes` each, or the reason why these are too few.

    `budget` is in passes over the whole text; 0: no limit. The sentences are drawn from the whole text, whose lines may
    be sorted by class or length, and are the same for every seed.
    """
    count = int(budget * max(corpus.count, SMALL_CORPUS) / passes) if budget else corpus.count
    if count >= corpus.count:
        return corpus
    if count < MIN_SENTENCES:
        return f"needs {passes:,.0f} passes of a sentence, more than {flag('ablation_passes', budget)}; 0 measures all"
    return corpus.share(count / corpus.count, seed=1)


SETS, MAX_ROLES = 10, 16
"""Random sets for each role; the most roles that are measured, those with the most heads first."""
TEXT, REPEATED_WORDS = "text", "repeated words"
PIECES = 5  # most subwords of a repeated word


@dataclass(frozen=True)
class HeadSets:
    """The heads of a role, random sets of other heads, and the text to measure them on."""

    role: str
    heads: Sequence[HeadId]
    text: str
    random_sets: Sequence[Sequence[HeadId]]


def random_sets(heads: Sequence[HeadId], layout: Layout, *, seed: int) -> list[list[HeadId]]:
    """Up to `SETS` different sets of other heads, each with as many heads of every layer as `heads` has there.

    A layer with too few other heads gives all of them, and some of `heads`; no set where every set equals `heads`.
    """
    generator, sets = random.Random(f"{seed} {sorted(map(str, heads))}"), dict[frozenset[HeadId], list[HeadId]]()
    for _ in range(10 * SETS):
        random_set: list[HeadId] = []
        for (site, layer), count in Counter((head.site, head.layer) for head in heads).items():
            of_layer = [HeadId(site, layer, number) for number in range(layout[site, layer])]
            other_heads = [head for head in of_layer if head not in heads]
            sample = generator.sample([head for head in of_layer if head in heads], max(0, count - len(other_heads)))
            random_set += sample + generator.sample(other_heads, count - len(sample))
        if {*random_set} != {*heads}:
            sets.setdefault(frozenset(random_set), random_set)
        if len(sets) == SETS:
            break
    return list(sets.values())


class JointAblation(Analysis):
    """The objective's damage with all heads of a set ablated, defined as in `ablation`; made by `joint_ablation`."""

    name = "roles"
    passes = frozenset({"text"})
    reads = "contexts"
    needs = frozenset({"objective"})
    groups: ClassVar[Sequence[HeadSets]] = ()
    layer_index: ClassVar[LayerIndex | None] = None

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        ratios: dict[tuple[str, Site, int], Ratio] = {}
        how = {"layer_index": self.layer_index, "ablate_with": self.run.analysis_options.get("ablate_with", "zero")}
        with torch.inference_mode(), explained_batch(checkpoint, self.objective, batch, **how) as f:
            intact = f(f.gates)
            for number, group in enumerate(self.groups):
                damages = [intact - f(f.gates_without(heads)) for heads in (group.heads, *group.random_sets)]
                site_layer = group.heads[0].site, group.heads[0].layer
                ratios[(str(number), *site_layer)] = Ratio(torch.stack(damages, dim=1), f.counts[:, None])
                self.tick((number + 1) / len(self.groups))
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        rows = []
        for (number, _, _), sums in aggregates.sums.items():
            sums.leave_out_empty()
            group, damage = self.groups[int(number)], aggregates.bootstrap.ratio(sums)
            random_damage = damage.value[1:]
            rows.append(
                {
                    **{"role": group.role, "heads": len(group.heads), "which": " ".join(map(str, group.heads))},
                    **{"text": group.text, **damage.cell("value", 0)},
                    "random_low": random_damage.min() if len(random_damage) else float("nan"),
                    "random_high": random_damage.max() if len(random_damage) else float("nan"),
                    "sets": len(random_damage),
                    "sentences": sums.n_used,
                }
            )
        return AnalysisReport(tables={"roles": pd.DataFrame(rows)})

    def signature(self) -> dict[str, str]:
        return {"with": self.run.analysis_options.get("ablate_with", "zero"), "sets": str(SETS)}


def joint_ablation(
    study: Study,
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: RunOptions,
    *,
    replicates: int,
    progress: Progress = no_progress,
) -> None:
    """Add the table `roles` to a study: the damage with all heads of each role ablated, and its range in random sets.

    Roles from labels on repeated random tokens are measured on repeated words of the text, unless it has labels or
    prompts; other roles on the text itself. The budget is that of `ablation`. Roles that cannot be measured are left
    out with the reason.
    """
    index, groups = resumable_layers(checkpoint.model), role_sets(study, checkpoint.layout, seed=options.seed)
    texts = {TEXT: corpus}
    if any(group.text == REPEATED_WORDS for group in groups) and (text := repeated_words(checkpoint, corpus, options)):
        texts[REPEATED_WORDS] = text
    groups = [group if group.text in texts else replace(group, text=TEXT) for group in groups]
    tables, signature, numbers = [], dict[str, str](), []
    for name, text in texts.items():
        text_groups = [group for group in groups if group.text == name]
        layers = [{(head.site, head.layer) for head in group.heads} for group in text_groups]
        shares = [index.above(of_group) if index else 1 for of_group in layers]
        passes = 1 + sum((1 + len(group.random_sets)) * share for group, share in zip(text_groups, shares, strict=True))
        part = affordable(text, passes, options.analysis_options.get("ablation_passes") or 0)
        if not text_groups:
            continue
        try:
            if isinstance(part, str):
                raise ConfigError(part)
            of_groups = type(JointAblation.__name__, (JointAblation,), {"groups": text_groups, "layer_index": index})
            result = analyze(
                checkpoint, part, analyses=[of_groups], options=options, replicates=replicates, progress=progress
            )
        except (CheckpointError, ConfigError, DataError) as error:
            study.record["left_out"].append({"analysis": "roles", "why": str(error)})
            continue
        tables.append(result.tables["roles"])
        signature |= result.record["signatures"]["roles"]
        numbers.append(f"{part.count} of {text.count} {name}")
    if tables:
        order = [group.role for group in groups]
        table = pd.concat(tables).sort_values("role", key=lambda roles: roles.map(order.index), ignore_index=True)
        study.tables = {**study.tables, "roles": table}
        study.record["signatures"]["roles"] = signature | {"roles-n": "+".join(numbers)}


def role_sets(study: Study, layout: Layout, *, seed: int) -> list[HeadSets]:
    """The sets of heads of a study's roles, at most `MAX_ROLES`, each with its random sets."""
    labels = {str(head): own for head, own in study.labels.items()}
    roles = roles_of(labels)
    random_passes = [cls for _, cls in ANALYSES if "random" in cls.passes]
    kinds = {function.name for cls in random_passes for function in cls.functions}
    groups = []
    for role in sorted(roles, key=lambda role: -len(roles[role]))[:MAX_ROLES]:
        own = {label for name in roles[role] for label in labels[name] if role_of(label) == role}
        heads = [HeadId.parse(name) for name in roles[role]]
        text = REPEATED_WORDS if own & kinds else TEXT
        groups.append(HeadSets(role, heads, text, random_sets(heads, layout, seed=seed)))
    return sorted(groups, key=lambda group: [*roles].index(group.role))


def repeated_words(checkpoint: Checkpoint, corpus: Corpus, options: RunOptions) -> Corpus | None:
    """Texts of random words of a corpus, each a block of different words that is repeated, as for `induction`.

    An encoder reads the block once, its decoder twice. Returns None if there are too few words, or for a text with
    labels or prompts, which random words lack.
    """
    if corpus.has_labels or corpus.has_contrast or corpus.has_second or checkpoint.reads_sound:
        return None
    sides: list[SideName] = ["source", "target"] if corpus.has_target else ["source"]
    words = {side: plain_words(checkpoint, corpus, side) for side in sides}
    limit = options.batching.limit or DEFAULT_LIMIT
    block = min(RANDOM_BLOCK, limit // (2 * PIECES + 1), *map(len, words.values()))
    if block < 2:
        return None
    generator = random.Random(options.seed)
    sequences = range(RANDOM_SEQUENCES)
    word_blocks = [{side: " ".join(generator.sample(words[side], block)) for side in sides} for _ in sequences]

    def read() -> Iterator[Sentence]:
        for number, block in enumerate(word_blocks):
            clean_twice = {**block, sides[-1]: f"{block[sides[-1]]} {block[sides[-1]]}"}
            yield Sentence(number, clean_twice["source"], clean_twice.get("target"))

    digest = hashlib.sha1(f"{corpus.digest} {word_blocks}".encode()).hexdigest()
    return Corpus(corpus.name, len(word_blocks), digest, read, has_target=corpus.has_target)


def plain_words(checkpoint: Checkpoint, corpus: Corpus, side: SideName) -> list[str]:
    """The sorted words of letters in the first sentences that have at most `PIECES` subwords."""
    texts = (getattr(sentence, side) for sentence in islice(corpus, WINDOW))
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})
    encodings = checkpoint.encode(words, side=side, limit=UNCUT) if words else []
    return [word for word, encoding in zip(words, encodings, strict=True) if encoding.special.count(False) <= PIECES]
