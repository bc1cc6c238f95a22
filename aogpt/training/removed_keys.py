"""Keys that the configuration no longer has. A run saves every key of its version, so
its config loads only without them; one that is not at its default is refused as an
unknown key."""

from typing import Any

ADVICE = "the last commit that has all removed keys and orders is 4349f6ec"
ORDERS = ("random_l2r", "sliding")  # removed kinds
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


def without_removed_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a config without removed keys at their defaults."""
    tables = dict(config)
    for name, table in config.items():
        if isinstance(table, dict):
            tables[name] = {
                key: value
                for key, value in table.items()
                if f"{name}.{key}" not in DEFAULTS or value != DEFAULTS[f"{name}.{key}"]
            }
    return tables


def advice_on(config: dict[str, Any]) -> str:
    """Return what to say of a mistake in the tables of a config: ADVICE if they still
    have a removed key or order."""
    for name, table in config.items():
        keys = table if isinstance(table, dict) else ()
        if any(f"{name}.{key}" in DEFAULTS for key in keys):
            return ADVICE
    # An order stands in [order], there also as `mixed`, or in a stage of the schedule.
    has_order = any(repr(kind) in str(config) for kind in ORDERS)
    return ADVICE if has_order else ""
