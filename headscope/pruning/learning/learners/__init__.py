"""The ways to learn which heads stay, one file each."""
