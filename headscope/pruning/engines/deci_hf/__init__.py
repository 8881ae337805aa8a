"""DeciLM folders: key/value heads that differ by layer, and layers without attention."""
