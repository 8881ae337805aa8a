"""Training variants, one file each, found by `headscope.training.variant.VARIANTS`."""
