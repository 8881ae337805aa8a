"""The public API, which `import headscope as hs` offers: an open model, and one function per command.

| file | what |
| --- | --- |
| `open_model` | `OpenModel`: layout, forward pass, capture, gates |
| `model` | `Model`: analyse, rank, remove; `SmallModel`, a copy without some heads |
| `ranking` | `Ranking`: heads in the order in which they can go |
| `commands` | `load` (a path, a hub id or a transformers model becomes a `Model`); `analyze`, `evaluate`, `prune`, … |
| `evaluation` | `ScoredModel`: evaluate, translate |
| `analysis`, `removal`, `demo` | what the methods and the commands that write files call |
| `texts`, `selection`, `options` | argument types: texts, heads, options and progress reports |
"""
