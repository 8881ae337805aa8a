"""The command line, one file per command; the only part of headscope that prints."""
