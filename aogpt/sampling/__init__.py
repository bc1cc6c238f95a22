"""Generation by any plan. Read simple.py first, a sampler on one page, then cached.py,
plans.py and engine.py.

    from aogpt.sampling import generate, mdm_plan
    plan = mdm_plan(8, 256, steps=64, generator=torch.Generator())
    samples = generate(model, plan)"""

from .engine import Engine, Generation, generate
from .plans import (
    Plan,
    adaptive_plan,
    group_sizes,
    l2r_plan,
    mdm_plan,
    random_plan,
    speculative_plan,
    stack_plans,
)
from .simple import simple_generate
from .token_choice import TokenChoice
