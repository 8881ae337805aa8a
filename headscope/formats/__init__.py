"""One file per checkpoint format; `headscope.formats.base.open_checkpoint` finds the right one by content."""
