"""One self-contained HTML page about finished runs: text, figures, style and script inlined, no request.

`report` gathers runs into what the template shows: heads as `heads` and `cards` describe them, answers of results, and
figures as `svg` draws them; `write` puts the page together. All numbers are texts before the template or the script
see them. `browser-files/` holds template, style and script.
"""
