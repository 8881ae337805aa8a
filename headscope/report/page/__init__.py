"""One self-contained HTML page about finished runs: text, figures, style and script inlined, no request."""
