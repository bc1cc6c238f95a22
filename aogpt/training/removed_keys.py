"""Keys that the configuration no longer has. A run saves every key of its version, so
its config loads only without them."""

from typing import Any

from ..runtime.validation import FileError

LAST_COMMIT = "4349f6ec"  # the last one that has all of these keys
# Removed keys and the defaults that they had.
DEFAULTS: dict[str, Any] = {
    "data.mix": [],
    "data.random_length_prob": 0.0,
    "order.window": 8,
    "train.compile_mode": "default",
    "train.lora_rank": 0,
    "train.fused_norm": False,
    "train.flash3": False,
    "objective.noise_eps": 1e-3,
    "data.verify": False,
    "optim.decay_share": 0.2,
    "optim.decay_steps": 0,
    "optim.grad_clip": 1.0,
    "optim.more_ema_decays": [],
    "optim.muon_momentum": 0.95,
    "train.reduce_every_micro_batch": False,
    "train.max_skipped_steps": 10,
    "checkpoint.minutes": 0.0,
    "wandb.project": "aogpt",
}
ORDERS = ("random_l2r", "sliding")  # removed kinds of orders


def without_removed_keys(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the tables of a config without removed keys. source: its file, for errors.
    Raises FileError for a removed key that is not at its default, and for removed kinds
    of orders."""
    tables = {}
    for name, table in config.items():
        if name == "schedule" and isinstance(table, list):
            for stage in table:
                check_order(stage.get("kind"), "schedule.kind", source)
        if not isinstance(table, dict):
            tables[name] = table
            continue
        tables[name] = {}
        for key, value in table.items():
            dotted = f"{name}.{key}"
            if dotted in ("order.kind", "order.mixed"):
                check_order(value, dotted, source)
            if dotted not in DEFAULTS:
                tables[name][key] = value
            elif value != DEFAULTS[dotted]:
                raise removed(dotted, value, source)
    return tables


def check_order(kind: Any, key: str, source: str) -> None:
    """Raise FileError for a removed kind of orders."""
    if kind in ORDERS:
        raise removed(key, kind, source)


def removed(key: str, value: Any, source: str) -> FileError:
    """Return the error for a key or value that was removed."""
    return FileError(
        f"{source} sets {key} = {value!r}, which was removed; the last commit that has "
        f"it is {LAST_COMMIT}"
    )
