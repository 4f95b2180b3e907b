"""`megatron-lossagg explain`: who gets the weight in rollouts that you have, mode by mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from megatron_lossagg.cli.terminal import terminal_console
from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.reading.fields import FieldOptions
from megatron_lossagg.explain.reading.files import read_rollouts
from megatron_lossagg.explain.showing.terminal import print_explanation

_DEFAULT_OUT = Path("explain")


def explain(
    file: Annotated[
        Path, typer.Argument(help="Rollouts: .jsonl, .parquet, or an .npz with loss_mask [b, s].")
    ],
    modes: Annotated[
        str | None,
        typer.Option(help="Modes, separated by commas. Default: all that the file allows."),
    ] = None,
    loss_scale_factor: Annotated[
        float | None, typer.Option(help="L of the norm mode. Default: the longest response.")
    ] = None,
    buckets: Annotated[int, typer.Option(help="Number of length buckets.", min=1, max=12)] = 5,
    length_field: Annotated[
        str | None, typer.Option(help="Field with the number of valid tokens.")
    ] = None,
    mask_field: Annotated[
        str | None, typer.Option(help="Field with a list of 0 and 1 (in .npz an array [b, s]).")
    ] = None,
    response_field: Annotated[
        str | None, typer.Option(help="Field with token ids or text.")
    ] = None,
    reward_field: Annotated[str | None, typer.Option(help="Field with one number.")] = None,
    group_field: Annotated[
        str | None, typer.Option(help="Field that the responses to one prompt share.")
    ] = None,
    unit: Annotated[
        str, typer.Option(help="How text is counted: bytes (UTF-8) or words.")
    ] = "bytes",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the picture and the page. Default: explain/.", file_okay=False
        ),
    ] = None,
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw the picture; needs matplotlib.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; write files only if --out is given.")
    ] = False,
) -> None:
    """Show how much weight each mode gives a token, a response, a length and a reward.

    Reads rollouts, takes the whole file as one global batch, and prints tables and sentences;
    writes a PNG and an HTML page that needs nothing else. Fields are found by their usual names
    (loss_mask, response_length, response; reward, score; group_id, prompt_id, prompt), or named
    by options. Without masks, ids or lengths a response is counted in bytes. Exits with 2 on a
    file or an option that cannot be used.
    """
    try:
        options = FieldOptions(
            mask_field, length_field, response_field, reward_field, group_field, unit
        )
        explanation = Explanation.of(
            file.name, read_rollouts(file, options), _labels(modes), loss_scale_factor, buckets
        )
        files = {}
        if out is not None or not as_json:
            files = _write(explanation, out or _DEFAULT_OUT, file.stem, with_picture=picture)
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"explain: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        shown = {**explanation.to_dict(), "files": {kind: str(p) for kind, p in files.items()}}
        typer.echo(json.dumps(shown, indent=2, allow_nan=False))
        return
    console = terminal_console()
    print_explanation(explanation, console)
    for kind, path in files.items():
        console.print(Text(f"\n{kind}: {path}"), end="", soft_wrap=True)
    console.print()


def _labels(modes: str | None) -> list[str] | None:
    if modes is None:
        return None
    labels = [label.strip() for label in modes.split(",") if label.strip()]
    if not labels:
        raise ValueError(f"--modes {modes!r} names none; leave it out for all")
    return list(dict.fromkeys(labels))


def _write(
    explanation: Explanation, folder: Path, stem: str, *, with_picture: bool
) -> dict[str, Path]:
    from megatron_lossagg.explain.showing.page import page

    files = {}
    png = None
    if with_picture:
        from megatron_lossagg.explain.showing.picture import draw

        png = draw(explanation)
        files["picture"] = folder / f"{stem}.png"
    files["page"] = folder / f"{stem}.html"
    folder.mkdir(parents=True, exist_ok=True)
    if png is not None:
        files["picture"].write_bytes(png)
    files["page"].write_text(page(explanation, png), encoding="utf-8")
    return files
