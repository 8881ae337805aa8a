"""Make a small Llama with grouped queries, to try what docs/serving.md says: it learns the captions that ship.

    python examples/make_llama.py [Qwen3]

Writes llama, or qwen3 (3 layers of 8 heads in 4 groups, a tokenizer of its own), and text.en, captions that it has not
seen, and says its perplexity on them. It takes a few seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

import headscope as hs

KIND = sys.argv[1] if len(sys.argv) > 1 else "Llama"
UPDATES, BATCH, PIECES = 60, 32, 512
START, END = "<s>", "</s>"

logging.disable_progress_bar()
captions = Path(hs.assets.captions("en")).read_text(encoding="utf-8").splitlines()
seen, unseen = captions[:200], captions[200:]

pieces = Tokenizer(models.BPE())
pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
pieces.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
pieces.train_from_iterator(
    seen,
    trainers.BpeTrainer(vocab_size=PIECES, special_tokens=[START, END], initial_alphabet=letters, show_progress=False),
)
pieces.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token=START, eos_token=END, pad_token=END)

torch.manual_seed(1)
config = getattr(transformers, f"{KIND}Config")(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=256,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=None,
)
model = getattr(transformers, f"{KIND}ForCausalLM")(config)
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(UPDATES):
    drawn = [seen[i] + END for i in torch.randint(len(seen), (BATCH,)).tolist()]
    batch = tokenizer(drawn, padding=True, return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
    adam.zero_grad()
    loss.backward()
    adam.step()

folder = KIND.lower()
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
Path("text.en").write_text("\n".join(unseen) + "\n", encoding="utf-8")
print(f"perplexity {hs.evaluate(folder, 'text.en')['perplexity'].value:.1f} on {len(unseen)} captions")
