"""The version of headscope."""

VERSION = "0.1.0"
