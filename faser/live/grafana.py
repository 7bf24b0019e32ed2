"""`faser grafana`: print a dashboard for Grafana, over FASER's series and vLLM's.

    faser grafana > faser.json     # in Grafana: Dashboards, New, Import

It asks for a Prometheus data source that scrapes the /metrics of one server or several.
"""

from __future__ import annotations

import argparse
from importlib.resources import files


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    argparse.ArgumentParser(
        prog="faser grafana", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    print(dashboard(), end="")
    return 0


def dashboard() -> str:
    """The dashboard, in the JSON that Grafana imports."""
    return (files("faser.live") / "grafana.json").read_text(encoding="utf-8")
