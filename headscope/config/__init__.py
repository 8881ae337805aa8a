"""What commands can be told: frozen config classes, every option declared once. Imports no torch."""

from headscope.config.analyze import AnalyzeConfig, AnalyzeOptions
from headscope.config.evaluate import EvaluateConfig, EvaluateOptions
from headscope.config.inputs import (
    CheckpointOptions,
    Companions,
    PromptFiles,
    TextFiles,
    TextOptions,
    ValidatedTextFiles,
)
from headscope.config.option import (
    LabelOptions,
    NoOptions,
    check_options,
    flag,
    option,
    plain_options,
    plain_value,
)

__all__ = [
    "AnalyzeConfig",
    "AnalyzeOptions",
    "CheckpointOptions",
    "Companions",
    "EvaluateConfig",
    "EvaluateOptions",
    "LabelOptions",
    "NoOptions",
    "PromptFiles",
    "TextFiles",
    "TextOptions",
    "ValidatedTextFiles",
    "check_options",
    "flag",
    "option",
    "plain_options",
    "plain_value",
]
