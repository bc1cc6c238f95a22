"""Keys that the configuration no longer has. A run saves every key of its version, so
its config loads only without them."""

from typing import Any

from ..runtime.validation import FileError

LAST_COMMIT = "4349f6ec"  # the last one that has all of these keys
# Removed keys and the defaults that they had.
DEFAULTS: dict[str, Any] = {
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


def without_removed_keys(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the tables of a config without removed keys. source: its file, for errors.
    Raises FileError for a removed key that is not at its default."""
    tables = {}
    for name, table in config.items():
        if not isinstance(table, dict):
            tables[name] = table
            continue
        tables[name] = {}
        for key, value in table.items():
            dotted = f"{name}.{key}"
            if dotted not in DEFAULTS:
                tables[name][key] = value
            elif value != DEFAULTS[dotted]:
                raise FileError(
                    f"{source} sets {dotted} = {value!r}, which was removed; the last "
                    f"commit that has it is {LAST_COMMIT}"
                )
    return tables
