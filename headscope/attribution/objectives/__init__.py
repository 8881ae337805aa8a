"""Objectives: the number per sentence that gradients differentiate and ablations change."""
