"""`faser policy`: which policy a running server uses, and another in its place.

    export FASER_ADMIN_KEY=...            # as the server's
    faser policy list
    faser policy show
    faser policy swap static:4            # or a file of the server's --policy-dir: ppo.pt
    faser policy bench                    # its fallback length instead, until: faser policy unbench

The routes that it asks are in `faser.serving.admin`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

from faser.serving.settings import ADMIN_KEY

URL = "http://127.0.0.1:8000"

ROUTES = {
    "list": ("GET", "policies"),
    "show": ("GET", "policy"),
    "swap": ("POST", "policy"),
    "bench": ("POST", "policy/bench"),
    "unbench": ("POST", "policy/unbench"),
}
"""Method and route by verb."""


class AdminError(Exception):
    """The server did not do it; the message is one line."""


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 1 the server refused or is not there, 2 the user's mistake."""
    args = _parser().parse_args(argv)
    if (key := key_of(args, "policy")) is None:
        return 2
    try:
        answer = ask(args.url, key, *ROUTES[args.verb], {"policy": args.policy} if args.verb == "swap" else None)
    except AdminError as error:
        print(f"faser policy: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        print(*(_listed(answer) if args.verb == "list" else _shown(answer)), sep="\n")
    return 0


def ask(url: str, key: str, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
    """What the server at `url` answers on one of its admin routes. Raises AdminError."""
    request = urllib.request.Request(
        f"{url.rstrip('/')}/faser/{route}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        method=method,
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the key goes to the server alone
    try:
        with direct.open(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise AdminError(f"{url} has no admin routes for us: it was started without a key, or elsewhere") from None
        try:
            reason = json.load(error)["error"]
        except (ValueError, KeyError, TypeError):
            reason = error.reason
        raise AdminError(f"refused ({error.code}): {reason}") from None
    except (OSError, ValueError) as error:
        raise AdminError(f"{url} does not answer: {getattr(error, 'reason', error)}; another server: --url") from None


def _listed(answer: dict[str, Any]) -> list[str]:
    lines = [f"{name:<17} {what}" for name, what in answer["rules"].items() if name != "FILE.pt"]
    for file in answer["files"]:
        what = f"refused: {file['refused']}" if "refused" in file else f"trained on {', '.join(file['models'])}"
        lines.append(f"{file['name']:<14} {what}")
    return lines


def _shown(answer: dict[str, Any]) -> list[str]:
    lines = []
    for i, engine in enumerate(answer["engines"]):
        lines.append(f"engine {i}: {said(engine)}")
        lines += [f"  arm {name}: {said(arm)}" for name, arm in engine.get("arms", {}).items()]
    return lines


def said(of: dict[str, Any]) -> str:
    """An engine, or one of its arms, in a line."""
    faults = ", ".join(f"{reason} {count}" for reason, count in of["fallbacks"].items()) or "none"
    return f"{of['policy']}{', BENCHED' if of['benched'] else ''}; {of['decisions']} decisions; fallbacks: {faults}"


def key_of(args: argparse.Namespace, command: str) -> str | None:
    """The admin key that `flags` got, or of the environment. None: there is none, which was said."""
    key: str | None = args.faser_admin_key or os.environ.get(ADMIN_KEY) or None
    if key is None:
        text = f"no admin key; set {ADMIN_KEY} to the server's, or give --faser-admin-key"
        print(f"faser {command}: {text}", file=sys.stderr)
    return key


def flags() -> argparse.ArgumentParser:
    """A parent parser: which server is asked, and with which key."""
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--url", default=URL, help="of the server (default: %(default)s)")
    server.add_argument("--faser-admin-key", default=None, help=f"default: {ADMIN_KEY}")
    return server


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = flags()
    common.add_argument("--json", action="store_true", help="print the server's answer as it is")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("list", parents=[common], help="what may be swapped in")
    verbs.add_parser("show", parents=[common], help="what is in force, engine by engine")
    swap = verbs.add_parser("swap", parents=[common], help="put another in force, on all engines or none")
    swap.add_argument("policy", help="a rule, or the name of a file in the server's --policy-dir")
    verbs.add_parser("bench", parents=[common], help="use the fallback length instead of the policy")
    verbs.add_parser("unbench", parents=[common], help="ask the policy again")
    return parser
