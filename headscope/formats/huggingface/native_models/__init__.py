"""Native Transformers as models of transformers: the class that expresses each, its weights, its tokenizer."""
