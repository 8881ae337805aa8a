"""Parts of figures: pages, grids, panels, saving."""
