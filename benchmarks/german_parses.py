"""Parses of the German captions that ship: a tagger and a parser trained on small treebanks, and how good they are.

    python benchmarks/german_parses.py UD_FOLDER > headscope/assets/captions.de.conllu

UD_FOLDER has de_gsd-ud-dev, de_gsd-ud-test and de_pud-ud-test (`.conllu.gz`). Accuracy is that of a training on GSD dev
and PUD, on GSD test; what is written is of a training on all three. Both models are averaged perceptrons over hashed
features (Collins 2002): the tagger goes from left to right, the parser is greedy with arc-hybrid transitions and a
dynamic oracle (Goldberg & Nivre 2013), trained on tags of a tagger that did not see the sentence (five folds). Some
minutes of one core.
"""

from __future__ import annotations

import gzip
import random
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headscope.assets import captions

TRAIN, TEST = ("de_gsd-ud-dev", "de_pud-ud-test"), "de_gsd-ud-test"
ROWS, EPOCHS, FOLDS, SEED = 1 << 19, 8, 5, 1
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")  # tokens of a caption
EDGE = "<>"


@dataclass(frozen=True)
class Tree:
    """Words of a sentence with tags, heads (0: the root) and main relations; `lemmas` beside them."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...] = ()
    relations: tuple[str, ...] = ()
    lemmas: tuple[str, ...] = ()


class Perceptron:
    """Averaged weights [row class] of hashed features."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.weights = np.zeros((ROWS, len(classes)), np.float32)
        self.sums = np.zeros_like(self.weights)
        self.steps = 1

    def scores(self, rows: Sequence[int]) -> np.ndarray:
        """A score for every class."""
        return np.asarray(self.weights[rows].sum(axis=0))

    def correct(self, rows: Sequence[int], right: int, wrong: int) -> None:
        """Weights move to the right class; with them the sums that the average is made of."""
        self.steps += 1
        if right != wrong:
            for column, change in ((right, 1.0), (wrong, -1.0)):
                np.add.at(self.weights[:, column], rows, change)
                np.add.at(self.sums[:, column], rows, change * self.steps)

    def average(self) -> None:
        """The mean over all steps."""
        self.weights -= self.sums / self.steps


def rows_of(features: Iterable[str]) -> list[int]:
    """The row of each feature, which begins with its number."""
    return [zlib.crc32(f"{number}|{feature}".encode()) % ROWS for number, feature in enumerate(features)]


def tag_features(words: Sequence[str], at: int, tags: Sequence[str]) -> list[int]:
    """Features of a tag: the word with its ends and shape, its neighbours, the tags before."""
    near = [words[at + by] if 0 <= at + by < len(words) else EDGE for by in (-2, -1, 0, 1, 2)]
    last, before = (tags[at - by] if at >= by else EDGE for by in (1, 2))
    word = near[2]
    shape = f"{word[0].isupper():d}{at == 0:d}{any(map(str.isdigit, word)):d}{word.isalnum():d}{'-' in word:d}"
    return rows_of(
        (
            "", word, word.lower(), word[-1:], word[-2:], word[-3:], word[-4:], word[:1], word[:3], shape, last,
            f"{before} {last}", f"{last} {word.lower()}", near[1].lower(), near[0].lower(), near[3].lower(),
            near[4].lower(), near[1][-3:], near[3][-3:], f"{shape} {last}", f"{shape} {word[-2:]}",
            f"{near[3][:1].isupper():d} {word[-2:]}", f"{near[1].lower()} {near[3].lower()}",
        )
    )  # fmt: skip


def predict_tags(model: Perceptron, words: Sequence[str]) -> tuple[str, ...]:
    """The tags of a sentence."""
    tags: list[str] = []
    for at in range(len(words)):
        tags.append(model.classes[int(model.scores(tag_features(words, at, tags)).argmax())])
    return tuple(tags)


def train_tagger(trees: Sequence[Tree]) -> Perceptron:
    """A tagger trained on its own earlier tags."""
    model = Perceptron(sorted({tag for tree in trees for tag in tree.tags}))

    def learn(tree: Tree) -> None:
        tags: list[str] = []
        for at, gold in enumerate(tree.tags):
            rows = tag_features(tree.words, at, tags)
            guess = int(model.scores(rows).argmax())
            model.correct(rows, model.classes.index(gold), guess)
            tags.append(model.classes[guess])

    return run_epochs(model, trees, learn)


