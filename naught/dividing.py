"""Dividing: layers of a model that is there already are put into pieces, and pieces know what they are of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from naught.born import lend, take_back
from naught.errors import UsageError
from naught.tiled import TiledEmbedding, TiledLinear, pieces_of
from naught.within import Within

__all__ = ["divide", "pieces_within", "refuse_divided", "replace_in_groups", "tile_linears"]

_SMALL = 16  # a layer with so small a part of the largest one's weights stays whole
_READERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # they read their layers' weights without calling them
_DIVIDED: MutableMapping[nn.Parameter, int] = WeakIdKeyDictionary()  # into how many pieces
Pieces = TiledLinear | TiledEmbedding
Replaced = Mapping[nn.Parameter, Sequence[nn.Parameter]]


def tile_linears(model: nn.Module, tiles: int, *, at_least: int = 1 << 24) -> list[str]:
    """Divide every nn.Linear of a model that has so many weights into pieces along its outputs, in place and before there is an
    engine. Returns their names. In a checkpoint they keep the names and shapes that they had; in the model their parameters are
    called NAME.linears.OUT.0.weight from here on. A weight that is tied to another module's stays whole."""
    found = [place for place in _layers(model, nn.Linear) if place.layer.weight.numel() >= at_least]
    for place in found:
        _divide(place, tiles)
    return [place.name for place in found]


def divide(model: nn.Module, tiles: int) -> Replaced:
    """The same, with embeddings, and with all layers that are not small beside the largest."""
    found = list(_layers(model, nn.Linear, nn.Embedding))
    largest = max((place.layer.weight.numel() for place in found), default=0)
    replaced: dict[nn.Parameter, Sequence[nn.Parameter]] = {}
    for place in found:
        if place.layer.weight.numel() * _SMALL >= largest:
            replaced |= _divide(place, tiles)
    return replaced


def replace_in_groups(groups: Sequence[dict[str, Any]], replaced: Replaced) -> None:
    """Have an optimizer's groups hold pieces instead of what they are of."""
    for group in groups:
        group["params"][:] = [piece for param in group["params"] for piece in replaced.get(param, [param])]


class _Place(NamedTuple):
    parent: nn.Module
    short: str
    name: str
    layer: nn.Linear | nn.Embedding


def _layers(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[_Place]:
    """Layers that can be divided: of these very kinds, and not tied to others."""
    users = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    divided = set(map(id, pieces_of(model)))
    for name, parent in list(model.named_modules()):
        if isinstance(parent, _READERS):
            continue
        for short, child in list(parent.named_children()):
            if type(child) not in kinds or id(child) in divided or (isinstance(child, nn.Embedding) and not _is_plain(child)):
                continue
            if users[id(child.weight)] == 1:
                yield _Place(parent, short, f"{name}.{short}".removeprefix("."), cast(nn.Linear, child))


def _is_plain(layer: nn.Embedding) -> bool:
    return layer.padding_idx is None and layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def _divide(place: _Place, tiles: int) -> dict[nn.Parameter, Sequence[nn.Parameter]]:
    layer = place.layer
    lent = lend(list(layer.parameters()))  # if it was split while it was built
    options: dict[str, Any] = {"device": "meta", "dtype": layer.weight.dtype}  # filled below: no random numbers are drawn for it
    pieces: Pieces
    if isinstance(layer, nn.Linear):
        splits = min(tiles, layer.out_features)
        bias = layer.bias is not None
        pieces = TiledLinear(layer.in_features, layer.out_features, bias=bias, out_splits=splits, **options)
    else:
        pieces = TiledEmbedding(layer.num_embeddings, layer.embedding_dim, min(tiles, layer.num_embeddings), **options)
    if not layer.weight.is_meta:
        pieces.to_empty(device=layer.weight.device).copy_params_from(layer)  # type: ignore[arg-type]
    pieces.stands_in = True
    replaced: dict[nn.Parameter, Sequence[nn.Parameter]] = {}
    for short, param in layer.named_parameters():
        replaced[param] = [cast(nn.Parameter, getattr(piece, short)) for piece in pieces.pieces]
        for piece in replaced[param]:
            piece.requires_grad_(param.requires_grad)
    setattr(place.parent, place.short, pieces)
    take_back([one._replace(param=piece) for one in lent for piece in replaced[one.param]], None)
    for param, parts in replaced.items():
        _DIVIDED[param] = len(parts)
        param.data = param.data.new_empty(0)  # whoever still has it: its memory is that of the pieces
    return replaced


def refuse_divided(params: Iterable[nn.Parameter]) -> None:
    """Whoever has kept a weight from before its layer was divided has nothing in hand."""
    for param in params:
        if param in _DIVIDED:
            raise UsageError(
                f"this weight is no more: its layer was divided into {_DIVIDED[param]} pieces (naught.tiles, tile_linears)",
                fix="ask the layer that the model has now: GatheredParameters(model.LAYER) has the parameters of all its pieces",
            )


def pieces_within(model: nn.Module) -> dict[str, Within]:
    """What parameters of pieces that stand in for layers are of those, by the pieces' names."""
    found: dict[str, Within] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Pieces) or not layer.stands_in:
            continue
        first: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        named = {id(param): path for path, param in layer.named_parameters(prefix=name)}
        members = [(short, param) for piece in layer.pieces for short, param in piece.named_parameters()]
        for short, param in members:
            rows[short] += param.shape[0]
        for short, param in members:
            shape = (rows[short], *param.shape[1:])
            found[named[id(param)]] = Within(f"{name}.{short}".removeprefix("."), first[short], shape)
            first[short] += math.prod(param.shape)
    return found
