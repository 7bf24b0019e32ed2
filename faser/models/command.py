"""`faser models`: which models there are, and building them.

An inflated model is tens of gigabytes, so this command is the only thing that builds one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from faser.models import smollm2
from faser.models.cache import MANIFEST, default_cache, fault
from faser.models.json_file import read_json
from faser.models.names import DRAFT_SHAPE, INFLATED, gigabytes, inflated, known_models, resolve
from faser.models.pair import ModelError
from faser.models.place import Advance, place
from faser.models.shapes import SHAPES, Shape, shape_of


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    try:
        if args.action == "list":
            _list()
        else:
            _prepare(args)
    except ModelError as error:
        print(f"faser models: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"faser models: {error.strerror or error}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("faser models: stopped; nothing half-made was kept", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="faser models", description="Which models there are, and building them.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="the names, and what of them is in the cache")
    prepare = actions.add_parser(
        "prepare",
        help="build a model",
        description="Build a model: a name's, or with --source and --shape any Llama at any larger shape. "
        "An inflated model has the function of its source and the cost of its shape; it is not the model of that name.",
    )
    prepare.add_argument("name", nargs="?", metavar="NAME", help=", ".join(known_models()))
    prepare.add_argument(
        "--source", type=Path, metavar="DIR", help="inflate this Llama (default: smollm2); needs --out"
    )
    prepare.add_argument("--shape", help=f"{', '.join(SHAPES)}, or a config.json; instead of NAME, with --source")
    prepare.add_argument("--out", metavar="DIR", help="the model's directory (default: in the cache)")
    prepare.add_argument(
        "--draft",
        action="store_true",
        help=f"inflate smollm2's draft too, to {DRAFT_SHAPE}; with --out: DIR-draft",
    )
    prepare.add_argument("--device", default="cpu", help="where weights are made: cpu (default) or cuda, faster")
    return parser


def _list() -> None:
    cache = default_cache()
    print(f"cache: {cache}\n{'NAME':12}{'BUILT':7}{'SIZE':>8}  WHAT")
    for name in known_models():
        pair = resolve(name, cache=cache)
        parts = [pair.target, pair.draft] if name == smollm2.NAME else [pair.target]
        what = "SmolLM2-135M-Instruct and its draft of 15M parameters; serve and prepare build it"
        if name in INFLATED:
            what = f"SmolLM2's text at {name}'s cost, with the same draft; faser models prepare {name}"
        _print_row(name, [Path(str(part)) for part in parts], gigabytes(name), what)
    draft = inflated(Path(str(smollm2.pair(cache).draft)), SHAPES[DRAFT_SHAPE])
    what = f"the draft at {DRAFT_SHAPE}'s cost; faser models prepare NAME --draft"
    _print_row("(draft)", [draft], gigabytes(DRAFT_SHAPE), what)


def _print_row(name: str, directories: list[Path], size: float, what: str) -> None:
    faults = {fault(directory, verify=False) for directory in directories} - {None}
    built = "yes" if not faults else "no" if faults == {"missing"} else "broken"
    print(f"{name:12}{built:7}{size:5.1f} GB  {what}")


def _prepare(args: argparse.Namespace) -> None:
    name, source, shape = args.name, args.source, args.shape
    if name is not None and name not in known_models():
        raise ModelError(f"model is {name!r}; allowed: {', '.join(known_models())}; or --source and --shape")
    if (name is None) == (shape is None):
        raise ModelError(f"one of NAME ({', '.join(known_models())}) and --shape is needed, and not both")
    if name == smollm2.NAME and (source or args.draft):
        raise ModelError(f"--source and --draft inflate; {smollm2.NAME} is not inflated")
    if source is not None and args.draft:
        raise ModelError("--draft inflates smollm2's draft; inflate your own with --source DRAFT --shape SHAPE")
    if shape is not None and source is None:
        raise ModelError("--shape needs --source, the directory of a Llama")
    out = None if args.out is None else _out(args.out)
    if source is None:
        _prepare_known(name, out, args.draft, args.device)
    elif out is None:
        raise ModelError("--source needs --out, the directory to make")
    else:
        _inflate("model", source, shape_of(shape or name), out, args.device)


def _out(text: str) -> Path:
    """The directory to make, absolute. It has a name: beside it go others that have it too."""
    try:
        out = Path(text).expanduser()
    except RuntimeError:
        raise ModelError(f"--out is {text!r}; there is no such home") from None
    if out.name in ("", ".."):
        raise ModelError(f"--out is {text!r}; allowed: a directory to make, by its name")
    return out.absolute()


def _prepare_known(name: str, out: Path | None, with_draft: bool, device: str) -> None:
    small = smollm2.prepare(default_cache(), progress=True, verify=False)
    target, draft = Path(small.target), Path(str(small.draft))
    draft_out = out.with_name(f"{out.name}-draft") if out else None
    if name == smollm2.NAME:
        _say("target", _copied(target, out) if out else target)
        _say("draft", _copied(draft, draft_out) if draft_out else draft)
        return
    _inflate("target", target, SHAPES[name], out or inflated(target, SHAPES[name]), device)
    _say("draft", draft)
    if with_draft:
        shape = SHAPES[DRAFT_SHAPE]
        _inflate("inflated draft", draft, shape, draft_out or inflated(draft, shape), device)


def _inflate(what: str, source: Path, shape: Shape, out: Path, device: str) -> None:
    from faser.models.inflate import inflate  # torch: seconds

    _say(what, inflate(source, shape, out, device=device, progress=True))


def _copied(directory: Path, out: Path) -> Path:
    """A whole copy of a directory of the cache at `out`, which must be absent, empty, or a copy already."""
    files = [path for path in directory.iterdir() if path.name != MANIFEST]

    def write(made: Path, advance: Advance) -> None:
        for path in files:
            shutil.copyfile(path, made / path.name)
            advance(path.stat().st_size)

    config = read_json(directory / "config.json")
    return place(out, config, sum(path.stat().st_size for path in files), write, title=out.name, progress=True)


def _say(what: str, directory: Path) -> None:
    print(f"{what}: {directory}", flush=True)
