"""Texts and what belongs to them: corpora, parses, alignment with subwords, vocabularies."""
