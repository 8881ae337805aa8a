"""What commands found: one class a command, the same in memory, from its folder, in Python and on a page."""
