"""Options of commands: frozen config classes, every option declared once. Imports no torch."""

from headscope.config.inputs import COMPANIONS as COMPANIONS
from headscope.config.inputs import CheckpointOptions as CheckpointOptions
from headscope.config.inputs import Companions as Companions
from headscope.config.inputs import TextFiles as TextFiles
from headscope.config.inputs import ValidatedTextFiles as ValidatedTextFiles
from headscope.config.option import LabelOptions as LabelOptions
from headscope.config.option import NoOptions as NoOptions
from headscope.config.option import PublishedLabelOptions as PublishedLabelOptions
from headscope.config.option import option as option
from headscope.config.option import plain_options as plain_options
