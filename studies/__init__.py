import aogpt.runtime.environment  # says if packages are missing
