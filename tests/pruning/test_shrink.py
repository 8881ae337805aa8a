"""`prune shrink`: one command gives the results of its steps one by one, however often it is stopped."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

import headscope as hs
from headscope.errors import CheckpointError, ConfigError
from headscope.heads import HeadId
from headscope.pruning import shrink
from headscope.pruning.closed_form.allocation import MeasuredAllocation
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.removal import SHARES, RemoveConfig
from headscope.pruning.ranking.rank_run import run_ranking
from headscope.pruning.removal.remove import run_removal
from headscope.pruning.sweep import methods
from tests.makers.shared import Command, succeed
from tests.makers.sweeps import scores
from tests.oracles import classifiers, speakers

pytestmark = pytest.mark.slow

LINES, HELD_OUT = 60, 12
"""Lines of the text, and how many of them are held out: the last fifth."""
LOUD = 40
"""Factor of the attention weights in the tests where the choice of heads matters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, a text for it, and its parts: to calibrate on, to judge on, and a second one of another kind."""
    folder = tmp_path_factory.mktemp("shrink")
    classifiers.folder(folder / "encoder", "bert-encoder")
    lines = [line for line in dict.fromkeys(classifiers.texts(90)) if line.strip()]
    parts = {"text": lines[:LINES], "learn": lines[: LINES - HELD_OUT], "judge": lines[LINES - HELD_OUT : LINES]}
    for name, part in {**parts, "other": lines[LINES:]}.items():
        (folder / name).write_text("".join(f"{line}\n" for line in part))
    return folder


def shrink_command(folder: Path, *arguments: object) -> list[object]:
    text = ("--source", folder / "text", "--check", folder / "other", "--device", "cpu", "--rounds", 0)
    return ["prune", "shrink", folder / "encoder", *text, "--compensate", "least-squares", *arguments]


def read_record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "pruning.json").read_text())
    return record


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(hs.load(folder, device="cpu").model.state_dict())


def test_it_is_rank_and_remove_and_evaluate(folder: Path, tmp_path: Path, command: Command) -> None:
    """The same heads, weights and numbers as three commands on the same parts of the text; all in card and page."""
    output = succeed(command, *shrink_command(folder, "--keep", 3, "--out", tmp_path / "small"))
    options: dict[str, Any] = {"checkpoint": str(folder / "encoder"), "source": folder / "learn", "device": "cpu"}
    ranking = run_ranking(RankConfig(**options, by="fisher", keep=3, allocate="measured", out=tmp_path / "ranked"))
    by_hand: dict[str, Any] = {"compensate": "least-squares", "valid_source": folder / "judge", "rounds": 0}
    heads = str(tmp_path / "ranked/removed.txt")
    run_removal(RemoveConfig(**options, **by_hand, heads=heads, out=tmp_path / "hand"))
    actual, expected = read_record(tmp_path / "small"), read_record(tmp_path / "hand")
    assert actual["removed"] == expected["removed"] == [str(head) for head in ranking.removed]
    weights, stepwise = read_weights(tmp_path / "small"), read_weights(tmp_path / "hand")
    assert weights.keys() == stepwise.keys() and all(torch.allclose(weights[name], stepwise[name]) for name in weights)
    for name, number in (("value", 0.99), ("low", 0.9)):
        assert number < actual["quality"]["after"][name] == pytest.approx(expected["quality"]["after"][name], abs=1e-9)
    for part, name in (("judge", "quality"), ("other", "elsewhere")):
        cosine = scores(tmp_path / "small", source=folder / part, against=str(folder / "encoder"))["cosine"]
        assert actual[name]["after"]["value"] == pytest.approx(cosine, abs=1e-6), part
    card, page = ((tmp_path / "small" / name).read_text() for name in ("README.md", "page.html"))
    assert "prune shrink encoder --source text" in card
    assert actual["quality"]["sentences"] == HELD_OUT
    for name, text in (("quality", "text"), ("elsewhere", "other")):
        value, sentences = actual[name]["after"]["value"], actual[name]["sentences"]
        assert f"{sentences} lines of {text}" in card and f"after {value:.4g}" in card
        assert f"<td>{sentences} lines</td>" in page and f"<td>{value:.4g}</td>" in page, name
    verdict, heading, quality, other, *_ = output.splitlines()
    assert verdict.startswith("small: 3 of 6 heads removed   NOT SHOWN TO BE AS GOOD") and "before" in heading
    assert "cosine" in quality and other.strip().startswith("other text (cosine)")
    for part in ("3 heads can save at most", "Refit: ", "Checked: ", f"Page: {tmp_path / 'small/page.html'}"):
        assert part in output, part


def test_what_is_refused_is_refused_early_and_what_was_done_is_kept(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "small", ("--keep", 3, "--by", "magnitude", "--allocate", "global")

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("the smaller model computes something else")

    for name, note in (("compare", ""), ("remove_planned", f"{out / 'sizes'} keeps what was ranked and measured")):
        with monkeypatch.context() as patch:
            patch.setattr(shrink, name, refuse)
            if name == "compare":
                patch.setattr(methods.SweepContext, "scores", lambda *_, **__: pytest.fail("ranked first"))
            status, _, error = command(*shrink_command(folder, *options, "--out", out))
        message = " ".join(error.split())
        assert status == 2 and "computes something else" in message and note in message
        assert bool(note) == (out / "sizes/scores").exists()
    monkeypatch.setattr(methods, "write_csv", lambda *_: pytest.fail("heads were scored again"))
    succeed(command, *shrink_command(folder, *options, "--out", out))


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C after so many cells."""
    left, run = [2], methods.run_cell

    def run_or_stop(*arguments: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return run(*arguments)

    monkeypatch.setattr(shrink, "run_cell", run_or_stop)
    yield left


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, command: Command, stop_after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = ("--max-drop", "20%", "--by", "magnitude", "--allocate", "global", "--valid-source", folder / "text")
    out = tmp_path / "small"
    status, _, error = command(*shrink_command(folder, *search, "--out", out))
    assert status == 130, error
    assert len(list((out / "sizes/cells").iterdir())) == 2 and not (out / "pruning.json").exists()
    stop_after[0] = 99
    status, _, error = command(*shrink_command(folder, *search, "--seed", 2, "--out", out))
    assert status == 2 and "seed" in error and "--force" in error
    status, _, error = command(*shrink_command(folder, *search, "--max-drop", "10%", "--out", out))
    assert status == 2 and "--max-drop 20%, now 10%" in error, error
    monkeypatch.setattr(methods, "write_csv", lambda *_: pytest.fail("heads were scored again"))
    succeed(command, *shrink_command(folder, *search, "--out", out))
    monkeypatch.undo()
    status, _, error = command(*shrink_command(folder, *search, "--out", out))
    assert status == 2 and "already holds" in error and "--resume" not in error
    first_run = shutil.copytree(out, tmp_path / "stopped")
    new_folder = out.with_name("small.new")
    shutil.copytree(out / "sizes", new_folder / "sizes")
    status, _, error = command(*shrink_command(folder, *search, "--out", out))
    assert status == 2 and "already holds" in error, error
    assert {path.name for path in new_folder.iterdir()} == {"sizes"}
    shutil.rmtree(new_folder)
    succeed(command, *shrink_command(folder, *search, "--out", out, "--force"))
    assert not out.with_name("small.new").exists()
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(first_run)) for path in first_run.rglob("*.*")}
    entries = ("removed", "quality", "elsewhere", "kept", "signature")
    assert all(read_record(out)[name] == read_record(first_run)[name] for name in entries)
    assert (out / "model.safetensors").read_bytes() == (first_run / "model.safetensors").read_bytes()


