"""All benchmarks, one behind another, each against a plain baseline written out in its script; and docs/benchmarks.md.

python scripts/bench.py                      # all: about an hour on two cores, with nothing beside it
python scripts/bench.py --only evals,floors  # some; the page keeps what was measured of the others
python scripts/bench.py --quick              # each in its shortest form, printed and not kept: to see that they run

evals      scripts/bench_evals.py     shared work against one forward a length, one generate() a prompt
training   scripts/bench_training.py  a step against the plain Trainer's
alibi      scripts/bench_alibi.py     ALiBi against a whole bias as a mask
floors     scripts/bench_floors.py    the time against that of the products and attention in it

Results are kept in recipes/results/bench_NAME.json as they come, so that a run that is stopped loses only what it was
at; tables in the documentation are filled from there (scripts/regen_readme.py).
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from evals.rows import write_whole  # noqa: E402  (after the path is set)

KEPT = ROOT / "recipes" / "results"
SUITE = ("evals", "training", "alibi", "floors")


def measure(name: str, *, quick: bool) -> None:
    """Run one benchmark in a process of its own and keep what it prints."""
    command = [sys.executable, str(ROOT / "scripts" / f"bench_{name}.py"), *(["--quick"] if quick else ["--json"])]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True)  # noqa: S603  (our own words)
    if done.returncode:
        raise SystemExit(
            f"{name}: the benchmark failed with exit status {done.returncode}; the others are as they were"
        )
    if quick:
        print(done.stdout, flush=True)
        return
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if only_results_changed():
        found["commit"] = str(found["commit"]).removesuffix("-dirty")  # by what the suite has kept before
    if str(found["commit"]).endswith("-dirty"):
        print(f"{name}: measured with changes that are not committed; commit them and measure again to publish it")
    write_whole(KEPT / f"bench_{name}.json", json.dumps(found, indent=1) + "\n")
    for row in found["results"]:
        ratio = f"{row['ratio']:8.2f} times" if "ratio" in row else f"{row['share']:8.2f} of the time is the floor's"
        print(f"  {row['name']:28} {ratio}", flush=True)


def only_results_changed() -> bool:
    """Return whether nothing that is committed differs but results of benchmarks."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own words)
    changed = [line[3:] for line in done.stdout.splitlines()]
    return done.returncode == 0 and all(re.fullmatch(r"recipes/results/bench_\w+\.json", each) for each in changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(SUITE), help="comma list of them")
    parser.add_argument("--quick", action="store_true", help="the shortest form of each; nothing is kept")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = [name for name in names if name not in SUITE]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is no benchmark; there are {', '.join(SUITE)}")
    for name in names:
        measure(name, quick=args.quick)
    if not args.quick:
        fill = [sys.executable, str(ROOT / "scripts" / "regen_readme.py")]
        subprocess.run(fill, check=True, cwd=ROOT)  # noqa: S603  (our own words)
        print("docs/benchmarks.md")


if __name__ == "__main__":
    main()
