"""Results, one class a command, the same in memory, from a folder, in Python and on a page."""
