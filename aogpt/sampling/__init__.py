"""Generation by any plan. Read simple.py first, a sampler on one page, then cached.py,
plans.py and engine.py.

    from aogpt.sampling import Engine, Samples, mdm_plan
    plan = mdm_plan(Samples(8, 256), steps=64)
    samples = Engine(model).generate(plan)"""

from .engine import Engine, Generation
from .plans import (
    Plan,
    Samples,
    even_plan,
    group_sizes,
    mdm_plan,
    order_plan,
    score_plan,
    speculative_plan,
    stack_plans,
)
from .simple import simple_generate
from .token_choice import TokenChoice
