"""A playground in the browser: fill in the gaps of a text token by token, in any order.

    python -m extras.playground.app
    python -m extras.playground.app out/quickstart --port 7861

The list of models has those of out/ and the folders of models/, such as a SmolLM2 in
models/smollm2. A plain GPT can only continue.

It needs gradio: `make playground` installs and starts it."""

import importlib.util
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval

from aogpt.runtime.command_line import run_script, show, visible, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.validation import check_values

from . import session as sessions
from .fill import view
from .session import RULES, Session, Settings

BOOKS = "results/books_model"
EXAMPLE = '"I am very glad to see you," said[MASK:4], and she smiled[MASK:3].'
INTRO = """# AO-GPT playground
The model fills in the gaps of a text one token at a time, in any order. **Step** fills
in the outlined blank. The order chooses that blank, or you do: click one. Then you can
also choose its token, or write your own. **Run** fills in all blanks; again, it draws
another text. One visitor is served at a time: *queue: 1* means that another visitor
comes first."""
GAPS = "[MASK:3]: three tokens. No space before a mask."
NO_GRADIO = "the playground needs gradio: pip install gradio, or make playground"
OWN = "Or write your own and press Enter (a word begins with a space)"


def models_of(run: str) -> list[str]:
    """Return the models of the list: the one to begin with, the books model, folders of
    models/ and runs of out/."""
    models = [run]
    if Path(BOOKS).exists():
        models.append(BOOKS)
    for folder in sorted(Path("models").glob("*")):
        if (folder / "config.json").is_file():
            models.append(str(folder))
    for folder in sorted(Path("out").glob("*")):
        if (folder / "checkpoints").is_dir():
            models.append(str(folder))
    return list(dict.fromkeys(models))


def page(run: str):
    try:
        import gradio as gr
    except ImportError:
        raise UserError(NO_GRADIO) from None

    rules = list(RULES.items())
    rules_beside = [(name, rule) for name, rule in rules if rule != "click"]
    # Visitors of a public space name no paths.
    any_path = "SPACE_ID" not in os.environ
    model_label = "Model: from the list, or a path" if any_path else "Model"
    script = Path(__file__).with_name("app.js").read_text("utf-8")

    with gr.Blocks(title="AO-GPT playground", analytics_enabled=False) as blocks:
        session = gr.State(Session())
        gr.Markdown(INTRO)
        with gr.Row():
            text = gr.Textbox(
                EXAMPLE, label="Text with gaps", info=GAPS, lines=2, min_width=320
            )
            model = gr.Dropdown(
                models_of(run),
                label=model_label,
                min_width=240,
                allow_custom_value=any_path,
            )
        with gr.Row():
            rule = gr.Dropdown(rules, value="confidence", label="Order", min_width=240)
            temperature = gr.Slider(0, 2, 0.7, step=0.1, label="Temperature")
            top_p = gr.Slider(0.05, 1, 0.9, step=0.05, label="Top-p")
            seed = gr.Number(0, label="Seed", precision=0)
            compare = gr.Checkbox(label="Compare two orders")
        with gr.Row(visible=False) as row_beside:
            beside_rule = gr.Dropdown(rules_beside, value="l2r", label="Order beside")
            beside_seed = gr.Number(0, label="Seed beside", precision=0)
        with gr.Row():
            step = gr.Button("Step", min_width=50, variant="primary")
            run_all = gr.Button("Run", min_width=50, variant="primary")
            undo = gr.Button("Undo", min_width=50)
            restart = gr.Button("Restart", min_width=50)
        board = gr.HTML(
            apply_default_css=False, html_template="<div></div>", js_on_load=script
        )
        own = gr.Textbox(label=OWN)
        controls = {
            "model": model,
            "text": text,
            "rule": rule,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "compare": compare,
            "beside_rule": beside_rule,
            "beside_seed": beside_seed,
            "own": own,
        }

        def on(event, action: str) -> None:
            """Let an event of the page do an action of `Session.act`."""

            def act(data: gr.EventData, session: Session, *values):
                settings = Settings(**dict(zip(controls, values, strict=True)))
                if action in ("select", "put"):
                    settings = replace(settings, clicked=data.value)
                error = ""
                try:
                    session.act(settings, action)
                except (UserError, OSError) as problem:
                    error = visible(problem, one_line=True)
                drawn = {"error": error, "views": views(session)}
                row = gr.Row(visible=settings.compare)
                return session, drawn, row, *session.seeds

            # One visitor at a time; the others are shown their place in the queue.
            event(
                act,
                inputs=[session, *controls.values()],
                outputs=[session, board, row_beside, seed, beside_seed],
                concurrency_id="model",
                show_progress="full",
                show_progress_on=board,
            )

        on(blocks.load, "restart")
        on(text.submit, "restart")
        on(model.change, "restart")
        on(restart.click, "restart")
        # `input`, not `change`, which is also where Run moves the seeds on.
        for control in (rule, seed, compare, beside_rule, beside_seed):
            on(control.input, "settings")
        on(step.click, "step")
        on(run_all.click, "run")
        on(undo.click, "undo")
        on(board.select, "select")
        on(board.click, "put")
        on(own.submit, "write")
    return blocks


def views(session: Session) -> list[dict]:
    """Return the texts for app.js to draw: the text, and the one beside."""
    drawn = []
    if session.fill is not None:
        drawn.append(view(session.fill, session.selected))
    if session.beside is not None:
        drawn.append(view(session.beside))
    return drawn


@dataclass(frozen=True)
class Arguments:
    """The command line of the playground."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = BOOKS
    """Run folder, exported folder, released weights or Hugging Face repo id to begin
    with."""
    port: Annotated[int, Interval(ge=1, le=65535)] | None = None
    """By default the first free one from 7860."""


def check_port(port: int) -> None:
    """Raise UserError for a port that cannot be listened on."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror}; give another, or leave it out for "
                "the first free one from 7860"
            ) from None


def main() -> None:
    """Serve the playground until Ctrl-C."""
    a = tyro.cli(
        with_help(Arguments),
        prog="python -m extras.playground.app",
        description=__doc__,
    )
    check_values(a)
    if a.run == BOOKS and not Path(BOOKS).exists():
        raise UserError("name a model: python -m extras.playground.app MODEL")
    if importlib.util.find_spec("gradio") is None:
        raise UserError(NO_GRADIO)  # before a model is loaded
    if a.port is not None:
        check_port(a.port)
    sessions.load(a.run)
    blocks = page(a.run)
    # Quiet: Gradio's lines name options of Python.
    _, address, _ = blocks.launch(
        server_port=a.port,
        quiet=True,
        prevent_thread_lock=True,
        share=False,
        css_paths=Path(__file__).with_name("app.css"),
        footer_links=["gradio", "settings"],
    )
    show(f"open {address} in a browser; Ctrl-C ends it")
    blocks.block_thread()


if __name__ == "__main__":
    run_script(main)
