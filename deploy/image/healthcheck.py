# SPDX-License-Identifier: Apache-2.0
"""Exit status 0 if the server in this container takes requests: what /ready says."""

import sys
import urllib.request

try:
    with urllib.request.urlopen("http://127.0.0.1:8000/ready", timeout=4) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"not ready: {error}")
