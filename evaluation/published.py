"""Published perplexities, to stand beside measured ones: data/published.toml."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from evaluation.likelihood import ScoringTask
from runtime.validation import Positive, from_values, read_toml

PUBLISHED = Path(__file__).parent.parent / "data" / "published.toml"
SCALES = {(12, 768): "small", (24, 1024): "medium"}  # by (layers, width)


Figures = dict[str, dict[str, list[Positive]]]
"""By orders and model, one for each data set."""


class Published(TypedDict):
    datasets: list[str]
    splits: dict[str, str]
    small: Figures
    medium: Figures


def published_perplexity(task: ScoringTask, size: int, weights: str) -> float | None:
    """The published perplexity of the released model that this is, on this eval set under the same
    protocol and for ensembles of this size; None where there is none.

    The layout and size of the weights tell which model it is: nobody has listed the checksums of
    the released ones. weights: as --weights asked; the published figures are of averaged ones."""
    loaded, eval_set = task.loaded, task.eval_set
    table = from_values(read_toml(PUBLISHED), Published, str(PUBLISHED))
    meta = eval_set.dataset.meta
    data = meta.get("settings", {}).get("dataset")
    same_model = loaded.system and weights == "ema"
    # Notes say in what the folder differs from the published set.
    same_protocol = meta.get("protocol") == "sedd" and not meta.get("notes")
    same_text = eval_set.split == table["splits"].get(data)
    whole = eval_set.count >= eval_set.dataset.num_blocks
    if not (same_model and same_protocol and same_text and whole):
        return None
    # SEDD's are of its own bound, not of its outputs as probabilities.
    name = "random" if task.score_entropy else task.name
    if (loaded.system == "SEDD") != task.score_entropy or task.group > 1:
        return None
    if task.rule or task.importance_weighted:
        return None
    config = loaded.model.config
    scale = SCALES.get((config.n_layer, config.n_embd))
    row = loaded.system if size == 1 else f"{loaded.system}, {size} orders"
    figures = table.get(scale, {}).get(name, {}).get(row)
    return figures[table["datasets"].index(data)] if figures else None
