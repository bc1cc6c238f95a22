"""Generation by any plan: `from sampling import generate, mdm_plan`."""

from sampling.engine import Engine, Generation, generate
from sampling.plans import (
    Plan,
    adaptive_plan,
    group_sizes,
    l2r_plan,
    mdm_plan,
    order_plan,
    random_plan,
    speculative_plan,
    stack_plans,
)
from sampling.token_choice import TokenChoice

__all__ = [
    "Engine",
    "Generation",
    "Plan",
    "TokenChoice",
    "adaptive_plan",
    "generate",
    "group_sizes",
    "l2r_plan",
    "mdm_plan",
    "order_plan",
    "random_plan",
    "speculative_plan",
    "stack_plans",
]
