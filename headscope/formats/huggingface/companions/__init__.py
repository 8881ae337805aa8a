"""Files beside the weights in a folder of transformers: layouts, languages, prompts, modules of sentences."""
