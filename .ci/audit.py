"""`make audit`: known vulnerabilities of what is installed; 0 only if all was looked up.

`pip-audit` itself ends with 0 where an index, such as a mirror, knows none of anything.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

OURS = "co2sim-training"


def judge(found: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The exit code, and lines: 1 for vulnerabilities, 2 where packages could not be looked up."""
    packages = [one for one in found["dependencies"] if one["name"] != OURS]
    skipped = sorted(one["name"] for one in packages if "skip_reason" in one)
    lines = [
        f"{one['name']} {one['version']}: {flaw['id']}, mended in"
        f" {', '.join(flaw['fix_versions']) or 'no version'}"
        for one in packages
        for flaw in one.get("vulns", ())
    ]
    if skipped:
        lines.append(f"not looked up: {', '.join(skipped)}")
    checked = len(packages) - len(skipped)
    if not checked:
        return 2, ["audit: the index knows no vulnerabilities of any package; nothing was checked"]
    flaws = len(lines) - bool(skipped)
    lines.append(f"audit: {flaws} known vulnerabilities in {checked} packages")
    return 1 if flaws else 2 if skipped else 0, lines


def main(service: str) -> int:
    """Ask the service, `pypi` or `osv`, and print."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--format=json"]
    done = subprocess.run(
        [*command, "--progress-spinner=off", "--timeout=10", f"--vulnerability-service={service}"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"audit: the vulnerability service {service} gave no answer: {cause[:300]}")
        return 2
    code, lines = judge(found)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
