"""The weights that a run starts from, where train.init_from names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoints import load
from ..checkpoints.load import Loaded
from ..checkpoints.pretrained import check_length
from ..data.tokenizers import HUB, other_tokenizer
from ..model import Transformer
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..systems import build_model, build_on_meta
from .config import Config
from .warm_start import check_start, differing_keys, warm_start

# On a source whose own score leaves out what a run learns to predict from [None].
FIRST_TOKENS = (
    "it has no start token: the losses of this run are also of the first token of a "
    "block; to score the same tokens of both: python eval_ppl.py RUN {source}"
)


def weights_to_start_from(
    config: Config, data_meta: Mapping[str, Any], procs: Processes
) -> dict[str, Tensor]:
    """Return the weights of train.init_from by name, and print what differs from their
    source. Raises UserError for a source that cannot start the run."""
    source = load(config.train.init_from)
    check_length(source.window, config.model.block_size)
    check_same_tokenizer(config, source, data_meta)
    weights = initial_weights(config, source.model)
    procs.print0(f"started from the weights of {config.train.init_from}")
    changed = []
    for name, before, now in differing_keys(source.model.config, config.model):
        changed.append(f"model.{name} = {now!r} (was {before!r})")
    if changed:
        procs.print0(f"other than in its source: {', '.join(changed)}")
    if source.scored_from and not config.model.is_encoder:
        procs.print0(FIRST_TOKENS.format(source=config.train.init_from))
    return weights


def check_same_tokenizer(
    config: Config, source: Loaded, data_meta: Mapping[str, Any]
) -> None:
    """Raise UserError if the data has another tokenizer than the model to start
    from."""
    for key, (theirs, ours) in other_tokenizer(vars(source), data_meta).items():
        tokenizer = "its tokenizer"
        file = Path(source.path).with_name(HUB)
        if file.is_file():
            tokenizer += f" (--tokenizer {file})"
        raise UserError(
            f"cannot start from {source.path}: its {key} is {theirs!r}, that of "
            f"{config.data.folder} is {ours!r}; prepare the data with {tokenizer}, or "
            "leave out --train.init-from"
        )


def initial_weights(config: Config, source: Transformer) -> dict[str, Tensor]:
    """Return the initial weights of a run that starts from a model, by name: where it
    has no others, the source's own tensors, not copies."""
    empty = build_on_meta(config.model)
    shapes = {name: p.shape for name, p in empty.named_parameters()}
    theirs: dict[str, Tensor] = dict(source.named_parameters())
    if shapes == {name: p.shape for name, p in theirs.items()}:
        check_start(empty, source)
        return theirs
    initial = build_model(config.model)
    warm_start(initial, source)
    return dict(initial.named_parameters())
