"""The command line; the only part of headscope that prints."""
