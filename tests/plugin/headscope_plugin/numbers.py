"""An engine of somebody else's: all parameters in a row, which NumPy reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from headscope.evaluation.model_inputs import InputTexts
from headscope.export.base import EngineExport, EngineFile, check_difference, engine
from headscope.formats.base import Checkpoint
from headscope.model.forward import max_abs_difference, outputs

FILE = "model.numbers"


@engine
class Numbers(EngineExport):
    """Every model in single precision, also without some of its heads."""

    name = "numbers"
    summary = "all parameters in a row, for NumPy"
    packages = ("numpy",)
    install = "headscope-plugin"
    quantizations: ClassVar = {"float16": "numbers in 16 bits"}
    endings = ("numbers",)

    def check(self, checkpoint: Checkpoint) -> None:
        """There is none that cannot be written."""

    def write(self, checkpoint: Checkpoint, data: InputTexts, folder: Path, *, quantize: str = "none") -> EngineFile:
        dtype = "float16" if quantize == "float16" else "float32"
        row = torch.nn.utils.parameters_to_vector(checkpoint.model.parameters()).detach()
        row.cpu().numpy().astype(dtype).tofile(folder / FILE)
        model = copy.deepcopy(checkpoint.model)
        values = torch.from_numpy(np.fromfile(folder / FILE, dtype).astype("float32"))
        torch.nn.utils.vector_to_parameters(values, model.parameters())
        batch = data.feeds[0]
        difference = max_abs_difference(outputs(model, batch), outputs(checkpoint.model, batch))
        limit = 1e-6 if dtype == "float32" else 5e-2
        check_difference(difference, limit, FILE, "outputs differ by")
        return EngineFile(
            export=self.name,
            file=FILE,
            runtime=f"NumPy {np.__version__}",
            quantity="outputs differ by",
            difference=difference,
            limit=limit,
            sizes=f"{len(row)} numbers in {dtype}",
            opens=(f"`{FILE}`: `numpy.fromfile`",),
        )
