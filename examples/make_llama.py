"""Make a small Llama with grouped queries, to try what docs/serving.md says: it learns the captions that ship.

    python examples/make_llama.py [Qwen3]
    python examples/make_llama.py --text FILE --layers 6 --width 256 --pieces 4000 --updates 2000

Writes llama, or qwen3 (3 layers of 8 heads in 4 groups, a tokenizer of its own), and text.en, captions that it has not
seen, and says its perplexity on them. It takes a few seconds. The second line is a model that has learnt something, of
the sentences in a file, one a line: ten minutes of two cores for 29,000 captions.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

import headscope as hs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("kind", nargs="?", default="Llama", help="of a class of transformers with grouped queries")
parser.add_argument("--text", type=Path, default=hs.assets.captions("en"), help="its last sixth is not learnt")
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=64, help="a multiple of 16: eight heads of even width")
parser.add_argument("--pieces", type=int, default=512, help="size of the vocabulary")
parser.add_argument("--updates", type=int, default=60)
args = parser.parse_args()
BATCH, HEADS, GROUPS = 32, 8, 4
START, END = "<s>", "</s>"

logging.disable_progress_bar()
sentences = Path(args.text).read_text(encoding="utf-8").splitlines()
train_size = len(sentences) * 5 // 6
train, held_out = sentences[:train_size], sentences[train_size:]

pieces = Tokenizer(models.BPE())
pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
pieces.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
pieces.train_from_iterator(
    train,
    trainers.BpeTrainer(
        vocab_size=args.pieces, special_tokens=[START, END], initial_alphabet=letters, show_progress=False
    ),
)
pieces.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token=START, eos_token=END, pad_token=END)

torch.manual_seed(1)
config = getattr(transformers, f"{args.kind}Config")(
    vocab_size=len(tokenizer),
    hidden_size=args.width,
    intermediate_size=2 * args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=args.width // HEADS,
    max_position_embeddings=256,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=None,
)
model = getattr(transformers, f"{args.kind}ForCausalLM")(config)
adam = torch.optim.Adam(model.parameters(), lr=3e-3 * 64 / args.width)  # a wider model learns at a lower rate
for _ in range(args.updates):
    texts = [train[i] + END for i in torch.randint(len(train), (BATCH,)).tolist()]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
    adam.zero_grad()
    loss.backward()
    adam.step()

folder = args.kind.lower()
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
Path("text.en").write_text("\n".join(held_out) + "\n", encoding="utf-8")
print(f"perplexity {hs.evaluate(folder, 'text.en')['perplexity'].value:.1f} on {len(held_out)} captions")
