"""Write any supported weights in this project's own format: DST/model.safetensors and DST/config.json.

python convert.py SRC DST
"""

import tyro

from checkpoints.store import convert
from runtime.command_line import run_script

if __name__ == "__main__":
    run_script(lambda: tyro.cli(convert))
