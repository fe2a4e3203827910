"""Tests against real engine servers; `make test-engines` makes their environments and says where they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The contract tests stand on the built-in engine's: the same models, the same collector.
sys.path.insert(0, str(Path(__file__).parent.parent / "instance"))
collect_ignore_glob = [] if os.environ.get("PENSTOCK_ENGINES") else ["test_*.py"]