def run_epochs(model: Perceptron, trees: Sequence[Tree], learn: Callable[[Tree], None]) -> Perceptron:
    """Train on every tree in another order each epoch."""
    order, chance = list(trees), random.Random(SEED)
    for _ in range(EPOCHS):
        chance.shuffle(order)
        for tree in order:
            learn(tree)
    model.average()
    return model


class State:
    """A stack of words, the next word, and the arcs so far; words count from 1, 0 is the root, at the end."""

    def __init__(self, words: Sequence[str], tags: Sequence[str]) -> None:
        self.words, self.tags = [EDGE, *words, "ROOT"], [EDGE, *tags, "ROOT"]
        self.n = len(words)
        self.stack: list[int] = []
        self.next = 1
        self.heads, self.relations = [0] * (self.n + 2), [""] * (self.n + 2)
        self.children: list[list[int]] = [[] for _ in range(self.n + 2)]

    @property
    def is_final(self) -> bool:
        """Whether the root alone is left."""
        return self.next > self.n and not self.stack

    def is_legal(self, move: str) -> bool:
        """Left takes the next word as head (the root at the end), right the word below."""
        if move == "S":
            return self.next <= self.n
        if move[0] == "L":
            ready = self.stack if self.next <= self.n else len(self.stack) == 1  # the root takes one word, the last
            return bool(ready) and (move == "Lroot") == (self.next > self.n)
        return len(self.stack) > 1 and move != "Rroot"

    def apply(self, move: str) -> None:
        """Shift, or an arc to the top of the stack, which goes."""
        if move == "S":
            self.stack.append(self.next)
            self.next += 1
            return
        top = self.stack.pop()
        head = self.next if move[0] == "L" else self.stack[-1]
        self.heads[top], self.relations[top] = head, move[1:]
        self.children[head].append(top)

    def costs(self, gold: Sequence[int]) -> dict[str, int]:
        """How many gold arcs each kind of move makes impossible; `gold` has n + 1 for the root."""
        top = self.stack[-1] if self.stack else 0
        ahead = range(self.next, self.n + 2)
        below = self.stack[:-1]
        costs = {}
        if self.next <= self.n:
            costs["S"] = sum(gold[word] == self.next for word in self.stack) + (gold[self.next] in below)
        if self.stack:
            arcs = sum(gold[word] == top for word in ahead if word <= self.n)
            if not below or self.next <= self.n:
                costs["L"] = arcs + (gold[top] in below[-1:] or gold[top] > self.next)
            if below:
                costs["R"] = arcs + (gold[top] >= self.next)
        return costs

    def features(self) -> list[int]:
        """Words and tags about the top of the stack and the next word, and their children (Zhang & Nivre 2011)."""
        s = [*reversed(self.stack[-3:]), 0, 0, 0][:3]
        b = [node if node <= self.n + 1 else 0 for node in range(self.next, self.next + 3)]
        w, t = self.words, self.tags
        s0, s1, s2 = (t[node] for node in s)
        b0, b1, b2 = (t[node] for node in b)
        sw, s1w, bw = (w[node].lower() for node in (s[0], s[1], b[0]))
        near = "0" if not s[0] else str(min(b[0] - s[0], 5))
        ends = []
        for node in (s[0], s[1], b[0]):
            kids = self.children[node] if node else []
            left, right = [k for k in kids if k < node], [k for k in kids if k > node]
            first, last = (left[-1] if left else 0), (right[-1] if right else 0)
            ends.append((t[first], t[last], self.relations[first], self.relations[last], f"{len(left)} {len(right)}"))
        arcs = [" ".join(sorted(self.relations[kid] for kid in self.children[node])) if node else "" for node in s[:2]]
        (l0, r0, lr0, rr0, v0), (l1, r1, lr1, rr1, v1), (lb, _, lrb, _, vb) = ends
        return rows_of(
            (
                "", s0, sw, f"{s0} {sw}", s1, s1w, b0, bw, f"{b0} {bw}", b1, w[b[1]].lower(), b2, s2,
                f"{s0} {b0}", f"{sw} {bw}", f"{s0} {bw}", f"{sw} {b0}", f"{s1} {s0}", f"{s1w} {sw}", f"{s1} {sw}",
                f"{s1w} {s0}", f"{s0} {b0} {b1}", f"{s1} {s0} {b0}", f"{s2} {s1} {s0}", f"{b0} {b1} {b2}",
                f"{s0} {lr0} {b0}",
                f"{s0} {rr0} {b0}", f"{s1} {rr1} {s0}", f"{s1} {lr1} {s0}", f"{b0} {lrb} {s0}", f"{s0} {v0}",
                f"{b0} {vb}",
                f"{s1} {v1}", f"{sw} {v0}", f"{s0} {b0} {near}", f"{sw} {bw} {near}", f"{s0} {l0} {r0}",
                f"{s1} {l1} {r1}",
                f"{b0} {lb}", sw[-3:], bw[-3:], f"{sw[-2:]} {s0} {b0}", f"{s1w[-2:]} {sw[-2:]}", f"{s0} {arcs[0]}",
                f"{s1} {arcs[1]} {s0}", f"{s1} {s0} {b0} {b1}", f"{s0} {b0} {lrb} {near}", f"{s1w} {s0} {b0}",
            )
        )  # fmt: skip


