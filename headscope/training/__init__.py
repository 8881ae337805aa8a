"""Training: one engine, and variants that hook into it, one file each in `variants`."""
