"""Every module of headscope: where it lies and the name it is imported by."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"headscope": ROOT / "headscope", "headscope.cli": ROOT / "cli", "headscope.analyses": ROOT / "analyses"}


def files() -> list[Path]:
    paths = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    links = (ROOT / "headscope" / "cli", ROOT / "headscope" / "analyses")
    return sorted(path for path in paths if not any(path.is_relative_to(link) for link in links))


def modules() -> dict[str, Path]:
    """Every module by the name it is imported by."""
    paths = {}
    for path in files():
        folder = next(name for name, root in reversed(FOLDERS.items()) if path.is_relative_to(root))
        parts = path.relative_to(FOLDERS[folder]).with_suffix("").parts
        paths[".".join((folder, *(part for part in parts if part != "__init__")))] = path
    return paths


MODULES = modules()

LAYERS = (
    ("errors", "version"),
    ("files",),
    ("assets", "bootstrap", "config", "distributed", "heads", "progress", "registry", "signature"),
    ("data", "model"),
    ("results",),
    ("formats",),
    ("evaluation",),
    ("export",),
    ("attribution",),
    ("relevance",),
    ("description",),
    ("pair_functions",),
    ("engine",),
    ("analyses",),
    ("training",),
    ("pruning",),
    ("report",),
    ("api",),
    ("cli",),
)
"""From the bottom up: who may import whom. Within the third layer, and within a folder, only cycles are forbidden."""
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def layer(name: str) -> str:
    """The folder or root file that a module belongs to."""
    return name.split(".")[1]
