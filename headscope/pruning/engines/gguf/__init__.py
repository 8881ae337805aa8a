"""GGUF files for llama.cpp, layers with different numbers of heads included."""
