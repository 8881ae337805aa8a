"""Ways of mixing heads between weights·V and the output projection: one file each, chosen by name."""
