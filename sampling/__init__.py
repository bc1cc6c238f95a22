"""From a plan to samples: plans, the engine, the choice of tokens, the page that shows them."""
