"""Options of the MHR fork and of fairseq, and what does their work here: the tables of docs/mhr-options.md."""

from __future__ import annotations

from dataclasses import dataclass

MASKED = "analyze|evaluate|translate"
READING = "analyze|evaluate"
TRAIN = "train baseline"  # stands for all variants, which have these options too
SITES = "one value, or three with commas: encoder-self, decoder-self, cross"


@dataclass(frozen=True)
class Counterpart:
    """`headscope COMMAND OPTIONS` does what an option of theirs does.

    `commands` are those that take our options, with bars; empty where nothing does it.
    """

    commands: str = ""
    options: str = ""
    note: str = ""

    def usage(self, command: str = "") -> str:
        """What to type, in `command` (`train swap`) if that takes the options; empty where nothing does it."""
        names = self.commands.split("|")
        variant = self.commands == TRAIN and command.startswith("train ")
        name = command if command in names or variant else names[0]
        return " ".join(filter(None, ("headscope", name, self.options))) if name else ""


FORK: dict[str, Counterpart] = {
    "--gamma-conf": Counterpart("train mixing", "--gamma G", "with --compat fork beside the summed loss, as there"),
    "--radius": Counterpart("train mixing", "--radius R", "it has no gradient, there either"),
    "--loss-start-after": Counterpart(
        "train mixing", "--start-after SHARE", "of this run; with --compat fork of 40 epochs of 160,239 sentences"
    ),
    "--enc-self-alpha-loss-ratio": Counterpart("train mixing", "--ratios ENC,DEC,CROSS", "the first of the three"),
    "--dec-self-alpha-loss-ratio": Counterpart("train mixing", "--ratios ENC,DEC,CROSS", "the second of the three"),
    "--dec-enc-alpha-loss-ratio": Counterpart("train mixing", "--ratios ENC,DEC,CROSS", "the last of the three"),
    "--use-alphas-bias": Counterpart(note="the fork never uses that bias"),
    "--cosine-sim-loss": Counterpart("train disagreement", "--weight C --compat fork"),
    "--mhr-experiment": Counterpart(
        "train swap", "--swap-schedule FILE.json", "the same file; --compat fork keeps the fork's quirks"
    ),
    "--head-confidence-method": Counterpart(
        "train swap", "--score METHOD", "to measure: headscope analyze CKPT --also confidence.base and the like"
    ),
    "--dynamic-type": Counterpart("train swap", "--dynamic hard|soft|local|random", SITES),
    "--start-dynamic-mhr": Counterpart("train swap", "--dynamic-start N", SITES),
    "--dynamic-end-epoch": Counterpart(
        "train swap", "--dynamic-end N", f"0 is off, as there, with --compat fork; {SITES}"
    ),
    "--dynamic-swap-frequency": Counterpart("train swap", "--dynamic-frequency N", SITES),
    "--dynamic-rest": Counterpart("train swap", "--dynamic-rest N", SITES),
    "--dynamic-max-switches": Counterpart("train swap", "--dynamic-max-switches K", SITES),
    "--mask-layer-type": Counterpart(
        MASKED, "--mask SITE.LAYER.HEAD", "enc-enc is encoder-self, dec-dec decoder-self, enc-dec cross"
    ),
    "--mask-layer": Counterpart(MASKED, "--mask SITE.LAYER.HEAD", "encoder-self.2.5; all: evaluate --each-head"),
    "--mask-head": Counterpart(MASKED, "--mask SITE.LAYER.HEAD", "encoder-self.2.5; all: evaluate --each-head"),
    "--keep-alphas-eval": Counterpart("analyze", "--mhr-pickles", "to draw: headscope plot alphas CKPT"),
    "--save-heads-cos-sim": Counterpart(
        "analyze", "--mhr-pickles --set mhr-rows=generate", "without mhr-rows one row for all sentences, teacher-forced"
    ),
}
"""Options that the fork added."""

