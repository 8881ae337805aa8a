"""What importances explain: one number per sentence that gradients are taken of and ablations change."""
