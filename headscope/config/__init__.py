"""What commands can be told: frozen config classes, every option declared once. Imports no torch.

The options of `analyze` and `evaluate` are imported when they are asked for: no other command waits for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headscope.config.inputs import COMPANIONS as COMPANIONS
from headscope.config.inputs import CheckpointOptions as CheckpointOptions
from headscope.config.inputs import Companions as Companions
from headscope.config.inputs import PromptFiles as PromptFiles
from headscope.config.inputs import TextFiles as TextFiles
from headscope.config.inputs import TextOptions as TextOptions
from headscope.config.inputs import ValidatedTextFiles as ValidatedTextFiles
from headscope.config.option import LabelOptions as LabelOptions
from headscope.config.option import NoOptions as NoOptions
from headscope.config.option import PublishedLabelOptions as PublishedLabelOptions
from headscope.config.option import option as option
from headscope.config.option import plain_options as plain_options
from headscope.config.option import plain_value as plain_value

if TYPE_CHECKING:
    from headscope.config.analyze import AnalyzeConfig as AnalyzeConfig
    from headscope.config.analyze import AnalyzeOptions as AnalyzeOptions
    from headscope.config.evaluate import EvaluateConfig as EvaluateConfig
    from headscope.config.evaluate import EvaluateOptions as EvaluateOptions


def __getattr__(name: str) -> Any:
    if name not in ("AnalyzeConfig", "AnalyzeOptions", "EvaluateConfig", "EvaluateOptions"):
        raise AttributeError(f"module 'headscope.config' has no attribute {name!r}")
    return getattr(
        import_module(f"headscope.config.{name.partition('Config')[0].partition('Options')[0].lower()}"), name
    )
