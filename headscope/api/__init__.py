"""The public API, which `import headscope as hs` offers: an open model, and one function per command.

| file | what |
| --- | --- |
| `loading` | `load`: a path, a hub id or a transformers model in memory becomes a `Model` |
| `model` | `Model`: analyse, rank, remove, evaluate, translate, capture, gate |
| `study` | `Study`: what an analysis found, as tables, arrays, figures and files |
| `ranking` | `Ranking`: heads in the order in which they can go |
| `small` | `SmallModel`: a model without some heads, and the proof that nothing else changed |
| `commands` | `analyze`, `evaluate`, `prune`, `train`, `plot` |
| `texts`, `selection`, `options`, `reporting` | what the methods accept: texts, heads, options, progress |
"""
