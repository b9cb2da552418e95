"""Does the fast path know the sources of every diffusers release that it supports?

    python tests/check_hosts.py                      every release from 0.38.0 on: compare the hashes of its sources
    python tests/check_hosts.py 0.42.0 0.42.1        these releases
    python tests/check_hosts.py --run                and run denoising steps of every LTX-2 version on each, stock beside fast

Downloads one wheel a release from the package index with pip, into a temporary folder, and installs nothing: sources are read
from the wheel, and `--run` puts the unpacked wheel first on the path of a new process. It exits with 1 if a release is not known,
or if a step differs or was not fast. Needs network, so it is no test; run it when a release comes out. What to do about one that
is not known is said in ``patches/transformer/host.py``.
"""

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FIRST = (0, 38, 0)
FILES = (
    "diffusers/models/transformers/transformer_ltx2.py",
    "diffusers/models/normalization.py",
)


def releases(first: tuple = FIRST) -> list[str]:
    """The releases on the package index from `first` on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "diffusers", "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, version.split("."))): version for version in json.loads(answer)["versions"]}
    return [versions[key] for key in sorted(versions) if key >= first]


def download(release: str, folder: Path) -> Path:
    """The unpacked wheel of a release."""
    command = [sys.executable, "-m", "pip", "download", f"diffusers=={release}", "--no-deps", "--quiet", "--dest", folder]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(f"diffusers-{release}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / release)
    wheel.unlink()
    return folder / release


def source_of(name: str, text: str) -> str | None:
    """The source of "Class.method" or "function" in a file's text, as `inspect.getsource` gives it; None if it has none."""
    scope, found = ast.parse(text).body, None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next((node for node in scope if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            return None
        scope = found.body
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])


def hashes(folder: Path, names) -> dict[str, str | None]:
    """{name: hash} of the sources of a release, as `host.source_hash` makes them."""
    texts = [path.read_text() for path in map(folder.joinpath, FILES) if path.exists()]
    sources = {name: next(filter(None, (source_of(name, text) for text in texts)), None) for name in names}
    return {name: source and hashlib.sha256(source.encode()).hexdigest()[:16] for name, source in sources.items()}


STEPS = """
import inspect, sys, pytest, torch
import conftest, setups
import ltx2_fastpath
from ltx2_fastpath.testing import models
import diffusers
assert diffusers.__file__.startswith(sys.argv[1]), diffusers.__file__
torch.set_num_threads(1)
known = inspect.signature(diffusers.LTX2VideoTransformer3DModel.__init__).parameters
with pytest.MonkeyPatch.context() as patch:
    conftest.refuse_nothing(patch)
    launches = conftest.replace_kernels(patch)
    for version, config in models.CONFIGS.items():
        if not config.keys() <= known.keys():
            print(version, "not in this release", flush=True)
            continue
        stock, ours = models.tiny_transformer(version), models.tiny_transformer(version)
        before = launches.total()
        handle = ltx2_fastpath.enable(ours)
        assert handle.active, handle.reason
        for guidance in ("cfg", "stg", "isolated", "cfg", "stg"):
            for image_to_video in (False, True):
                options = dict(guidance=guidance, image_to_video=image_to_video)
                assert setups.equal(setups.step(stock, **options), setups.step(ours, **options)), (version, options)
        assert launches.total() > before and not handle.stock_calls and not handle.skipped
        ltx2_fastpath.disable(ours)
        print(version, "equal and fast", flush=True)
"""


def run(folder: Path) -> tuple[bool, str]:
    """Denoising steps on a release, in a process of its own: (whether all went well, what it said)."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", STEPS, str(folder)], env=environment, capture_output=True, text=True)
    said = ", ".join(done.stdout.split("\n")[:-1])
    return done.returncode == 0, said if done.returncode == 0 else "; ".join([said, *done.stderr.strip().splitlines()[-1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("releases", nargs="*", help="releases to check (default: all from 0.38.0 on)")
    parser.add_argument("--run", action="store_true", help="also run denoising steps on each release, stock beside fast")
    arguments = parser.parse_args()

    from ltx2_fastpath.patches.transformer import host

    fine = True
    print("| diffusers | sources | not known |" + (" steps |" if arguments.run else ""))
    print("|---|---|---|" + ("---|" if arguments.run else ""))
    with tempfile.TemporaryDirectory() as folder:
        for release in arguments.releases or releases():
            unpacked = download(release, Path(folder))
            found = hashes(unpacked, host.KNOWN)
            unknown = [f"{name} ({value or 'missing'})" for name, value in found.items() if value not in host.KNOWN[name]]
            fine = fine and not unknown
            row = f"| {release} | {len(found) - len(unknown)} of {len(found)} known | {', '.join(unknown) or 'none'} |"
            if arguments.run and not unknown:
                well, said = run(unpacked)
                fine = fine and well
                row += f" {said} |"
            print(row, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
