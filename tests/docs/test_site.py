"""The documentation builds without a warning, asks nothing of a network, and leaves out no command and no measure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headscope.cli.main import COMMANDS
from headscope.config.declarations import declarations
from scripts.doc_pages.write import written
from tests.makers.modules import ROOT

WARNINGS = "ignore::DeprecationWarning"  # of the generator's own libraries


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or an anchor that leads nowhere, or a page in no menu, is an error of the build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        folder = tmp_path_factory.mktemp("site")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.run_event("startup", command="build", dirty=False)
        build(config)
        assert config.strict
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNINGS)
def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\" >]+)", text)
        assert not fetched, (page.name, fetched)
        assert 'class="mermaid"' not in text  # the theme would fetch what draws it
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?https?:", sheets)


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNINGS)
def test_every_command_and_every_measure_has_its_place(site: Path) -> None:
    for command in COMMANDS:
        assert f"headscope {command}" in (site / "commands" / f"{command}.html").read_text(encoding="utf-8")
    assert "<code>--gamma-conf</code>" in (site / "mhr-options.html").read_text(encoding="utf-8")
    assert "<code>bert</code>" in (site / "architectures.html").read_text(encoding="utf-8")
    measures = (site / "measures.html").read_text(encoding="utf-8")
    for analysis in declarations("measures"):
        assert re.search(rf"<h3[^>]*><code>{re.escape(analysis.name)}</code>", measures), analysis.name
        assert all(f"<code>{measure.name}</code>" in measures for measure in analysis.measures)


@pytest.mark.slow
def test_pages_hold_what_the_code_says_now() -> None:
    """`python -m scripts.doc_pages` writes them."""
    stale = [page.name for page, text in written().items() if page.read_text(encoding="utf-8") != text]
    assert not stale
