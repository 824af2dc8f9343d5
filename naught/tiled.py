"""Tiled: layers in pieces, each a unit of its own: one that is too large to be gathered is gathered and freed piece by piece
(ZeRO-Infinity's memory-centric tiling). And a loss whose logits are never there all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from naught.errors import UsageError

__all__ = ["TiledEmbedding", "TiledLinear", "chunked_cross_entropy", "pieces_of"]


class TiledLinear(nn.Module):
    """A linear layer, divided along its inputs and its outputs. DeepSpeed's signature and parameter names: `linears[out][in]`.

    Pieces along the outputs give what the whole layer gives. Along the inputs sums are taken piece by piece, so the last bits
    may differ; so do those of an input's gradient, which is a sum over the pieces along the outputs.
    """

    stands_in = False  # for a layer whose names and shapes checkpoints keep

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check("in_splits", in_splits, in_features)
        _check("out_splits", out_splits, out_features)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _ends(in_features, in_splits), _ends(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # One bias for a row of pieces: with the last, as the sum ends there.
                linear_cls(wide, high, bias=bias and place == in_splits - 1, **kwargs)
                for place, wide in enumerate(_sizes(self.in_parts))
            )
            for high in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The layer's output, or that of its pieces where they are not combined."""
        inputs = self._divided(input_)
        outputs = [self._row(cast(nn.ModuleList, row), inputs) for row in self.linears]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _divided(self, given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if self.input_is_already_split:
            if isinstance(given, Tensor) or len(given) != self.in_splits:
                raise UsageError(f"a layer of {self.in_splits} pieces along its inputs wants a list of as many tensors")
            return given
        if not isinstance(given, Tensor) or given.shape[-1] != self.in_features:
            shape = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise UsageError(f"a layer of {self.in_features} inputs was given {shape}")
        return [given] if self.in_splits == 1 else torch.split(given, _sizes(self.in_parts), dim=-1)

    def _row(self, pieces: nn.ModuleList, inputs: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        for piece, part in zip(pieces, inputs, strict=True):
            output = piece(part.view_as(part))  # a tensor of its own: its gradient tells that this piece's backward is over
            total = output if total is None else total + output
        assert total is not None
        return total

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the weights of a whole layer. A layer on the meta device has none yet, and pieces fill themselves."""
        if (other.in_features, other.out_features) != (self.in_features, self.out_features):
            raise UsageError(
                f"a layer of {other.in_features} x {other.out_features} is not one of {self.in_features} x {self.out_features}"
            )
        if (other.bias is None) == self.use_bias:
            raise UsageError("one of the layers has a bias, and the other has none")
        for high, row in zip(_slices(self.out_parts), self.linears, strict=True):
            for wide, piece in zip(_slices(self.in_parts), cast(nn.ModuleList, row), strict=True):
                mine = cast(nn.Linear, piece)
                mine.weight.copy_(other.weight[high, wide])
                if mine.bias is not None:
                    mine.bias.copy_(other.bias[high])

    @property
    def pieces(self) -> list[nn.Module]:
        return [piece for row in self.linears for piece in row.children()]

    def extra_repr(self) -> str:
        return f"{self.in_features} x {self.out_features} in {self.in_splits} x {self.out_splits} pieces, bias={self.use_bias}"


class TiledEmbedding(nn.Module):
    """An embedding, divided into tables of neighbouring rows: what the whole one gives, and so are its gradients."""

    stands_in = False  # for a layer whose names and shapes checkpoints keep

    def __init__(self, num_embeddings: int, embedding_dim: int, splits: int = 1, **kwargs: Any) -> None:
        super().__init__()
        _check("splits", splits, num_embeddings, "rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.parts = _ends(num_embeddings, splits)
        self.tables = nn.ModuleList(nn.Embedding(rows, embedding_dim, **kwargs) for rows in _sizes(self.parts))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor | None = None
        for part, table in zip(_slices(self.parts), self.tables, strict=True):
            # The first table has what lies before it as well, and the last what lies behind: those say that it is not there.
            inside = torch.ones_like(ids, dtype=torch.bool)
            if part.start > 0:
                inside &= ids >= part.start
            if part.stop < self.num_embeddings:
                inside &= ids < part.stop
            rows = table(torch.where(inside, ids - part.start, 0))
            # Chosen, not added: a zero that is added to a negative one changes its sign.
            found = rows if found is None else torch.where(inside.unsqueeze(-1), rows, found)
        assert found is not None
        return found

    @property
    def pieces(self) -> list[nn.Module]:
        return list(self.tables)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Embedding) -> None:
        for rows, table in zip(_slices(self.parts), self.tables, strict=True):
            cast(nn.Embedding, table).weight.copy_(other.weight[rows])

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim} in {len(self.tables)} pieces"


def pieces_of(model: nn.Module) -> list[nn.Module]:
    """Of all layers that are in pieces."""
    return [piece for layer in model.modules() if isinstance(layer, TiledLinear | TiledEmbedding) for piece in layer.pieces]


def chunked_cross_entropy(
    hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor, *, chunks: int = 8, ignore_index: int = -100
) -> Tensor:
    """The mean cross-entropy of a head's logits, of which only a chunk of the tokens' is there at a time: each chunk is computed
    again in the backward. The head is called with the hidden states of some tokens."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if chunks < 1:
        raise UsageError(f"chunks is {chunks}", fix="give 1 or more")
    if len(flat) != len(wanted):
        raise UsageError(f"there are hidden states of {len(flat)} tokens, and labels of {len(wanted)}")

    def loss_of(part: Tensor, theirs: Tensor) -> Tensor:
        return functional.cross_entropy(head(part).float(), theirs, ignore_index=ignore_index, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for part, theirs in zip(flat.chunk(chunks), wanted.chunk(chunks), strict=True):
        total = total + cast(Tensor, checkpoint(loss_of, part, theirs, use_reentrant=False))
    return total / (wanted != ignore_index).sum()


def _check(name: str, splits: int, count: int, what: str = "features") -> None:
    if not 1 <= splits <= count:
        raise UsageError(f"{name} is {splits}, and there are {count} {what}", fix=f"give from 1 to {count}")


def _ends(features: int, splits: int) -> list[int]:
    """Where pieces begin, and where the last ends; the first ones are longer by one where it does not divide."""
    each, more = divmod(features, splits)
    sizes = [each + (place < more) for place in range(splits)]
    return [sum(sizes[:place]) for place in range(splits + 1)]


def _sizes(ends: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(ends)]


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(ends)]
