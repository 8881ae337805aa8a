"""What this package adds to headscope, one file each."""
