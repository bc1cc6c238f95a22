"""From a plan to samples: plans, the cached engine, the choice of tokens, the page that shows them."""
