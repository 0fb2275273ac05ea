"""``python -m rljob_operator`` runs the operator."""

from __future__ import annotations

import sys

from rljob_operator.main import main

sys.exit(main())
