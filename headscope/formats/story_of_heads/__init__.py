"""Checkpoints of Voita et al.'s story-of-heads program."""
