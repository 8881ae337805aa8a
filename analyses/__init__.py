"""One file per analysis; every file in this folder registers what it defines and is found by a folder walk."""

if __name__ != "headscope.analyses":
    raise ImportError(
        f"this folder is the package headscope.analyses, but it was imported as {__name__!r}; "
        "imported under two names it would register every analysis twice. Use `import headscope.analyses`."
    )