def test_the_smallest_size_is_that_of_a_loop_over_all(pair: hs.Model) -> None:
    """From the largest size down, each removed and judged by itself, until one is not established to be as good."""
    lines = {kind: hs.assets.captions(kind).read_text().splitlines()[:70] for kind in ("en", "de")}
    learn, judge = (hs.Texts(lines["en"][part], lines["de"][part]) for part in (slice(10), slice(10, 70)))
    ranking, limits = pair.rank(by="magnitude", sites="encoder-self"), []
    for share in SHARES[:3]:
        heads = ranking.lowest(24 - round(share * 24))
        small = pair.remove(heads, text=learn, valid=judge, margin="9", max_sentences=4)
        assert small.quality is not None and small.quality["verdict"]["verdict"] == "non-inferior"
        limits.append(small.quality["verdict"]["worse_limit"])
    failing = max(size for size in (1, 2) if limits[size] > max(limits[:size]))
    shape: Any = {"by": "magnitude", "allocate": "global", "sites": "encoder-self", "compensate": "none"}
    result = pair.shrink(text=learn, valid=judge, max_drop=f"{(max(limits[:failing]) + limits[failing]) / 2}", **shape)
    assert result.removed == ranking.lowest(24 - round(SHARES[failing - 1] * 24))
    assert result.quality is not None and result.quality["verdict"]["worse_limit"] == pytest.approx(
        limits[failing - 1], rel=1e-4
    )
    assert result.elsewhere is not None and result.elsewhere["text"] == "headscope's varied text"
    with pytest.raises(ConfigError, match=r"21 of 24.*perplexity"):
        pair.shrink(text=learn, valid=judge, max_drop=f"{limits[0] / 2}", **shape)


