"""The server and the command line."""

import os

# Before torch is loaded: its threads wait for one another after every operation, and unless they are told not to they
# spin meanwhile, which takes several times as long where anything else wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
