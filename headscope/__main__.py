"""`python -m headscope`, which is what torchrun starts."""

from headscope.cli.main import run

run()