def test_heads_are_allocated_no_further_than_to_the_sizes_that_are_tried(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that passes has the heads of a run that asks for it; sizes after the failing one are not measured."""
    shutil.copytree(folder / "encoder", tmp_path / "encoder")
    model = BertModel.from_pretrained(tmp_path / "encoder")
    for name, parameter in model.named_parameters():
        if "attention" in name and name.endswith("weight") and "LayerNorm" not in name:
            parameter.data *= LOUD
    model.save_pretrained(tmp_path / "encoder")
    for name in ("text", "other"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "judge").write_text(5 * (folder / "text").read_text())
    search = ("--valid-source", tmp_path / "judge", "--metric", "token-l2", "--max-drop", "0.1")
    counts, take = list[int](), MeasuredAllocation.take

    def record_count(self: MeasuredAllocation, heads: int, **options: Any) -> dict[HeadId, float]:
        counts.append(heads)
        return take(self, heads, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MeasuredAllocation, "take", record_count)
        succeed(command, *shrink_command(tmp_path, *search, "--out", tmp_path / "found"))
    removed = read_record(tmp_path / "found")["removed"]
    cells = [json.loads(path.read_text())["cell"] for path in (tmp_path / "found/sizes/cells").iterdir()]
    sizes = [6 - cell["keep"] for cell in cells if cell["keep"] is not None]
    assert len(removed) < max(sizes) < 5, "a size fails that is not the smallest"
    assert counts == sorted(sizes), "one search goes on"
    succeed(command, *shrink_command(tmp_path, "--keep", 6 - len(removed), *search[:2], "--out", tmp_path / "asked"))
    assert read_record(tmp_path / "asked")["removed"] == removed


def test_sizes_are_judged_as_they_are_stored(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refits are computed in float32; a model stored in half precision is judged by its rounded weights."""
    file = shutil.copytree(folder / "encoder", tmp_path / "half") / "model.safetensors"
    save_file({name: values.bfloat16() for name, values in load_file(file).items()}, file, {"format": "pt"})
    exact, run = [], methods.run_cell

    def check_rounding(context: methods.SweepContext, cell: Any) -> Any:
        if cell.keep is not None:
            assert context.refit is not None
            model = context.refit(methods.removed_heads(context, cell)).model
            exact.append(all(torch.equal(x, x.bfloat16().float()) for x in model.parameters()))
        return run(context, cell)

    monkeypatch.setattr(shrink, "run_cell", check_rounding)
    search = ("--max-drop", "20%", "--by", "magnitude", "--allocate", "global", "--valid-source", folder / "text")
    command_line = shrink_command(folder, *search, "--out", tmp_path / "small")
    command_line[2] = file.parent
    succeed(command, *command_line)
    assert exact and all(exact)
    assert any("rounded to bfloat16" in note for note in read_record(tmp_path / "small")["notes"])


def test_how_often_the_text_is_read_beyond_the_ranking(tmp_path: Path) -> None:
    """Counted as positions at the word embedding, besides the held-out text, which both models read once."""
    model, reads, size, limit = hs.Model(speakers.checkpoint("bert")), list[int](), 64, 9.5
    lines = [sentence.source for sentence in speakers.corpus("bert", count=size * 5 // 4)]
    valid = [sentence.source for sentence in speakers.corpus("bert", count=100, seed=9)]
    (tmp_path / "other").write_text("".join(f"{line.source}\n" for line in speakers.corpus("bert", count=60, seed=5)))
    embedding: Any = model.model
    words = embedding.get_input_embeddings().num_embeddings

    def record_read(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == words:
            reads.append(inputs[0].numel())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(record_read)
    try:
        model.rank(by="obs", text=valid, allocate="per-layer")
        valid_reads = 2 * sum(reads)
        reads.clear()
        model.rank(by="obs", text=lines[:size], allocate="per-layer")
        ranking = sum(reads)
        reads.clear()
        shape: dict[str, Any] = {"by": "obs", "allocate": "per-layer", "check": (str(tmp_path / "other"),)}
        result = model.shrink(text=lines, valid=valid, keep=3, **shape)
    finally:
        handle.remove()
    assert result.compensation is not None and result.compensation["calibration"]["sentences"] == size
    assert size < sum(reads) - ranking - valid_reads <= limit * ranking
