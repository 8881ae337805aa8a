"""The public API, which `import headscope as hs` offers: an open model, and one function per command.

| file | what |
| --- | --- |
| `commands` | `load` (a path, a hub id or a transformers model becomes a `Model`); `analyze`, `evaluate`, `prune`, … |
| `model` | `Model`: analyse, rank, remove, evaluate; `SmallModel`, a copy without some heads |
| `open_model` | `OpenModel`: layout, forward pass, translation, capture, gates |
| `ranking` | `Ranking`: heads in the order in which they can go |
| `texts`, `selection`, `options` | argument types: texts, heads, progress reports |
"""
