"""Tokens as people read them: one way for all tokenizers."""

from headscope.data.token_text import Marks, shown, visible
from headscope.description.tokens import TokenReader
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from tests.makers.decoders import byte_level, decoder

TOKENS: list[tuple[Marks, str, str]] = [
    ("Ġ", "Ġthe", "␣the"),
    ("Ġ", "the", "the"),
    ("Ġ", "Ċ", "⏎"),
    ("Ġ", "ĠĠĠĠ", "␣␣␣␣"),
    ("Ġ", "ĠgroÃŁ", "␣groß"),
    ("Ġ", "ð", "\\xf0"),  # a part of a letter
    ("Ġ", "<|endoftext|>", "<|endoftext|>"),
    ("Ġ", "猫", "猫"),  # added to the vocabulary as it is
    ("▁", "▁the", "␣the"),
    ("▁", "<0x0A>", "⏎"),
    ("▁", "<0xE2>", "<0xE2>"),
    ("##", "##ly", "##ly"),
    ("##", "ĠorġinaliÃ", "ĠorġinaliÃ"),  # letters, where no bytes are
    ("@@", "un@@", "un@@"),
    ("", "\t", "⇥"),
    ("", "a b\x00", "a␣b\\x00"),
]


def test_tokens_are_shown_the_same_way() -> None:
    assert [shown(token, marks) for marks, token, _ in TOKENS] == [expected for *_, expected in TOKENS]
    assert [visible(expected) for *_, expected in TOKENS] == [expected for *_, expected in TOKENS]


def test_a_byte_level_model_has_its_text_back() -> None:
    tokenizer = byte_level()
    its = HuggingFaceCheckpoint(path="tiny", model=decoder("llama"), tokenizer=tokenizer, digest="0" * 64)
    reader = TokenReader.of(its)
    for text in ("A man in a hat,\n and more\tof it", " 'tis so"):
        found = reader.shown(tokenizer(text)["input_ids"])
        assert found[0] == "<s>" and "".join(found[1:]) == visible(text)
