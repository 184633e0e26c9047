# Each stage begins, goes on where it was interrupted, or has nothing to do: after a kill, run the same script again.
set -e
emrun train byol.yaml -q --output-dir log/byol --auto-resume
emrun train probe.yaml -q --output-dir log/probe --auto-resume
