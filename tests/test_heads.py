"""Names of heads: with and without their site, and what is said of those that a model lacks."""

from pathlib import Path

import pytest

from headscope.errors import ConfigError
from headscope.heads import HeadId, Layout, Site, select_heads

ONE: Layout = {(Site.DECODER_SELF, 0): 2, (Site.DECODER_SELF, 3): 4}  # a hybrid: layers 1 and 2 have no attention
TWO: Layout = {(Site.ENCODER_SELF, 0): 2, (Site.CROSS, 0): 2}


@pytest.mark.parametrize("names", ["3.1", "decoder-self.3.1", "3.1,decoder-self.3.1"])
def test_a_model_with_one_site_needs_no_site_in_names(names: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(names.replace(",", "\n"), encoding="utf-8")
    head = HeadId(Site.DECODER_SELF, 3, 1)
    assert select_heads(names, ONE) == select_heads(str(tmp_path / "list"), ONE) == [head]
    assert HeadId.parse(names.split(",")[0], ONE) == head and head.name([Site.DECODER_SELF]) == "3.1"
    assert select_heads("*.1", ONE) == [HeadId(Site.DECODER_SELF, layer, 1) for layer in (0, 3)]


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("3.7", ONE, "no head of this model is called '3.7'; this model has decoder-self 4 × 2/0/0/4: write 3.3"),
        ("cross.0.0", ONE, "this model has decoder-self"),
        ("3.1.2.4", ONE, "'3.1.2.4' is not the name of a head.*no file.*this model has decoder-self .*write 3.3"),
        ("0.1", TWO, "'0.1' is not .*; this model has encoder-self 1 × 2, cross 1 × 2: write cross.0.1"),
        ("0.1,cross.0.0", TWO, "'0.1' is not the name of a head"),
    ],
)
def test_other_names_are_answered_with_the_sites_of_this_model(name: str, layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_heads(name, layout)
