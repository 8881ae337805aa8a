"""Configuration of a native Transformer: sizes, conventions and head counts of each of its two stacks.

Symbols of the papers: d_model, d_ffn, d_head (width of one head's queries and keys), d_value (of its
values). Head counts are per layer, so a pruned model is an ordinary model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from headscope.config.option import MAX_LAYERS, MAX_WIDTH, check_fields
from headscope.errors import ConfigError, raise_first

Option = str | int | float | bool
Count = Annotated[int, Ge(0)]
Length = Annotated[int, Ge(1)]
Width = Annotated[int, Ge(1), Le(MAX_WIDTH)]
Dropout = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One stack, encoder or decoder: `self_heads` and `cross_heads` hold one head count per layer.

    - `head_input` "full": every head reads all of the input (canonical attention; with `d_head` = `d_model`
      the wide one). "slice": the input is cut into `slices` chunks (default: the largest head count) and a
      head reads only its own (the narrow one); with `shared_qkv` all heads share one small matrix each for
      queries, keys and values.
    - `d_value` None is `d_head`; `d_embedding` None is `d_model`, else a projection without bias follows
      the embedding.
    - `positions`: the first real token stands at `position_offset` (0 in story-of-heads, 2 in fairseq: its
      padding index plus one), padding is not counted. `max_positions` is the number of rows of a learned
      table, without the offset, and the longest text; None where sinusoids set no limit.
    - `norm` "pre": x + f(norm(x)); "post": norm(x + f(x)). `final_norm` is the norm after the stack,
      `embedding_norm` the one after embeddings and positions (fairseq's layernorm_embedding).
    - `embedding_bias` is a vector added to every embedding after scaling (story-of-heads' inp_emb_bias).
    - `dropout` acts on embeddings and sublayer outputs, `context_dropout` on concatenated heads.
    - `self_mixing`, `cross_mixing`: name of a variant of `headscope.model.mixing`, None for none.
    """

    vocabulary: Length
    d_model: Width
    d_ffn: Width
    d_head: Width
    self_heads: tuple[Count, ...]
    cross_heads: tuple[Count, ...] = ()
    d_value: Width | None = None
    d_embedding: Width | None = None
    head_input: Literal["full", "slice"] = "full"
    slices: Width | None = None
    shared_qkv: bool = False
    qkv_bias: bool = True
    attention_bias: bool = True
    norm: Literal["pre", "post"] = "post"
    final_norm: bool = False
    norm_epsilon: float = 1e-5
    activation: Literal["relu", "gelu", "gelu-tanh", "silu", "tanh", "linear"] = "relu"
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    position_offset: Annotated[int, Ge(0), Le(1024)] = 0
    max_positions: Length | None = None
    scale_embedding: bool = True
    embedding_bias: bool = False
    embedding_norm: bool = False
    dropout: Dropout = 0.0
    attention_dropout: Dropout = 0.0
    activation_dropout: Dropout = 0.0
    context_dropout: Dropout = 0.0
    self_mixing: str | None = None
    cross_mixing: str | None = None
    mixing_options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        has_slices, d, chunks = self.head_input == "slice", self.d_model, self.chunks
        problems = {
            f"self_heads names {self.layers} layers; a stack has at most {MAX_LAYERS}": self.layers > MAX_LAYERS,
            f"cross_heads names {len(self.cross_heads)} layers and self_heads {self.layers}; a stack has both in every "
            "layer or no cross attention at all": len(self.cross_heads) not in (0, self.layers),
            "shared_qkv and slices belong to head_input = 'slice'; this stack has 'full'": (
                not has_slices and (self.shared_qkv or self.slices is not None)
            ),
            f"{self.most_heads} heads cannot each have one of {chunks} slices of the input": (
                has_slices and self.most_heads > chunks
            ),
            f"width {d} cannot be cut into {chunks} slices; choose from {divisors(d) if has_slices else ''}": (
                has_slices and d % chunks
            ),
            "learned positions need max_positions, the number of rows of their table": (
                self.positions == "learned" and self.max_positions is None
            ),
        }
        raise_first(ConfigError, problems)

    @property
    def most_heads(self) -> int:
        """The largest head count of any layer."""
        return max((*self.self_heads, *self.cross_heads), default=0)

    @property
    def chunks(self) -> int:
        """Number of slices that the input of a layer is cut into."""
        return self.slices or max(self.most_heads, 1)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.self_heads)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder, and an encoder unless the model is decoder-only.

    - `start` "token": the decoder's first input is an ordinary id; "zero": the embedding at the first
      position is all zeros, whatever id stands there (story-of-heads).
    - `share_embeddings`: one table for both sides. `tie_output`: the output projection is the decoder's
      table. `output_bias`: the output projection has a bias. `d_output`: where not None, a projection
      without bias to this width precedes the output projection.
    """

    decoder: StackConfig
    encoder: StackConfig | None = None
    start: Literal["token", "zero"] = "token"
    share_embeddings: bool = False
    tie_output: bool = False
    output_bias: bool = False
    d_output: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        encoder, decoder = self.encoder, self.decoder
        width, table = self.d_output or decoder.d_model, decoder.d_embedding or decoder.d_model
        problems = {
            f"tie_output: the embedding is {table} wide and the output projection's input {width}": (
                self.tie_output and width != table
            )
        }
        if encoder is None:
            problems |= {
                "a decoder-only model has cross_heads, but no encoder to attend to": bool(decoder.cross_heads),
                "share_embeddings needs an encoder; a decoder-only model has one table anyway": self.share_embeddings,
            }
        else:
            tables = (encoder.vocabulary, encoder.d_embedding or encoder.d_model), (decoder.vocabulary, table)
            d, chunks, has_slices = encoder.d_model, decoder.chunks, decoder.head_input == "slice"
            problems |= {
                "the encoder has cross_heads; only a decoder attends to another stack": bool(encoder.cross_heads),
                f"the decoder has no cross_heads; give {decoder.layers} head counts (0 for a layer without heads)": (
                    not decoder.cross_heads and decoder.layers > 0
                ),
                f"encoder width {d} cannot be cut into the {chunks} slices of the decoder's heads; choose from "
                f"{divisors(d) if has_slices else ''}": has_slices and d % chunks > 0,
                f"share_embeddings: tables of {tables[0]} and {tables[1]} entries × width differ": (
                    self.share_embeddings and tables[0] != tables[1]
                ),
            }
        raise_first(ConfigError, problems)

    @property
    def stacks(self) -> list[StackConfig]:
        """The decoder, after the encoder where there is one."""
        return [*self.sides.values()]

    @property
    def sides(self) -> dict[str, StackConfig]:
        """The stacks by name: `encoder` where there is one, `decoder`."""
        return {"decoder": self.decoder} if self.encoder is None else {"encoder": self.encoder, "decoder": self.decoder}

    def with_stacks(self, change: Callable[[StackConfig], StackConfig]) -> TransformerConfig:
        """This config with `change` applied to every stack."""
        *encoder, decoder = map(change, self.stacks)
        return replace(self, encoder=encoder[0] if encoder else None, decoder=decoder)


def divisors(number: int) -> list[int]:
    """All numbers that divide `number`."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
