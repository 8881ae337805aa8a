"""Tokens as people read them: one way for all tokenizers."""

from headscope.data.token_text import text_of, visible
from headscope.description.tokens import TokenReader
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from tests.makers.decoders import byte_level, decoder


def test_a_byte_level_model_has_its_text_back() -> None:
    tokenizer = byte_level()
    its = HuggingFaceCheckpoint(path="tiny", model=decoder("llama"), tokenizer=tokenizer, digest="0" * 64)
    reader = TokenReader.of(its, "source")
    for text in ("A man in a hat,\n and more\tof it", " 'tis so"):
        found = reader.shown(tokenizer(text)["input_ids"])
        assert found[0] == "<s>" and "".join(found[1:]) == visible(text)


def test_a_byte_level_token_stands_for_its_text() -> None:
    """ó and в have a digit among the letters that their bytes are written with, a dash has letters."""
    spelled = [text_of(token, "Ġ") for token in ("ĠciÃ³n", "Ð²", "ĠâĢĶ", "Ġ", "Ċ", "猫")]
    assert spelled == ["ción", "в", "—", "", "\n", "猫"]
    assert [text_of(token, "▁") for token in ("▁ab", "▁", "▁▁", "<0x41>", "Ã³")] == ["ab", "", " ", "A", "Ã³"]
    assert [text_of(token, "##") for token in ("##ly", "Ã³")] == ["ly", "Ã³"]
    cut = [text_of("<0xE2>", "▁"), text_of("<0xB3>", "▁"), text_of("³", "Ġ"), text_of("Ð", "Ġ")]
    assert cut[1] == cut[2] and len({*cut}) == 3  # the same byte
    assert all(letter.isalpha() and not letter.isdigit() and not letter.isupper() for letter in cut)
