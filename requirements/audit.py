"""Says what ``pip-audit --format json`` found, read from the standard input.

Ends with 1 where a pinned package has a known vulnerability, and with 0 where none has or where
nobody could be asked: then it says so, since no answer is no clean bill.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    try:
        packages = json.load(sys.stdin)["dependencies"]
    except (ValueError, KeyError, TypeError):
        print("No advisories could be had (is there a network?): the packages are not audited.")
        return 0
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    bad = [package for package in packages if package.get("vulns")]
    for package in bad:
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {found['id']}, mended in {fixed}.")
    audited = len(packages) - len(unknown)
    if not audited:
        print("No advisories could be had for any package: they are not audited.")
    else:
        print(f"{audited} packages audited, {len(bad)} with a known vulnerability.")
        if unknown:
            print(f"Not audited, being unknown to the service: {', '.join(unknown)}.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
