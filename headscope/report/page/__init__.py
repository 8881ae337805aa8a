"""One self-contained HTML page about finished runs: data, template, style and scripts inlined, no request.

`gather` reads runs into a JSON-serialisable report; `analysis`, `importance`, `comparison`, `pruning`, `training` and
`weights` make its parts, `findings` say in words what the numbers say; `write` puts the page together, `compact` is
what a notebook shows. `browser-files/` holds the page's style, markup and scripts.
"""
