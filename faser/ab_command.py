"""`faser ab`: the A/B test of policies that runs in a server.

    export FASER_ADMIN_KEY=...            # as the server's
    faser ab show                         # the split, what runs now, and how each arm does
    faser ab stop --keep a                # that arm's policy alone, from the next step on, on all engines or none
    faser ab report                       # what differs between the arms, by how much, and what is not known
    faser ab report --log FILE --format html --out report.html      # the same from the log of a server

A test is started with the server: `faser serve --policy a=POLICY --policy b=POLICY`. The routes are in
`faser.serving.admin`.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faser.ab.page import page
from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.split import Split
from faser.ab.text import text
from faser.policy_command import AdminError, ask, flags, key_of, said

FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {
    "text": text,
    "json": partial(json.dumps, indent=2, allow_nan=False),
    "html": page,
}


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 1 the server refused or is not there, 2 the user's mistake."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except AdminError as error:
        print(f"faser ab: {error}", file=sys.stderr)
        return 1


def _key(args: argparse.Namespace) -> str:
    """The admin key. SystemExit 2: there is none."""
    if (key := key_of(args, "ab")) is None:
        raise SystemExit(2)
    return key


def _show(args: argparse.Namespace) -> int:
    answer = ask(args.url, _key(args), "GET", "ab")
    print(json.dumps(answer, indent=2) if args.json else "\n".join(_shown(answer)))
    return 0


def _stop(args: argparse.Namespace) -> int:
    answer = ask(args.url, _key(args), "POST", "ab/stop", {"keep": args.keep})
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print(*(f"engine {i}: {said(engine)}" for i, engine in enumerate(answer["engines"])), sep="\n")
    return 0


def _report(args: argparse.Namespace) -> int:
    try:
        records, split = _from_log(args.log) if args.log else _from_server(args.url, _key(args))
        if args.log and 0 < records.counts["lines"] == records.counts["unread"] + records.counts["torn"]:
            raise ValueError(f"--log {args.log} is no log of a server: none of its lines can be read")
        said = summary(records, split, baseline=args.baseline)
        told = FORMATS[args.format](said)
        if args.out is None:
            print(told, flush=True)
        else:
            args.out.write_text(f"{told}\n", encoding="utf-8")
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(
            f"faser ab: {f'{error.filename}: {error.strerror}' if isinstance(error, OSError) else error}",
            file=sys.stderr,
        )
        return 2
    return 0


def _from_server(url: str, key: str) -> tuple[Records, Split]:
    answer = ask(url, key, "GET", "ab/records")
    first, *others = [Records.from_json(engine) for engine in answer["engines"]]
    return first.merged(others), Split.from_json(answer["split"])


def _from_log(path: Path) -> tuple[Records, None]:
    """The log of a server's first engine, and of the others, which have their own beside it: FILE.dp1, FILE.dp2, ..."""
    beside = path.parent.glob(f"{glob.escape(path.name)}.dp*")
    others = [p for p in beside if p.name[len(path.name) + 3 :].isdecimal()]
    return Records.from_log(path).merged(Records.from_log(p) for p in sorted(others)), None


def _shown(answer: dict[str, Any]) -> list[str]:
    split, now = answer["split"], answer["now"]
    lines = [
        f"arm {arm['name']}: {arm['policy']}, {share:.1%}"
        for arm, share in zip(split["arms"], split["shares"], strict=True)
    ]
    by = "by request" if split["unit"] == "request" else f"by window of {split['window_s']:g} s"
    lines.append(f"{by}, {answer['running_s'] / 3600:.2f} h so far")
    if answer["kept"] is not None:
        lines.append(f"stopped; {answer['kept']} was kept")
    if now is not None:
        lines.append(f"now: {now['arm']}, window {now['window']}{', washout' if now['washout'] else ''}")
    for i, engine in enumerate(answer["engines"]):
        lines += [f"engine {i}: {name}={said(arm)}" for name, arm in engine.get("arms", {}).items()]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = flags()
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_show(verbs, server)
    _add_stop(verbs, server)
    _add_report(verbs, server)
    return parser


def _add_show(verbs: Any, server: argparse.ArgumentParser) -> None:
    show = verbs.add_parser("show", parents=[server], help="the split, what runs now, and how each arm does")
    show.add_argument("--json", action="store_true", help="print the server's answer as it is")
    show.set_defaults(run=_show)


def _add_stop(verbs: Any, server: argparse.ArgumentParser) -> None:
    stop = verbs.add_parser("stop", parents=[server], help="end the test; one arm's policy decides from now on")
    stop.add_argument("--keep", required=True, metavar="ARM", help="the arm whose policy stays in force")
    stop.add_argument("--json", action="store_true", help="print the server's answer as it is")
    stop.set_defaults(run=_stop)


def _add_report(verbs: Any, server: argparse.ArgumentParser) -> None:
    report = verbs.add_parser("report", parents=[server], help="what differs between the arms, and what is not known")
    report.add_argument("--log", type=Path, metavar="FILE", help="of a server's --faser-log, rather than ask a server")
    report.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: print it")
    report.add_argument("--baseline", metavar="ARM", help="the arm to hold others against (default: the first)")
    report.set_defaults(run=_report)
