"""Reactions whose atom maps are known, for the head of RXNMapper that a paper names.

Schwaller et al. (2021, Science Advances, "Extraction of organic chemistry grammar from unsupervised learning of
chemical reactions") train an ALBERT of 12 layers, which share one set of 8 heads, on reactions as SMILES, without any
mapping of atoms, and find that head 5 maps them; the package takes it in layer 10. Here reactions are put together from
fragments (esters, amides, Suzuki couplings), so the mapping is known. It goes to `analyze` as a dependency relation:
the head word of an atom of the product is the same atom among the reactants.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

TOKEN = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
"""As theirs."""
ATOM = re.compile(r"\[.*\]|Br|Cl|[A-Zbcnops]")
ACYLS = ("CC", "CCC", "CC(C)", "CC(C)(C)", "CCOC(=O)C", "N#CC", "C1CC1", "C1CCCCC1", "BrCC", "FC(F)(F)", "CCCC", "COC")
ALCOHOLS = ("OC", "OCC", "OCCC", "OC(C)C", "Oc2ccccc2", "OCc2ccccc2", "OCC=C", "OCCOC", "OCC#N", "OCC(F)(F)F")
AMINES = ("NCC", "NC(C)C", "Nc2ccccc2", "NCc2ccccc2", "N2CCOCC2", "N2CCCC2", "NCCO", "Nc2ccc(F)cc2", "NC2CC2", "NCC#N")
ARYLS = ("Cc1ccc(", "COc1ccc(", "N#Cc1ccc(", "Clc1ccc(", "CC(=O)c1ccc(", "O=[N+]([O-])c1ccc(", "FC(F)(F)c1ccc(")
RINGS = ("c2ccccc2", "c2ccc(C)cc2", "c2ccc(OC)cc2", "c2ccc(F)cc2", "c2cccnc2", "c2ccsc2", "c2ccc(C#N)cc2")
AGENTS_OF_ACYLS = ("CCN(CC)CC.ClCCl", "c1ccncc1", "CN(C)C=O", "[OH-].[Na+]")
AGENTS_OF_ARYLS = ("O=C([O-])[O-].[Na+].[Na+].C1COCCO1", "[Pd].CCO")


def reactions(count: int, draws: random.Random) -> Iterator[tuple[list[str], dict[int, int]]]:
    """Tokens of different reactions, and the reactant's token of each atom of the product (by token)."""
    smiles = set[str]()
    while len(smiles) < count:
        if draws.random() < 0.6:
            product = [draws.choice(ACYLS) + "C(=O)", draws.choice((*ALCOHOLS, *AMINES))]
            reactants = [[product[0], draws.choice(("O", "Cl"))], [product[1]]]
            agent = draws.choice(AGENTS_OF_ACYLS)
        else:
            product = [draws.choice(ARYLS), draws.choice(RINGS), ")cc1"]
            reactants = [[product[0], draws.choice(("Br", "I")), product[2]], [product[1], "B(O)O"]]
            agent = draws.choice(AGENTS_OF_ARYLS)
        draws.shuffle(reactants)
        pieces = [piece for reactant in reactants for piece in (*reactant, ".")] + [agent, ">>", *product]
        if "".join(pieces) not in smiles:
            smiles.add("".join(pieces))
            yield _link_atoms([re.findall(TOKEN, piece) for piece in pieces], re.findall(TOKEN, "".join(product)))


def _link_atoms(pieces: list[list[str]], product: list[str]) -> tuple[list[str], dict[int, int]]:
    """All tokens, and the token among the reactants of each atom of the product."""
    tokens = [token for piece in pieces for token in piece]
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    links = {}
    for number in range(pieces.index([">>"]) + 1, len(pieces)):
        source = starts[pieces.index(pieces[number])]
        atoms = (at for at, token in enumerate(pieces[number]) if ATOM.fullmatch(token))
        links.update({starts[number] + at: source + at for at in atoms})
    assert tokens[-len(product) :] == product and all(tokens[at] == tokens[source] for at, source in links.items())
    return tokens, links


def as_conllu(tokens: list[str], links: dict[int, int]) -> str:
    """A sentence of CoNLL-U, whose only relation of interest is `map`."""
    rows = [f"# text = {''.join(tokens)}"]
    for number, token in enumerate(tokens):
        head = links.get(number, -1) + 1
        relation = "map" if head else "root" if not number else "dep"
        rows.append(f"{number + 1}\t{token}\t{token}\t_\t_\t_\t{head or int(number > 0)}\t{relation}\t_\tSpaceAfter=No")
    return "\n".join(rows) + "\n\n"


def with_tokenizer(package: Path, folder: Path) -> Path:
    """The checkpoint with a tokenizer that transformers opens: a word of the vocabulary for each match of `TOKEN`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {line: number for number, line in enumerate((package / "vocab.txt").read_text().splitlines())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex(TOKEN), "isolated"), decoders.Fuse()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(folder)
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(package / name, folder)
    return folder
