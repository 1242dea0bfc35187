"""dist/mlx-gateway.cdx.json: what the pins install, as CycloneDX has it; no index is asked.

cyclonedx-py reads pins and pyproject.toml, which leaves the version to gateway/__init__.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import gateway

ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    """Write the bill of materials."""
    options = ("--pyproject", "pyproject.toml", "--mc-type", "application", "--output-reproducible")
    program = Path(sys.executable).with_name("cyclonedx-py")
    command = (str(program), "requirements", *options, "requirements/runtime.txt")
    bill = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    bill["metadata"]["component"]["version"] = gateway.__version__
    file = ROOT / "dist" / "mlx-gateway.cdx.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(bill, indent=1), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