def best_move(model: Perceptron, state: State, scores: np.ndarray, is_allowed: Callable[[str], bool]) -> int:
    """The move with the largest score among the legal and allowed ones."""
    order = (int(move) for move in np.argsort(-scores))
    return next(move for move in order if state.is_legal(model.classes[move]) and is_allowed(model.classes[move]))


def parse(model: Perceptron, words: Sequence[str], tags: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Heads (0: the root) and relations."""
    state = State(words, tags)
    while not state.is_final:
        state.apply(model.classes[best_move(model, state, model.scores(state.features()), lambda move: True)])
    heads = tuple(head if head <= state.n else 0 for head in state.heads[1:-1])
    return heads, tuple(state.relations[1:-1])


def train_parser(trees: Sequence[Tree]) -> Perceptron:
    """A parser trained on its own states; a move that loses no gold arc is right."""
    names = sorted({relation for tree in trees for relation in tree.relations})
    model = Perceptron(["S", *(f"{way}{name}" for way in "LR" for name in names)])

    def learn(tree: Tree) -> None:
        state, gold = State(tree.words, tree.tags), [0, *((head or len(tree.words) + 1) for head in tree.heads)]
        while not state.is_final:
            costs = state.costs(gold)
            lowest = min(costs.values())
            rows = state.features()
            scores = model.scores(rows)

            def is_right(move: str, costs: dict[str, int] = costs, lowest: int = lowest, state: State = state) -> bool:
                if costs.get(move[0], lowest + 1) > lowest:
                    return False
                if move == "S":
                    return True
                top = state.stack[-1]
                head = state.next if move[0] == "L" else state.stack[-2]
                return move[1:] == tree.relations[top - 1] if gold[top] == head else True

            guess = best_move(model, state, scores, lambda move: True)
            try:
                best = best_move(model, state, scores, is_right)
            except StopIteration:  # a root whose relation the treebank gives another name
                best = guess
            model.correct(rows, best, guess)
            state.apply(model.classes[guess])

    return run_epochs(model, trees, learn)


def jackknife_tags(trees: Sequence[Tree]) -> list[Tree]:
    """The trees with tags of taggers that were not trained on them."""
    result: list[Tree] = []
    for fold in range(FOLDS):
        model = train_tagger([tree for number, tree in enumerate(trees) if number % FOLDS != fold])
        result += [replace(tree, tags=predict_tags(model, tree.words)) for tree in trees[fold::FOLDS]]
    return result


def read(path: Path) -> tuple[list[Tree], Counter[tuple[str, tuple[str, ...]]]]:
    """Trees of a treebank, and counts of the ways that tokens of several words are split."""
    trees, split = [], Counter[tuple[str, tuple[str, ...]]]()
    for block in gzip.decompress(path.read_bytes()).decode("utf-8").strip().split("\n\n"):
        rows = [line.split("\t") for line in block.split("\n") if not line.startswith("#")]
        words = [row for row in rows if row[0].isdigit()]
        forms, tags, lemmas = (tuple(row[column] for row in words) for column in (1, 3, 2))
        heads = tuple(int(row[6]) for row in words)
        trees.append(Tree(forms, tags, heads, tuple(row[7].partition(":")[0] for row in words), lemmas))
        for row in rows:
            if "-" in row[0]:
                start, end = map(int, row[0].split("-"))
                split[row[1].lower(), tuple(word[1].lower() for word in words[start - 1 : end])] += 1
    return trees, split


def accuracy(trees: Sequence[Tree], tagger: Perceptron, parser: Perceptron) -> dict[str, float]:
    """Shares of words with the right tag, head, and head and main relation; words are gold, tags are not."""
    right, count = Counter[str](), 0
    for tree in trees:
        tags = predict_tags(tagger, tree.words)
        heads, relations = parse(parser, tree.words, tags)
        count += len(tree.words)
        right["UPOS"] += sum(guess == correct for guess, correct in zip(tags, tree.tags, strict=True))
        right["UAS"] += sum(guess == correct for guess, correct in zip(heads, tree.heads, strict=True))
        pairs = zip(heads, relations, tree.heads, tree.relations, strict=True)
        right["LAS"] += sum((guess, name) == (correct, gold) for guess, name, correct, gold in pairs)
    return {name: hits / count for name, hits in right.items()}


def conllu(number: int, text: str, split: dict[str, tuple[str, ...]], lemmas: dict[tuple[str, str], str],
           tagger: Perceptron, parser: Perceptron) -> str:  # fmt: skip
    """A caption as CoNLL-U, with its contractions as tokens of several words."""
    tokens = [(match.group(), match.end()) for match in WORD.finditer(text)]
    parts = [split.get(token.lower(), (token,)) for token, _ in tokens]
    words = [word.capitalize() if token[0].isupper() and not at and len(forms) > 1 else word
             for (token, _), forms in zip(tokens, parts, strict=True) for at, word in enumerate(forms)]  # fmt: skip
    tags = predict_tags(tagger, words)
    heads, relations = parse(parser, words, tags)
    lines, at = [f"# sent_id = caption-{number:03}", f"# text = {text}"], 0
    for (token, end), forms in zip(tokens, parts, strict=True):
        misc = "_" if text[end : end + 1].isspace() or end == len(text) else "SpaceAfter=No"
        if len(forms) > 1:
            lines.append("\t".join([f"{at + 1}-{at + len(forms)}", token, *["_"] * 7, misc]))
        for _ in forms:
            lemma = lemmas.get((words[at].lower(), tags[at]), "_")
            cells = [str(at + 1), words[at], lemma, tags[at], "_", "_", str(heads[at]), relations[at], "_"]
            lines.append("\t".join([*cells, "_" if len(forms) > 1 else misc]))
            at += 1
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Accuracy on stderr, parses on stdout."""
    treebanks = {name: read(folder / f"{name}.conllu.gz") for name in (*TRAIN, TEST)}
    gold = [tree for name in TRAIN for tree in treebanks[name][0]]
    scores = accuracy(treebanks[TEST][0], train_tagger(gold), train_parser(jackknife_tags(gold)))
    print({name: round(value, 4) for name, value in scores.items()}, file=sys.stderr, flush=True)
    trees = [tree for part, _ in treebanks.values() for tree in part]
    splits = sum((split for _, split in treebanks.values()), Counter[tuple[str, tuple[str, ...]]]())
    split = {token: words for (token, words), count in reversed(splits.most_common()) if count > 2}
    lemma_counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for tree in trees:
        for word, tag, lemma in zip(tree.words, tree.tags, tree.lemmas, strict=True):
            lemma_counts[word.lower(), tag][lemma] += 1
    lemmas = {key: counts.most_common(1)[0][0] for key, counts in lemma_counts.items()}
    tagger, parser = train_tagger(trees), train_parser(jackknife_tags(trees))
    for number, text in enumerate(captions("de").read_text(encoding="utf-8").splitlines(), start=1):
        print(conllu(number, text, split, lemmas, tagger, parser), end="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
