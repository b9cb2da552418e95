"""``python -m ltx2_fastpath``: what the fast path will do on this machine, and what to do about what is missing."""

import argparse
import json
import sys

from .console import Progress

EPILOG = """\
Takes under a minute. Exit status: 0 if the fast path will be active with every operation verified, 1 if it will be off, or
on in part. To report a fault, send the output of --json: it holds versions and verdicts, no paths and no names."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ltx2_fastpath",
        description="Check what the fast path will do on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"torch cannot be imported ({error}): https://pytorch.org says how to install it.", file=sys.stderr)
        return 1
    from . import check

    progress = Progress(sys.stderr)
    found = check.findings(progress)
    progress.clear()
    print(json.dumps(found, indent=1) if options.json else check.text(found))
    return 0 if found["outcome"]["active"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