FAIRSEQ: dict[str, Counterpart] = {
    "--path": Counterpart(MASKED, "CKPT", "the checkpoint is the first argument"),
    "--gen-subset": Counterpart(READING, "--source FILE --target FILE"),
    "--model-overrides": Counterpart(note="every option acts by itself"),
    "--remove-bpe": Counterpart(note="words are joined; headscope translate --keep-bpe leaves subwords apart"),
    "--bpe-codes": Counterpart(MASKED, "--bpe CODES"),
    "--sacrebleu": Counterpart("evaluate", "--metrics bleu"),
    "--results-path": Counterpart("translate", "CKPT < TEXT > FILE"),
    "--batch-size": Counterpart(
        MASKED, "--batch-tokens N", "in the fork's pickles a row is a batch: analyze --set mhr-batch-size=N"
    ),
    "--max-sentences-valid": Counterpart(note="validation takes --max-tokens positions at once"),
    "--max-tokens": Counterpart(
        MASKED, "--batch-tokens N", "in the fork's pickles a row is a batch: analyze --set mhr-max-tokens=N"
    ),
    "--save-dir": Counterpart(TRAIN, "--out DIR"),
    "--restore-file": Counterpart(TRAIN, "--resume", "or --init CKPT for a new run from its weights"),
    "--arch": Counterpart(TRAIN, "--preset tiny|small", "or --d-model, --d-ffn, --heads, --encoder-layers"),
    "--task": Counterpart(TRAIN, "--kind translation|lm"),
    "--criterion": Counterpart(TRAIN, "--label-smoothing E", "always label-smoothed cross-entropy"),
    "--optimizer": Counterpart(note="always Adam, with decoupled --weight-decay"),
    "--adam-betas": Counterpart(TRAIN, "--betas A,B"),
    "--adam-eps": Counterpart(TRAIN, "--epsilon E"),
    "--clip-norm": Counterpart(TRAIN, "--clip NORM"),
    "--lr-scheduler": Counterpart(TRAIN, "--schedule inverse-sqrt|cosine|constant"),
    "--warmup-updates": Counterpart(TRAIN, "--warmup N"),
    "--warmup-init-lr": Counterpart(TRAIN, "--warmup-lr LR"),
    "--update-freq": Counterpart(TRAIN, "--accumulate N"),
    "--max-epoch": Counterpart(TRAIN, "--max-epochs N"),
    "--max-update": Counterpart(TRAIN, "--updates N"),
    "--fp16": Counterpart(TRAIN, "--precision fp16|bf16"),
    "--cpu": Counterpart(TRAIN, "--device cpu"),
    "--log-interval": Counterpart(TRAIN, "--log-every N"),
    "--save-interval-updates": Counterpart(TRAIN, "--validate-every N"),
    "--keep-last-epochs": Counterpart(TRAIN, "--average N", "last, best and the average are kept"),
    "--no-epoch-checkpoints": Counterpart(note="last and best are kept, not one for every epoch"),
    "--best-checkpoint-metric": Counterpart(TRAIN, "--best-by loss|bleu"),
    "--maximize-best-checkpoint-metric": Counterpart(TRAIN, "--best-by bleu"),
    "--eval-bleu": Counterpart(TRAIN, "--bleu-every N", "unasked at every validation"),
    "--eval-bleu-args": Counterpart(TRAIN, "--beam N"),
    "--eval-bleu-detok": Counterpart(
        note="BLEU of validation is of raw text; what train --normalise moses tokenised is compared tokenised"
    ),
    "--eval-bleu-remove-bpe": Counterpart(note="BLEU is always of whole words"),
    "--eval-bleu-print-samples": Counterpart(
        "translate", "RUN/last < TEXT", "translations by the newest checkpoint of a run; train prints none"
    ),
    "--tensorboard-logdir": Counterpart(TRAIN, "--tensorboard"),
    "--share-decoder-input-output-embed": Counterpart(TRAIN, "--tie-output", "the default"),
    "--share-all-embeddings": Counterpart(TRAIN, "--vocabulary joint", "the default"),
    "--encoder-embed-dim": Counterpart(TRAIN, "--d-model N", "of both stacks"),
    "--decoder-embed-dim": Counterpart(TRAIN, "--d-model N", "of both stacks"),
    "--encoder-ffn-embed-dim": Counterpart(TRAIN, "--d-ffn N", "of both stacks"),
    "--decoder-ffn-embed-dim": Counterpart(TRAIN, "--d-ffn N", "of both stacks"),
    "--encoder-attention-heads": Counterpart(TRAIN, "--heads N", "of every module"),
    "--decoder-attention-heads": Counterpart(TRAIN, "--heads N", "of every module"),
    "--encoder-normalize-before": Counterpart(TRAIN, "--norm pre", "of both stacks"),
    "--decoder-normalize-before": Counterpart(TRAIN, "--norm pre", "of both stacks"),
    "--encoder-learned-pos": Counterpart(TRAIN, "--positions learned", "of both stacks"),
    "--decoder-learned-pos": Counterpart(TRAIN, "--positions learned", "of both stacks"),
    "--activation-fn": Counterpart(TRAIN, "--activation NAME"),
    "--relu-dropout": Counterpart(TRAIN, "--activation-dropout P"),
    "--max-source-positions": Counterpart(TRAIN, "--max-length N", "of both sides"),
    "--max-target-positions": Counterpart(TRAIN, "--max-length N", "of both sides"),
    "--source-lang": Counterpart(READING, "--source FILE --target FILE", "the checkpoint says its languages"),
    "--target-lang": Counterpart(READING, "--source FILE --target FILE", "the checkpoint says its languages"),
}
"""Options of fairseq's own that the fork's commands use."""

SHORT = {"-s": "--source-lang", "-t": "--target-lang", "-a": "--arch"}


def counterpart(option: str) -> Counterpart | None:
    """What does here what an option (with its dashes; underscores are dashes) of the fork or of fairseq does."""
    name = SHORT.get(option, option.replace("_", "-"))
    return FORK.get(name) or FAIRSEQ.get(name)


def answer(option: str, command: str = "") -> str | None:
    """One line for who has given an option of theirs to a command of ours; else None."""
    equivalent = counterpart(option)
    if equivalent is None:
        return None
    program = "the MHR fork" if SHORT.get(option, option.replace("_", "-")) in FORK else "fairseq"
    if not equivalent.commands:
        return f"{option} of {program} has no counterpart here: {equivalent.note}"
    note = f" ({equivalent.note})" if equivalent.note else ""
    return f"{option} is an option of {program}; here it is `{equivalent.usage(command)}`{note}"
