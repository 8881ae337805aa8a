"""The public API, which `import headscope as hs` offers: an open model, and one function per command."""
