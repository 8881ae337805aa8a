"""Where commands write: one rule for what may be replaced, and one way to replace it.

- A file is written under a temporary name in the same directory and renamed (`writing.write_atomically`).
- A directory is built next to its destination and swapped in when it is complete (`folders.Build`); a run that takes
  hours and can be resumed is made in its destination, or in OUT.new while OUT holds an older run (`folders.Workplace`).
- An output that is an input, holds one or lies in one, or that holds anything but a run of the same kind, is refused,
  whatever `--force` says (`output_checks`). Only files that the run's record names and that headscope writes are
  removed.
- SIGINT, SIGTERM and SIGHUP end every command alike, and never between two renames (`writing.listening`).
"""
