"""Published perplexities, to stand beside measured ones: data/published.toml."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from evaluation.likelihood import ScoreEntropy, Task
from runtime.validation import Positive, from_values, read_toml

PUBLISHED = Path(__file__).parent.parent / "data" / "published.toml"
SCALES = {(12, 768): "small", (24, 1024): "medium"}  # by (layers, width)
Figures = dict[str, dict[str, list[Positive]]]  # by orders and model, one for each data set


class Published(TypedDict):
    datasets: list[str]
    splits: dict[str, str]
    small: Figures
    medium: Figures


def published_perplexity(task: Task, size: int, weights: str) -> float | None:
    """The published perplexity of the released model with this layout and size (checksums are not
    published) on this eval set, under the same protocol, for ensembles of this size; None where
    there is none. weights: as in --weights; the published figures are for averaged weights."""
    loaded, eval_set, _, scorer = task
    table = from_values(read_toml(PUBLISHED), Published, str(PUBLISHED))
    meta = eval_set.dataset.meta
    data = meta.get("settings", {}).get("dataset")
    # Notes say how the folder differs from the published set.
    same_protocol = meta.get("protocol") == "sedd" and not meta.get("notes")
    same_text = eval_set.split == table["splits"].get(data)
    whole = eval_set.count >= eval_set.dataset.num_blocks
    if not (loaded.system and weights == "ema" and same_protocol and same_text and whole):
        return None
    # SEDD is published with its own bound, not with its outputs as probabilities.
    own_bound = isinstance(scorer, ScoreEntropy) == (loaded.system == "SEDD")
    if not own_bound or scorer.weighted or scorer.group > 1:
        return None
    config = loaded.model.config
    scale = SCALES.get((config.n_layer, config.n_embd))
    row = loaded.system if size == 1 else f"{loaded.system}, {size} orders"
    kind = "random" if scorer.joint else task.name
    figures = table.get(scale, {}).get(kind, {}).get(row)
    return figures[table["datasets"].index(data)] if figures else None
