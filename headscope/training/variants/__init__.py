"""What can be trained: one file per variant, named and found by `headscope.training.variant.VARIANTS`."""
