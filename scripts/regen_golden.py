"""Write tests/golden/methods.json from tests/reference.py (float64, from the papers), never from our own output.

python scripts/regen_golden.py            # write
python scripts/regen_golden.py --check    # say whether the file is current
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import reference  # noqa: E402  (after the path is set)

GOLDEN = ROOT / "tests" / "golden" / "methods.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = json.dumps(reference.goldens(), indent=1) + "\n"
    if check:
        if not GOLDEN.exists() or GOLDEN.read_text() != text:
            raise SystemExit(f"{GOLDEN} is not what tests/reference.py gives; run scripts/regen_golden.py")
        return
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(text)


if __name__ == "__main__":
    main()
